"""What a `torch.nn.attention.flex_attention.BlockMask` says, as the tensors of `StoredBlocks` and the states of its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.torch.api.recording import AXES, Node, Recorded, ancestors, evaluate, plainly, record, taken
from flashtile.torch.api.spread import MOST_AT_ONCE, mapped

HIDDEN, PARTIAL, WHOLE = 0, 1, 2


@dataclass
class Said:
    """slot (batch, heads, rows, columns): of each block its place in `values` (places, block_q, block_k), which begin with a
    hidden and a whole one; state: HIDDEN, PARTIAL or WHOLE."""

    slot: torch.Tensor
    values: torch.Tensor
    state: torch.Tensor
    seqlens: tuple[int, int]
    spec: BlockSpec
    captured: tuple[torch.Tensor, ...]  # what `mask_mod` read of the caller's


def said_of(block_mask: Any, batch: int | None = None, heads: int | None = None) -> Said:
    """batch, heads: for how many `mask_mod` is asked where it goes by them though the lists serve all."""
    place, (seqlen_q, seqlen_k) = block_mask.kv_indices.device, block_mask.seq_lengths
    spec = BlockSpec(*block_mask.BLOCK_SIZE)
    rows, columns = spec.rows(seqlen_q), spec.columns(seqlen_k)
    items = tuple(block_mask.kv_num_blocks.shape[:2])
    state = torch.zeros((*items, rows, columns), dtype=torch.int8, device=place)
    given = [(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        given.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, WHOLE))
    for count, index, kind in given:
        listed = torch.arange(index.shape[-1], device=place) < count[..., None]
        marks = torch.zeros((*items, rows, columns + 1), dtype=torch.int8, device=place)
        where = torch.where(listed, index, columns).long()[:, :, :rows]
        marks.scatter_(3, where, torch.full_like(where, kind, dtype=torch.int8))
        state = torch.maximum(state, marks[..., :columns])
    if seqlen_q % spec.block_q:  # the kernels take for whole what needs no masking at all
        state[:, :, -1] = state[:, :, -1].clamp(max=PARTIAL)
    if seqlen_k % spec.block_k:
        state[..., -1] = state[..., -1].clamp(max=PARTIAL)
    said = record(block_mask.mask_mod, "mask_mod", place, AXES)
    if said.result.dtype is not torch.bool:
        raise InvalidProblem(f"mask_mod returns {said.result.dtype}; it must return a boolean.")
    wanted = tuple(
        most if most is not None and size == 1 and axis in said.result.needs else size
        for size, most, axis in zip(items, (batch, heads), AXES, strict=False)
    )
    if wanted != items:  # the lists are those of the first item or head
        state = torch.full((*wanted, rows, columns), PARTIAL, dtype=torch.int8, device=place)
    partial = (state == PARTIAL).nonzero()
    values = torch.zeros((2, spec.block_q, spec.block_k), dtype=torch.bool, device=place)
    values[1] = True
    slot, made, places = (state == WHOLE).to(torch.int32), [values], 2
    for part, seen in _asked(said, partial, spec, (seqlen_q, seqlen_k)):
        if wanted != items:
            whole, some = seen.all(2).all(1), seen.any(2).any(1)
            kinds = torch.where(whole, WHOLE, torch.where(some, PARTIAL, HIDDEN)).to(torch.int8)
            at = tuple(part.unbind(1))
            state[at], slot[at] = kinds, whole.to(torch.int32)
            part, seen = part[kinds == PARTIAL], seen[kinds == PARTIAL]
        slot[tuple(part.unbind(1))] = torch.arange(places, places + len(part), dtype=torch.int32, device=place)
        places += len(part)
        made.append(seen)
    return Said(slot, torch.cat(made), state, (seqlen_q, seqlen_k), spec, said.captured)


def _asked(
    said: Recorded, blocks: torch.Tensor, spec: BlockSpec, seqlens: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of some (batch, head, row, column) at a time which of their scores are seen: bool (some, block_q, block_k)."""
    place, result = blocks.device, said.result
    many = mapped(
        lambda *at: evaluate([result], dict(zip(AXES, at, strict=True)), lambda t: t, place)[0],
        [[0, 0, 0, 0], [None, None, 0, None], [None, None, None, 0]],
    )
    step = max(1, MOST_AT_ONCE // max(_numbers(node, spec) for node in (result, *ancestors([result]))))
    for part in blocks.split(step) if len(blocks) else ():
        b, h, row, column = part.unbind(1)
        q = row[:, None] * spec.block_q + torch.arange(spec.block_q, device=place)
        k = column[:, None] * spec.block_k + torch.arange(spec.block_k, device=place)
        with plainly(place), torch.no_grad(), taken(result, "mask_mod"):
            seen = many(b, h, q.clamp(max=seqlens[0] - 1), k.clamp(max=seqlens[1] - 1))
        yield part, seen & (q < seqlens[0])[:, :, None] & (k < seqlens[1])[:, None]


def _numbers(node: Node, spec: BlockSpec) -> int:
    """How many a block takes of a value."""
    sizes = {"q_idx": spec.block_q, "kv_idx": spec.block_k}
    return prod(node.shape) * prod(size for axis, size in sizes.items() if axis in node.needs) if node.needs else 1
