"""flash-attention 2's passes one by one: what ring attention and training frameworks import from `flash_attn_interface`.

Nothing here records a graph. The backward takes any out and lse, such as those of a ring's whole softmax.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import Asked, blind_rows_positive, drawn_rng_state, longest, refuse
from flashtile.compat.flash_attn_cache import attend_packed
from flashtile.compat.probabilities import dropout_signs
from flashtile.errors import InvalidProblem
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.execute.prepared import PreparedCall
from flashtile.torch.routes.eager import attend, prepare

USE_TRITON_ROCM = False
Tensors = tuple[torch.Tensor, ...]
Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys relative to whose largest score S_dmask's are: all of them here, however many."""
    return 2**30


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None, return_softmax: bool,
) -> Made:  # fmt: skip
    """(out, lse, S_dmask, rng_state), as `flash_attn_func` has them; rng_state int64 (2,), (seed, offset) of dropout."""
    window = (window_size_left, window_size_right)
    asked = Asked(softmax_scale, causal, window, softcap, alibi_slopes, False, dropout_p)
    with torch.no_grad():
        rng_state = drawn_rng_state(q.device) if dropout_p else torch.zeros(2, dtype=torch.int64, device=q.device)
        out, lse = attention(q, k, v, return_lse=True, **asked.arguments(rng_state))
        signs = dropout_signs(q, k, asked, rng_state) if return_softmax and dropout_p else q.new_empty(0)
        return out, blind_rows_positive(lse), signs, rng_state


def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False, block_table: Any = None, leftpad_k: Any = None, seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False, num_splits: int = 0,
) -> Made:  # fmt: skip
    """As `_flash_attn_forward`, of items one after another; with block_table, int32 (batch, columns), k and v are pages, and an
    item has seqused_k keys, or those of cu_seqlens_k. zero_tensors asks for what is so anyway: no element is left out.
    """
    refuse("_flash_attn_varlen_forward", {
        "leftpad_k is given; an item's keys begin where cu_seqlens_k says": leftpad_k is not None,
        f"num_splits is {num_splits}; keys are not split": num_splits not in (0, 1),
    })  # fmt: skip
    asked = Asked(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, False, dropout_p)
    most = (longest(max_seqlen_q), longest(max_seqlen_k))
    if block_table is not None:
        with torch.no_grad():
            starts = (cu_seqlens_q, cu_seqlens_k)
            out, lse = attend_packed((q, k, v), starts, block_table, asked, "block_table", used=seqused_k)
            return out, blind_rows_positive(lse), q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)
    with torch.no_grad():
        rng_state = drawn_rng_state(q.device) if dropout_p else torch.zeros(2, dtype=torch.int64, device=q.device)
        out, lse = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=most[0], max_seqlen_k=most[1], seqused_k=seqused_k,
            return_lse=True, **asked.arguments(rng_state),
        )  # fmt: skip
        signs = q.new_empty(0)
        if return_softmax and dropout_p:
            refuse("_flash_attn_varlen_forward", {"return_softmax and seqused_k are given; S_dmask knows whole items alone":
                                                  seqused_k is not None})  # fmt: skip
            signs = dropout_signs(q, k, asked, rng_state, (cu_seqlens_q, cu_seqlens_k), most)
        return out, blind_rows_positive(lse), signs, rng_state


def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The gradients, written to dq, dk and dv where given; returns softmax_d = sum(dout * out), float32 and as lse lies."""
    asked = Asked(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, dropout_p)
    return backward_pass(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), asked, rng_state, None)


def _flash_attn_varlen_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    deterministic: bool, rng_state: torch.Tensor | None = None, zero_tensors: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As `_flash_attn_backward`, of items one after another."""
    asked = Asked(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes, deterministic, dropout_p)
    given = given_lengths(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest(max_seqlen_q),
        max_seqlen_k=longest(max_seqlen_k),
    )  # fmt: skip
    return backward_pass(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), asked, rng_state, given)


def backward_pass(
    dout: torch.Tensor, inputs: Tensors, made: tuple[torch.Tensor, torch.Tensor], gradients: tuple[torch.Tensor | None, ...],
    asked: Asked, rng_state: torch.Tensor | None, given: Given | None,
) -> torch.Tensor:  # fmt: skip
    """sum(dout * out), after writing the gradients that are not None. inputs: q, k, v; made: out, lse; given: their lengths."""
    if asked.dropout_p and rng_state is None:
        raise InvalidProblem(f"dropout_p is {asked.dropout_p} and rng_state is None; it must be what the forward returned.")
    with torch.no_grad():
        out, lse = made
        delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
        rows = delta
        if given is not None and given.varlen:
            inputs, (dout, out, lse, rows) = tuple(t[None] for t in inputs), (t[None] for t in (dout, out, lse, rows))
        inputs = tuple(_as_made(t) for t in inputs)
        call, others = prepare(*inputs, given=given, return_lse=True, **asked.arguments(rng_state))
        others = tuple(t.detach() for t in others)
        wanted = frozenset(name for name, gradient in zip("qkv", gradients, strict=True) if gradient is not None)
        made = (_as_made(out), _as_made(lse.masked_fill(lse == torch.inf, -torch.inf)))
        if call.plan.backend == "cpu" or len(call.kept) > 2:
            formed = _backward_again(call, others, inputs, wanted, dout, made[1], rows)
        else:
            formed = call.tensors(inputs, others) | dict(zip(("out", "lse"), made, strict=True)) | {"dout": dout}
            call.backward(formed, inputs, wanted, asked.deterministic or torch.are_deterministic_algorithms_enabled())
        for name, gradient in zip("qkv", gradients, strict=True):
            if gradient is not None:
                gradient.copy_(formed[f"d{name}"].view(gradient.shape))
        return delta


