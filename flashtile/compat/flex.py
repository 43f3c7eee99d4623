"""`torch.nn.attention.flex_attention.flex_attention`: its signature and rules, by flashtile alone."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from flashtile.compat.asked import options, refuse
from flashtile.compat.score_mod import modifiers_of
from flashtile.errors import InvalidProblem
from flashtile.torch.attention import attention
from flashtile.torch.blocks import Blocks

_BLOCKS: WeakKeyDictionary[Any, tuple[Any, Blocks]] = WeakKeyDictionary()  # of each BlockMask its mask_mod, and what they say


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """out (batch, heads, seqlen_q, head_dim_v), or (out, lse), or with return_aux (out, AuxOutput).

    query: (batch, heads, seqlen_q, head_dim); enable_gqa: key and value may have fewer heads.
    score_mod: a function that `score_mod` can read (factors, softcaps, sums with captured tensors), called at every call.
    block_mask: a BlockMask, read by `Blocks.from_flex`, once until another mask_mod is set in it.
    kernel_options: of kernels that do not run here; None alone.
    """
    refuse("flex_attention", {
        "kernel_options are given; they are those of other kernels": bool(kernel_options),
        "return_aux asks for max_scores; they are not kept": bool(getattr(return_aux, "max_scores", False)),
    })  # fmt: skip
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (batch, heads, seqlen, head_dim).")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        heads = f"key has {key.shape[1]} heads and query {query.shape[1]}"
        raise InvalidProblem(f"{heads}; they must be equal unless enable_gqa is True.")
    factor, score = 1.0, ()
    if score_mod is not None:
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        factor, score = modifiers_of(score_mod, sizes, query.device)
    if factor != 1.0:
        scale = factor * (query.shape[3] ** -0.5 if scale is None else scale)
    mask = None if block_mask is None else _blocks_of(block_mask)
    wants_lse = return_lse or bool(getattr(return_aux, "lse", False))
    made = attention(
        *(t.transpose(1, 2) for t in (query, key, value)), mask=mask, score=score, scale=scale, return_lse=wants_lse,
        options=options(),
    )  # fmt: skip
    out, lse = made if wants_lse else (made, None)
    out = out.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def _blocks_of(block_mask: Any) -> Blocks:
    mask_mod, blocks = _BLOCKS.get(block_mask, (None, None))
    if blocks is None or mask_mod is not block_mask.mask_mod:
        blocks = Blocks.from_flex(block_mask)
        _BLOCKS[block_mask] = block_mask.mask_mod, blocks
    return blocks
