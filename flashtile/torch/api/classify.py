"""What each block of a mask holds, on any device; an operator where torch.compile looks on, for a plan is nothing to trace.

    flashtile::classify_blocks(tensors, text, ints, device) -> state

text, ints: the predicates' kinds and which bounds the band has, their numbers and all sizes, as `request.py` writes calls.
"""

from __future__ import annotations

import torch

from flashtile.kernels.cpu.blocks import classify
from flashtile.kernels.portable.blocks import plan_classify
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import ALIKE
from flashtile.problem.mask import PREDICATES, Band
from flashtile.problem.predicate import PredicateSpec, Where, check_ends
from flashtile.torch.call.masks import KINDS, Predicates
from flashtile.torch.execute.bound import Bound
from flashtile.torch.routes.library import define
from flashtile.triton_glue import language as _triton

Scores = tuple[int, int, int, int]  # batch, heads, seqlen_q, seqlen_k


def state_of(found: Predicates, scores: Scores, spec: BlockSpec, place: torch.device) -> torch.Tensor:
    """int8 (batch, heads, rows, columns): 0 where a block holds no score, 2 where all are visible, else 1."""
    tensors = [tensor for some in found.tensors for tensor in some]
    if not torch.compiler.is_compiling():
        return _run(tensors, found.band, found.where, scores, spec, place)
    for leaf, some in zip(found.leaves, found.tensors, strict=True):  # what a problem asks, which is not made here
        leaf.check(tuple(tuple(t.shape) for t in some), scores)
    text, scalars = found.written()
    ints = [*scores, spec.block_q, spec.block_k]
    for bound in (found.band.left, found.band.right):
        ints += [0, 0] if bound is None else [1, bound]
    return CLASSIFY(tensors, text, [*ints, *scalars], place)


def _run(
    tensors: list[torch.Tensor], band: Band, where: Where, scores: Scores, spec: BlockSpec, place: torch.device
) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k = scores
    check_ends(where, seqlen_q, seqlen_k, ALIKE)
    problem = AttentionProblem(batch, seqlen_q, seqlen_k, heads, heads, 1, 1, DType.FP16, mask=band, where=where, blocks=spec)
    names = (f"mask.{i}.{j}" for i, leaf in enumerate(problem.leaves) for j in range(len(leaf.tensors)))
    named = dict(zip(names, tensors, strict=True))
    if place.type == "cpu" and not _triton.INTERPRETED:
        return classify(problem, named)
    return Bound(plan_classify(problem), named, place).run(named)["state"]


def _run_written(tensors: list[torch.Tensor] | None, text: str, ints: list[int], device: torch.device) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k, block_q, block_k, *numbers = ints
    tensors, left, right = tensors or [], *(numbers[i + 1] if numbers[i] else None for i in (0, 2))
    numbers, given = iter(numbers[4:]), iter(tensors)
    where = tuple(
        tuple(
            PredicateSpec(
                PREDICATES.named(name), tuple(next(numbers) for _ in range(int(scalars))),
                tuple((tuple(t.shape), KINDS[t.dtype]) for t in (next(given) for _ in range(int(count)))),
            )
            for name, scalars, count in (leaf.split(":") for leaf in term.split("&"))
        )
        for term in (text.split("|") if text else ())
    )  # fmt: skip
    scores = (batch, heads, seqlen_q, seqlen_k)
    return _run(tensors, Band(left, right), where, scores, BlockSpec(block_q, block_k), device)


def _fake(tensors: list[torch.Tensor] | None, text: str, ints: list[int], device: torch.device) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k, block_q, block_k = ints[:6]
    return torch.empty((batch, heads, -(-seqlen_q // block_q), -(-seqlen_k // block_k)), dtype=torch.int8, device=device)


CLASSIFY = define("classify_blocks(Tensor[] tensors, str text, SymInt[] ints, Device device) -> Tensor", _run_written, _fake)