def _backward_again(
    call: PreparedCall, others: Tensors, inputs: Tensors, wanted: frozenset[str], dout: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients by a forward of their own, where a backward wants more of it than out and lse, or makes lse anew.

    With p the probabilities of that forward, those asked for are w p, w = exp(its lse - lse): ds = w p (dp - delta) is what
    it gives for the gradients w dout of out and w (its delta - delta) of lse.
    """
    leaves = tuple(t.detach().requires_grad_(name in wanted) for name, t in zip("qkv", inputs, strict=True))
    with torch.enable_grad():
        own_out, own_lse = attend(call, others, *leaves)
    weight = torch.where(lse == -torch.inf, 0.0, (own_lse.detach() - lse).exp())
    own_delta = (dout.float() * own_out.detach().float()).sum(-1).transpose(1, 2)
    dlse = torch.where(weight == 0.0, 0.0, weight * (own_delta - delta))  # delta of padding may be anything
    made, grads = (own_out, own_lse), ((dout * weight.transpose(1, 2)[..., None]).to(dout.dtype), dlse)
    if call.device.type == "cpu" and not dlse.any():  # where lse is that forward's own: then the gradients have its bits, too
        made, grads = made[:1], grads[:1]
    names = [name for name in "qkv" if name in wanted]
    found = torch.autograd.grad(made, [t for t in leaves if t.requires_grad], grads) if names else ()
    return {f"d{name}": grad for name, grad in zip(names, found, strict=True)}


def _as_made(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a forward would have made it: dense and aligned, which a prepared backward takes for granted."""
    strides, step = list[int](), 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    if tensor.stride() == tuple(strides) and not tensor.data_ptr() & 15:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class flash_attn_gpu:  # noqa: N801
    """The extension module `flash_attn_2_cuda`, which takes all arguments by place."""

    @staticmethod
    def fwd(q: Any, k: Any, v: Any, out: Any, alibi_slopes: Any, *rest: Any) -> Made:
        """`_flash_attn_forward`; rest: dropout_p, ..., return_softmax, generator. out may be a tensor to write to."""
        dropout_p, scale, causal, left, right, softcap, softmax, generator = rest
        _check_generator(generator)
        made = _flash_attn_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi_slopes, softmax)
        return made if out is None else (out.copy_(made[0]), *made[1:])

    @staticmethod
    def varlen_fwd(
        q: Any, k: Any, v: Any, out: Any, cu_q: Any, cu_k: Any, seqused_k: Any, leftpad_k: Any, block_table: Any, *rest: Any
    ) -> Made:
        """`_flash_attn_varlen_forward`; rest: alibi_slopes, max_seqlen_q, ..., return_softmax, generator, num_splits."""
        slopes, most_q, most_k, dropout_p, scale, zero, causal, left, right, softcap, softmax, generator, *splits = rest
        _check_generator(generator)
        made = _flash_attn_varlen_forward(
            q, k, v, cu_q, cu_k, most_q, most_k, dropout_p, scale, causal, left, right, softcap, slopes, softmax, block_table,
            leftpad_k, seqused_k, zero, *splits,
        )  # fmt: skip
        return made if out is None else (out.copy_(made[0]), *made[1:])

    @staticmethod
    def bwd(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, alibi_slopes: Any, *rest: Any
    ) -> Made:
        """(dq, dk, dv, softmax_d) of `_flash_attn_backward`; rest: dropout_p, ..., deterministic, generator, rng_state."""
        dropout_p, scale, causal, left, right, softcap, deterministic, generator, rng_state = rest
        _check_generator(generator)
        dq, dk, dv = (torch.empty_like(t) if d is None else d for d, t in ((dq, q), (dk, k), (dv, v)))
        delta = _flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, dropout_p, scale, causal, left, right, softcap, alibi_slopes, deterministic,
            rng_state,
        )  # fmt: skip
        return dq, dk, dv, delta

    @staticmethod
    def varlen_bwd(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, cu_q: Any, cu_k: Any, *rest: Any
    ) -> Made:
        """As `bwd`; rest: alibi_slopes, max_seqlen_q, ..., deterministic, generator, rng_state."""
        slopes, most_q, most_k, dropout_p, scale, zero, causal, left, right, softcap, deterministic, generator, state = rest
        _check_generator(generator)
        dq, dk, dv = (torch.empty_like(t) if d is None else d for d, t in ((dq, q), (dk, k), (dv, v)))
        delta = _flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, most_q, most_k, dropout_p, scale, causal, left, right, softcap,
            slopes, deterministic, state, zero,
        )  # fmt: skip
        return dq, dk, dv, delta


def _check_generator(generator: Any) -> None:
    if generator is not None:
        raise RuntimeError("The `generator` argument is no longer supported; it must be None.")
