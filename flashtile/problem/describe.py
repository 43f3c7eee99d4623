"""The one builder of a call's problem, whatever front end the call came through: PyTorch eager or traced, or JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.blocks import BlockSpec
from flashtile.problem.dropout import OriginKind
from flashtile.problem.dtype import DType
from flashtile.problem.lengths import ALIKE, Lengths
from flashtile.problem.mask import FULL, Band
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.predicate import Where, check_ends
from flashtile.problem.score import ScoreSpec, TensorSpec
from flashtile.problem.stored import Stored


@dataclass(frozen=True)
class Wanted:
    """What a call asks for besides q, k and v, with its tensors as data: each front end reads its own arguments to this."""

    mask: Band = FULL
    where: Where = ()
    blocks: BlockSpec | None = None
    score: tuple[ScoreSpec, ...] = ()
    scale: float | None = None
    sink: TensorSpec | None = None
    dropout: float | None = None
    returns_lse: bool = False
    options: Options = DEFAULT
    origin: OriginKind | None = None
    stored: Stored | None = None


def describe(
    shapes: Sequence[Sequence[Any]],
    dtype: DType,
    wanted: Wanted,
    batch: Any,
    lengths: Lengths = ALIKE,
    longest: tuple[Any, Any] = (None, None),
    *,
    shorter: Callable[[Any, Any], Any] = min,
    make: Callable[..., AttentionProblem] = AttentionProblem,
) -> AttentionProblem:
    """The problem of q, k and v of these shapes, (batch, seqlen, heads, head_dim), varlen's (1, total, heads, head_dim).

    batch: items. longest: queries and keys of the longest item, as far as they are announced. shorter, make: the smaller of
    an announced and an actual size, and the class, where sizes may be unknown. Raises InvalidProblem.
    """
    q, k, v = shapes
    seqlen_q, seqlen_k = (n[1] if most is None else shorter(most, n[1]) for n, most in zip((q, k), longest, strict=True))
    check_ends(wanted.where, q[1], k[1], lengths)
    options = wanted.options
    return make(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=q[2], heads_kv=k[2], head_dim=q[3], head_dim_v=v[3],
        dtype=dtype, mask=wanted.mask, score=wanted.score, scale=wanted.scale, precision=options.precision,
        deterministic=bool(options.deterministic), returns_lse=wanted.returns_lse, sink=wanted.sink, dropout=wanted.dropout,
        lengths=lengths, where=wanted.where, blocks=wanted.blocks, exact_delta=options.delta == "exact",
        origin=wanted.origin,
        stored=wanted.stored,
    )  # fmt: skip
