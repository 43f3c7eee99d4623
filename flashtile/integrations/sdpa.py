"""torch's registry of flash-attention implementations: `register()`, then `activate_flash_attention_impl("flashtile")`.

What torch calls its flash attention then runs here: `F.scaled_dot_product_attention` where it chooses that backend,
`torch.nn.attention.varlen.varlen_attn`, also over pages, context parallelism, nested tensors; of these varlen_attn runs on
CPUs too. `restore_flash_attention_impl()` undoes it.

    aten op                                     layout                    causal, where lengths differ
    _scaled_dot_product_flash_attention[_..]    (batch, heads, seqlen, d) top-left
    _flash_attention_forward, _backward         (batch, seqlen, heads, d), of varlen (total, heads, d); bottom-right
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.bias import Bias
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import FULL, Band
from flashtile.problem.options import Options
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.execute.packing import APART
from flashtile.torch.routes.operator import residual_shape, run_backward, run_forward
from flashtile.torch.routes.request import write

NAME = "flashtile"
Maybe = torch.Tensor | None
Asked = tuple[list[torch.Tensor], int, str, list[float], list[int]]


def register(name: str = NAME) -> None:
    """Make the name known to `torch.nn.attention.activate_flash_attention_impl`; nothing is active before that is called."""
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(name, register_fn=_activate)


class _Handle:
    """The kernels in force; torch calls `remove` to have its own back."""

    def __init__(self, libraries: list[torch.library.Library]):
        self.libraries = libraries

    def remove(self) -> None:
        for library in self.libraries:
            library._destroy()
        self.libraries.clear()


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_scaled_dot_product_flash_attention": _dense_forward,
        "_scaled_dot_product_flash_attention_backward": _dense_backward,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
        "_flash_attention_backward": _flash_backward,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops.aten, name):  # the one that writes in place came late
            for key in ("CUDA", "CPU") if name.startswith("_flash") else ("CUDA",):  # torch has none of these on a CPU
                library.impl(name, kernel, key)
    for name, kernel in {"": _Cpu.forward, "_backward": _Cpu.backward}.items():
        full = f"_scaled_dot_product_flash_attention_for_cpu{name}"
        _Cpu.original[name] = torch.library.get_kernel(f"aten::{full}", "CPU")
        library.impl(full, kernel, "CPU", with_keyset=True)
    return _Handle([library])


# -- what every op comes to -----------------------------------------------------------------------------------------------


def _ask(q: torch.Tensor, given: Given | None, wanted: int, **arguments: Any) -> Asked:
    """What `flashtile.torch.routes.operator` takes after q, k, v, which are as `attention` has them."""
    text, floats, ints, captured, others = write(APART, q, given, Arguments(return_lse=True, **arguments))
    return [*captured, *others], wanted, text, floats, ints


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, _ = run_forward(q, k, v, *asked)
    return out, lse


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, asked: Asked
) -> list[torch.Tensor]:
    """Gradients from an out and an lse that on a GPU may be of more keys than these (context parallelism merges them).

    Of float32, and of what few keys decide, the CPU backend makes p and delta anew: there they must be of these.
    """
    residual = lse.new_zeros(residual_shape(lse.shape, q.dtype))
    others, wanted, text, floats, ints = asked
    return run_backward(dout, None, q, k, v, others, out, lse.contiguous(), residual, wanted, text, floats, ints)


def _top_left(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Band:
    """Query i sees the keys up to i: on positions that are aligned bottom-right."""
    return Band(right=q.shape[1] - k.shape[1]) if causal else FULL


def _dropout(p: float, state: Maybe, device: torch.device) -> tuple[Dropout | None, torch.Tensor]:
    """(dropout, its seed and offset as torch hands them from the forward to the backward)."""
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=device)
        if p:
            state.random_()
    else:
        state = state.view(torch.int64)
    return (Dropout(p, state) if p else None), state.view(torch.uint64)


def _refuse(**asked: Any) -> None:
    """Raise NotSupported for what is asked here."""
    reasons = [f"{name} is given" for name, value in asked.items() if value is not None and value is not False]
    if reasons:
        raise NotSupported("torch's flash attention", {NAME: reasons})


# -- (batch, heads, seqlen, head_dim) -------------------------------------------------------------------------------------


def _dense_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(return_debug_mask=return_debug_mask, float32=query.dtype is torch.float32)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    dropout, state = _dropout(dropout_p, None, query.device)
    out, lse = _forward(q, k, v, _ask(q, None, 0, mask=_top_left(q, k, is_causal), scale=scale, dropout=dropout))
    return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], state, *_unused(query)


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _dense_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, *rest: Any, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    _cum_q, _cum_k, _max_q, _max_k, dropout_p, is_causal, state, _offset = rest
    q, k, v, out, dout = (t.transpose(1, 2) for t in (query, key, value, out, grad_out))
    dropout, _ = _dropout(dropout_p, state, query.device)
    asked = _ask(q, None, 7, mask=_top_left(q, k, is_causal), scale=scale, dropout=dropout)
    return tuple(grad.transpose(1, 2) for grad in _backward(q, k, v, out, logsumexp, dout, asked))


# -- (batch, seqlen, heads, head_dim) and (total, heads, head_dim) ---------------------------------------------------------


def _flash_arguments(
    q: torch.Tensor, lengths: tuple[Any, ...], causal: bool, wanted: int, dropout: Dropout | None, scale: float | None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Maybe = None,
    alibi_slopes: Maybe = None,
) -> Asked:  # fmt: skip
    cum_q, cum_k, max_q, max_k = lengths
    given = given_lengths(cu_seqlens_q=cum_q, cu_seqlens_k=cum_k, max_seqlen_q=max_q, max_seqlen_k=max_k, seqused_k=seqused_k)
    if cum_q is None:
        given = given_lengths(seqused_k=seqused_k)
    left, right = (None if n is None or n < 0 else n for n in (window_size_left, window_size_right))
    return _ask(
        q if cum_q is None else q[None], given, wanted, causal=bool(causal), window=(left, right), scale=scale, dropout=dropout,
        score=() if alibi_slopes is None else (Alibi(alibi_slopes),), options=_options(q),
    )  # fmt: skip


def _options(q: torch.Tensor) -> Options | None:
    """On a CPU the backend whose backward needs nothing but out and lse of the forward: torch keeps no more."""
    return None if q.is_cuda else Options(backend="cpu")


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: Maybe, cum_seq_k: Maybe, *rest: Any,
    scale: float | None = None, block_table: Maybe = None, num_splits: int | None = None, **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """num_splits: 1 is one pass over keys in pages; other keys are never split, whatever it is."""
    max_q, max_k, dropout_p, is_causal, return_debug_mask = rest
    _refuse(return_debug_mask=return_debug_mask, float32=query.is_cuda and query.dtype is torch.float32)
    dropout, state = _dropout(dropout_p, None, query.device)
    if block_table is not None:
        _refuse(dropout_p=bool(dropout_p))
        out, lse = _paged_forward(query, key, value, cum_seq_q, block_table, bool(is_causal), scale, num_splits, **named)
        return out, lse, state, *_unused(query)
    asked = _flash_arguments(query, (cum_seq_q, cum_seq_k, max_q, max_k), is_causal, 0, dropout, scale, **named)
    out, lse = _forward(query, key, value, asked)
    return out, lse, state, *_unused(query)


def _paged_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: Maybe, block_table: torch.Tensor, causal: bool,
    scale: float | None, num_splits: int | None, *, seqused_k: Maybe = None, alibi_slopes: Maybe = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) over keys in pages, (pages, page_size, heads, head_dim), of which each item uses seqused_k."""
    if seqused_k is None:
        raise InvalidProblem("block_table is given and seqused_k is None; it must say how many keys each item has.")
    left, right = (None if n is None or n < 0 else n for n in (window_size_left, window_size_right))
    try:
        return attention_cached(
            query, key, value, block_table, seqused_k=seqused_k, cu_seqlens_q=cum_seq_q, causal=causal, window=(left, right),
            scale=scale, score=() if alibi_slopes is None else (Alibi(alibi_slopes),), return_lse=True,
            split=0 if num_splits == 1 else None, options=_options(query),
        )  # fmt: skip
    except InvalidProblem as error:
        named = {"q": "query", "k_cache": "key", "v_cache": "value", "page_table": "block_table", "cu_seqlens_q": "cu_seq_q"}
        raise renamed(error, named) from None


