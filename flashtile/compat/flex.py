"""`torch.nn.attention.flex_attention.flex_attention`: its signature and rules, by flashtile alone."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from flashtile.compat.asked import options, refuse
from flashtile.compat.score_mod import modifiers_of
from flashtile.errors import InvalidProblem
from flashtile.torch.api.attention import attention
from flashtile.torch.api.block_mask import Said, said_of
from flashtile.torch.api.blocks import Blocks
from flashtile.torch.call.stored import check_tensor
from flashtile.torch.execute.inference_safe import lasting

# of each BlockMask for what it was read, the tensors that its mask_mod captures with their versions, and what they say
_BLOCKS: WeakKeyDictionary[Any, tuple[Any, tuple[torch.Tensor, ...], list[Any], Blocks]] = WeakKeyDictionary()


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """out (batch, heads, seqlen_q, head_dim_v), or (out, lse), or with return_aux (out, AuxOutput).

    query: (batch, heads, seqlen_q, head_dim); enable_gqa: key and value may have fewer heads.
    score_mod: a function of scalars as torch has it: score (float32; `score.dtype` says query's), batch, head, q_idx, kv_idx.
        It is recorded once if it reads tensors and plain values alone, and none of these is another one since; else at every
        call. No GPU kernel is compiled anew for other tensors or other factors. What it makes of each query and key together by
        gathers or reductions takes an element for every pair.
    block_mask: a BlockMask, read as `Blocks.from_flex` reads it: once, until another mask_mod is set in it, or a tensor that
        its mask_mod captures is written to.
    kernel_options: of kernels that do not run here; None alone.
    """
    refuse("flex_attention", {
        "kernel_options are given; they are those of other kernels": bool(kernel_options),
        "return_aux asks for max_scores; they are not kept": bool(getattr(return_aux, "max_scores", False)),
    })  # fmt: skip
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be (batch, heads, seqlen, head_dim).")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        heads = f"key has {key.shape[1]} heads and query {query.shape[1]}"
        raise InvalidProblem(f"{heads}; they must be equal unless enable_gqa is True.")
    factor, score = 1.0, ()
    if score_mod is not None:
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        factor, score = modifiers_of(score_mod, sizes, query.device, query.dtype)
    if factor != 1.0:
        scale = factor * (query.shape[3] ** -0.5 if scale is None else scale)
    mask = None if block_mask is None else _blocks_of(block_mask, query.shape[0], query.shape[1])
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


def _blocks_of(block_mask: Any, batch: int, heads: int) -> Blocks:
    key = block_mask.mask_mod, batch, heads
    known, captured, versions, blocks = _BLOCKS.get(block_mask, (None, (), [], None))
    if blocks is None or known != key or versions != _versions(captured):
        said, blocks = _read(block_mask, batch, heads)
        _BLOCKS[block_mask] = key, said.captured, _versions(said.captured), blocks
    return blocks


@lasting
def _read(block_mask: Any, batch: int, heads: int) -> tuple[Said, Blocks]:
    said = said_of(block_mask, batch, heads)
    return said, Blocks.said(said)


def _versions(tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    """What changes where a tensor is written to; of inference tensors nothing tells."""
    return [object() if t.is_inference() else t._version for t in tensors]
