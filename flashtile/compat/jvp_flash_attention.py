"""`JVPAttn` and `attention` of jvp_flash_attention 0.14.0: attention with tangents, by its names.

What its documentation says is computed. Its kernels add -100 to what a mask hides, before the scale, so that a little of it is
left; here it is hidden. Sequences may have any lengths, head dims and strides, and keys fewer heads than queries. Tangents need
no function of their own: `attention` has them as `JVPAttn.fwd_dual` does, also under `torch.func.jvp`, and what goes back
through them.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import options, refuse, top_left
from flashtile.errors import InvalidProblem
from flashtile.features.masks.stored import Stored
from flashtile.features.scores.bias import Bias
from flashtile.problem.number import plain
from flashtile.torch.api.attention import attention as ours

MASK_CONST = -100.0  # what in a mask of numbers says that a position is hidden


class JVPAttn:
    """The namespace of its functions; it is no autograd.Function, and has no `apply`."""

    @staticmethod
    def fwd(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        causal: bool = False, sm_scale: float | None = None, warp_specialize: bool = True, USE_TMA: bool = True,
        verify_attn_mask: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """out, shaped as q, differentiable in every mode, twice too.

        q, k, v: (batch, heads, seqlen, head_dim). attn_mask: what broadcasts to (batch, heads, seqlen_q, seqlen_k); bool, True
        takes part, or of q's dtype, added to the scaled scores, MASK_CONST hides. causal: counted from the first key, not
        beside a mask. sm_scale: 1 / sqrt(head_dim) by default. dropout_p: 0. verify_attn_mask: whether a mask of numbers may
        have neither inf nor NaN, which waits for the device. warp_specialize, USE_TMA: hints that change no result.

        Raises InvalidProblem, NotSupported.
        """
        refuse(
            "jvp_flash_attention's attention", {f"dropout_p is {dropout_p}; that library has 0 alone": plain(dropout_p) != 0}
        )
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise InvalidProblem(f"{name} is {shape}; it must be a tensor (batch, heads, seqlen, head_dim).")
        if causal and attn_mask is not None:
            raise InvalidProblem("causal is True and attn_mask is given; it must be one of them.")
        mask, score = top_left(causal, q.shape[2], k.shape[2]), ()
        if attn_mask is not None:
            mask, score = _mask_of(attn_mask, q, k, verify_attn_mask)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return ours(q, k, v, mask=mask, score=score, scale=sm_scale, options=options()).transpose(1, 2)

    fwd_dual = fwd


attention = JVPAttn.fwd


def _mask_of(attn_mask: Any, q: torch.Tensor, k: torch.Tensor, verify: bool) -> tuple[Any, tuple[Any, ...]]:
    """(mask, modifiers)."""
    shape = (*q.shape[:3], k.shape[2])
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.dtype not in (torch.bool, q.dtype):
        kind = attn_mask.dtype if isinstance(attn_mask, torch.Tensor) else type(attn_mask).__name__
        raise InvalidProblem(f"attn_mask is {kind}; it must be a tensor of bool or of q's dtype, {q.dtype}.")
    try:
        attn_mask.expand(shape)
    except RuntimeError:
        raise InvalidProblem(f"attn_mask has shape {tuple(attn_mask.shape)}; it must broadcast to {shape}.") from None
    four = attn_mask[(None,) * (4 - attn_mask.dim())]
    if attn_mask.dtype is torch.bool:
        return Stored(four), ()
    if verify and not bool(four.isfinite().all()):
        raise InvalidProblem("attn_mask has inf or NaN; what is hidden must be MASK_CONST, -100.")
    return None, (Bias(four.masked_fill(four == MASK_CONST, -torch.inf)),)