def _flash_forward_into(out: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    made, lse, *_ = _flash_forward(*given, **named)
    out.copy_(made)
    return lse


def _flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: Maybe, cum_seq_k: Maybe, *rest: Any, scale: float | None = None, **named: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    max_q, max_k, dropout_p, is_causal, state, _unused = rest
    dropout, _ = _dropout(dropout_p, state, query.device)
    asked = _flash_arguments(query, (cum_seq_q, cum_seq_k, max_q, max_k), is_causal, 7, dropout, scale, **named)
    return tuple(_backward(query, key, value, out, logsumexp, grad_out, asked))


# -- the CPU's op ---------------------------------------------------------------------------------------------------------


class _Cpu:
    """torch's flash attention of the CPU, (batch, heads, seqlen, head_dim), with a mask that is added.

    The CPU backend itself calls that op for problems that it computes exactly: from within it is torch's own.
    """

    original: ClassVar[dict[str, Any]] = {}
    inside = threading.local()

    @classmethod
    def forward(
        cls, keys: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Maybe = None, scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if cls.keeps(query):
            how: dict[str, Any] = {"attn_mask": attn_mask, "scale": scale}
            return cls.original[""].call_boxed(keys, query, key, value, dropout_p, is_causal, **how)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        with _Busy(cls.inside):
            out, lse = _forward(q, k, v, cls.asked(q, k, 0, is_causal, attn_mask, scale))
        laid = torch.empty_like(query).copy_(out.transpose(1, 2))
        return laid, lse.mT.contiguous().mT

    @classmethod
    def backward(
        cls, keys: Any, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        logsumexp: torch.Tensor, dropout_p: float, is_causal: bool, *, attn_mask: Maybe = None, scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        if cls.keeps(query):
            return cls.original["_backward"].call_boxed(
                keys, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )  # fmt: skip
        q, k, v, out, dout = (t.transpose(1, 2) for t in (query, key, value, out, grad_out))
        with _Busy(cls.inside):
            grads = _backward(q, k, v, out, logsumexp, dout, cls.asked(q, k, 7, is_causal, attn_mask, scale))
        return tuple(grad.contiguous().transpose(1, 2) for grad in grads)

    @classmethod
    def keeps(cls, query: torch.Tensor) -> bool:
        """Whether a call is torch's own: one from within, or of float64, which is not computed here."""
        return getattr(cls.inside, "busy", False) or query.dtype is torch.float64

    @staticmethod
    def asked(q: torch.Tensor, k: torch.Tensor, wanted: int, causal: bool, bias: Maybe, scale: float | None) -> Asked:
        score = () if bias is None else (Bias(bias),)  # its own numbers: q's dtype may round them
        return _ask(q, None, wanted, mask=_top_left(q, k, causal), scale=scale, score=score, options=Options(backend="cpu"))


class _Busy:
    """While this is entered, the thread is inside."""

    def __init__(self, inside: Any):
        self.inside = inside

    def __enter__(self) -> None:
        self.inside.busy = True

    def __exit__(self, *_: Any) -> None:
        self.inside.busy = False
