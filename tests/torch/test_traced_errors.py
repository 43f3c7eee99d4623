"""What is refused says the same under torch.compile: the caller's argument, not the operator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Alibi, Document, Dropout, InvalidProblem, NotSupported, Softcap, Stored, ops
from flashtile.compat import flash_attn_3


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(**arguments: Any) -> Callable[[], Any]:
    q = torch.randn(1, 8, 2, 16)
    return lambda: flashtile.attention(q, q, q, **arguments)


def loss(**arguments: Any) -> Callable[[], Any]:
    return lambda: ops.cross_entropy(t(3, 5), t(3, dtype=torch.int64), **arguments)


def norm(**arguments: Any) -> Callable[[], Any]:
    return lambda: ops.layer_norm(t(3, 8), **arguments)


BAD: dict[str, Callable[[], Any]] = {
    "scale": call(scale="x"),
    "scale-tensor": call(scale=t(1)),
    "score-tensor": call(score=t(2)),
    "scale-infinite": call(scale=float("inf")),
    "score": call(score=(3.0,)),
    "options": call(options="cpu"),
    "return_lse": call(return_lse=1),
    "causal": call(causal=1),
    "window": call(window=(-1, 2)),
    "window-tensor": call(window=t(2)),
    "window-distance": call(window=(t(1), 0)),
    "band-tensor": lambda: flashtile.attention(*[t(1, 8, 2, 16)] * 3, mask=flashtile.Band(t(1))),  # pyright: ignore
    "mask": call(mask=t(8, 8)),
    "mask-dtype": call(mask=Document(t(8, dtype=torch.int16))),
    "mask-shape": call(mask=Stored(t(1, 1, 3, 3, dtype=torch.bool))),
    "sink": call(sink=3.0),
    "sink-dtype": call(sink=t(2, dtype=torch.float64)),
    "sink-shape": call(sink=t(3)),
    "dropout": call(dropout=0.5),
    "dropout-seed": call(dropout=Dropout(0.5, t(2))),
    "slopes-dtype": call(score=(Alibi(t(2, dtype=torch.float64)),)),
    "slopes-shape": call(score=(Alibi(t(3)),)),
    "smoothing": loss(label_smoothing=2.0),
    "smoothing-text": loss(label_smoothing="a"),
    "reduction": loss(reduction="average"),
    "dropout_p": norm(dropout=2.0),
    "branch": norm(branch=ops.Branch(x=t(3, 8), bias=t(8))),
    "subset": norm(subset=ops.Subset(out=t(3, dtype=torch.int32))),
    "rowscale": norm(rowscale=float("nan")),
    "weight": lambda: ops.linear_act(t(3, 8), t(7, 5)),
    "bias": lambda: ops.linear_act(t(3, 8), t(7, 8), t(3)),
    "softmax-mask": lambda: ops.softmax(t(1, 2, 3, 8), t(3, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", BAD)
def test_compiled_errors_are_the_eager_ones(name: str) -> None:
    with pytest.raises(InvalidProblem) as eager:
        BAD[name]()
    torch._dynamo.reset()
    with pytest.raises(Exception) as compiled:  # noqa: PT011 (torch.compile's own, with ours in its text)
        torch.compile(BAD[name], backend="eager", fullgraph=True)()
    assert str(eager.value) in str(compiled.value).replace("\\'", "'")


E4M3 = t(1, 8, 2, 16).to(torch.float8_e4m3fn).requires_grad_()
CACHE = torch.randn(1, 8, 2, 16).requires_grad_()
REFUSED: dict[str, Callable[[], Any]] = {
    "stored": lambda: flashtile.attention(E4M3, E4M3, E4M3, options=flashtile.Options(precision="fp8")),
    "cache": lambda: flashtile.attention_cached(CACHE, CACHE, CACHE, seqused_k=t(1, dtype=torch.int32)),
    "append": lambda: flashtile.append_to_cache(CACHE, CACHE, CACHE, CACHE, seqused_k=t(1, dtype=torch.int32)),
    "sm_margin": lambda: flash_attn_3.flash_attn_func(CACHE, CACHE, CACHE, sm_margin=8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_compiled_refusals_give_the_reasons(name: str) -> None:
    with pytest.raises(NotSupported) as eager:
        REFUSED[name]()
    torch._dynamo.reset()
    with pytest.raises(Exception) as compiled:  # noqa: PT011 (as above)
        torch.compile(REFUSED[name], backend="eager", fullgraph=True)()
    for reason in (eager.value.request, *(line for lines in eager.value.reasons.values() for line in lines)):
        assert reason in str(compiled.value).replace("\\'", "'")


def test_symbolic_numbers_are_numbers() -> None:
    torch._dynamo.reset()

    def function(q: torch.Tensor) -> torch.Tensor:
        size = q.shape[-1]
        return flashtile.attention(q, q, q, scale=size**-0.5, score=(Softcap(2.0 * size),))

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for size in (16, 24, 32):
        q = torch.randn(1, 8, 2, size)
        torch.testing.assert_close(compiled(q), function(q))
