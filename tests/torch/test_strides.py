"""Any strides give the results of contiguous tensors; also for the gradients that arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile.problem.options import Variant
from flashtile.torch.execute.replay import laid
from tests.backends import unrepeatable
from tests.cases import Case, Tensors
from tests.judge import run


@dataclass(frozen=True)
class Storage:
    """How a tensor lies in memory: order of its dimensions (outermost first), gaps, what is expanded, where it starts.

    `absurd` is the stride that a dimension of size 1 claims to have.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    expanded: tuple[bool, ...]
    offset: int
    absurd: int


@st.composite
def storages(draw: st.DrawFn, dims: int) -> Storage:
    flags = draw(st.lists(st.sampled_from((False, False, False, True)), min_size=dims, max_size=dims))
    return Storage(
        order=tuple(draw(st.permutations(range(dims)))),
        steps=tuple(draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))),
        expanded=tuple(flags),
        offset=draw(st.integers(0, 9)),
        absurd=draw(st.sampled_from((0, 1, 7, 2**20 + 1))),
    )


def stored(tensor: torch.Tensor, storage: Storage) -> torch.Tensor:
    """A view with `tensor`'s values (the first one repeated where expanded) into memory full of NaN."""
    strides, room = [0] * tensor.dim(), 1
    for axis in reversed(storage.order):
        if not storage.expanded[axis]:
            strides[axis] = room * storage.steps[axis]
            room = strides[axis] * tensor.shape[axis]
    memory = torch.full((storage.offset + room + 8,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    base = [1 if e else n for n, e in zip(tensor.shape, storage.expanded, strict=True)]
    view = memory.as_strided(base, strides, storage.offset)
    view.copy_(tensor[tuple(slice(n) for n in base)])
    strides = [storage.absurd if n == 1 else s for n, s in zip(tensor.shape, strides, strict=True)]
    return memory.as_strided(tensor.shape, strides, storage.offset)


def compare(backend: str, case: Case, tensors: Tensors, storage: dict[str, Storage]) -> None:
    """The same bits; but a GPU's compiler arranges a row by its strides, and sums it in that order."""
    views = {name: stored(t, storage[name]) for name, t in tensors.items()}
    plain = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    got, expected = run(backend, case, views), run(backend, case, plain)
    for name, tensor in expected.items():
        largest = tensor.nan_to_num(neginf=0.0).abs().max().item()
        units = 64 * 2.0**-23 + 2 * torch.finfo(tensor.dtype).eps  # float32 sums, rounded
        rounding = units * largest if tensor.is_cuda else 0.0
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=rounding, msg=lambda text, name=name: f"{name}: {text}")


CASE = Case("strides", batch=2, seqlen_q=18, seqlen_k=34, heads_kv=1, head_dim=5, head_dim_v=16, causal=True, backward="split")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Case, dict[str, Storage]]:
    score = draw(st.sampled_from(((), ("alibi-per-batch",), ("softcap",))))
    case = replace(CASE, batch=draw(st.integers(1, 2)), score=score, dtype=draw(st.sampled_from(("fp32", "fp16", "bf16"))))
    case = replace(case, heads_q=draw(st.integers(1, 2)), seqlen_q=draw(st.sampled_from((1, 18))))
    names = {"q": 4, "k": 4, "v": 4, "dout": 4, "dlse": 3, **({"score.0": 2} if score == ("alibi-per-batch",) else {})}
    return case, {name: draw(storages(dims)) for name, dims in names.items()}


def test_any_strides(backend: str, place: torch.device) -> None:
    interpreted = backend != "cpu" and place.type == "cpu"  # a second an example; on a GPU, many compile kernels

    @settings(max_examples=8 if interpreted else 40 if place.type == "cuda" else 300)
    @given(layouts())
    def check(layout: tuple[Case, dict[str, Storage]]) -> None:
        case, storage = layout
        compare(backend, case, case.tensors(place), storage)

    check()


PLAIN = Storage((0, 1, 2, 3), (1, 1, 1, 1), (False,) * 4, 0, 1)
NAMED = {
    "permuted": replace(PLAIN, order=(3, 1, 0, 2)),
    "gaps": replace(PLAIN, steps=(2, 3, 2, 1)),
    "strided-head_dim": replace(PLAIN, steps=(1, 1, 1, 2)),
    "expanded-batch": replace(PLAIN, expanded=(True, False, False, False)),
    "expanded-seqlen": replace(PLAIN, expanded=(False, True, False, False)),
    "expanded-heads": replace(PLAIN, expanded=(False, False, True, False)),
    "expanded-everything": replace(PLAIN, expanded=(True,) * 4),
    "misaligned": replace(PLAIN, offset=1),
    "absurd": replace(PLAIN, absurd=2**40),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_tensor_in_one_layout(backend: str, place: torch.device, name: str, variant: Variant) -> None:
    reasons = unrepeatable(backend, place, variant)
    if reasons and place.type == "cuda":  # interpreted, programs run one after another
        pytest.skip("; ".join(reasons))
    case = replace(CASE, name=name, heads_q=2, backward=variant, batch=1 if name == "absurd" else 2)
    storage = dict.fromkeys(("q", "k", "v", "dout"), NAMED[name])
    storage["dlse"] = Storage((0, 1, 2), NAMED[name].steps[:3], NAMED[name].expanded[:3], NAMED[name].offset, 1)
    compare(backend, case, case.tensors(place), storage)


def test_what_is_laid_out_alike_is_not_copied() -> None:
    """Of an axis with one place any stride says the same; results stay tensors of their own, not views."""
    made = torch.randn(2, 1, 3, 4)
    for strides, moved in (((12, 12, 4, 1), False), ((12, 24, 4, 1), False), ((4, 24, 8, 1), True)):
        found = laid(made, strides)
        assert found.stride() == strides
        assert (found.data_ptr() != made.data_ptr(), found._is_view()) == (moved, False)
        assert torch.equal(found, made)
    assert made.stride() == (12, 12, 4, 1)
    assert laid(made, None, torch.float64).dtype is torch.float64
