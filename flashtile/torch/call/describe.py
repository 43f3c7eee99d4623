"""What a call's arguments ask for: the problem, and which of its tensors kernels read besides q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.problem.attention import AttentionProblem
from flashtile.problem.describe import Wanted, describe
from flashtile.problem.dropout import Dropout, OriginKind
from flashtile.problem.lengths import ALIKE
from flashtile.problem.mask import Joined, make_mask
from flashtile.problem.number import plain
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.score import Score, ScoreSpec, TensorSpec
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.dropout import check_dropout
from flashtile.torch.call.inputs import check_arguments, check_modifier, check_sink, check_tensors, modifiers
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.masks import mask_of_call, predicates_of
from flashtile.torch.call.stored import check_resolved
from flashtile.torch.execute.bound import DTYPE_NAMES, DTYPES


def make_problem(q: Any, k: Any, v: Any, arguments: Arguments, given: Given | None = None) -> tuple[AttentionProblem, Options]:
    """Validate a call. Raises InvalidProblem naming the argument, its value, and what it must be."""
    causal, window, mask, score, scale, sink, dropout, return_lse, options, stored = arguments
    options = DEFAULT if options is None else options
    score = modifiers(score)
    check_arguments(score, scale, options, return_lse)
    check_tensors(q, k, v, given, stored is not None)
    batch, lengths, longest = q.shape[0], ALIKE, (None, None)
    if given is not None:
        given.check(q)
        batch, lengths, longest = given.batch(q), given.lengths(q.shape[1], k.shape[1]), given.longest
    where, blocks = (), None
    mask = mask_of_call(mask, q, k, lengths.ragged)
    if not isinstance(mask, Joined):
        band = make_mask(causal, window, mask)
    else:
        predicates = predicates_of(causal, window, mask, batch, q.shape[2])
        predicates.check(q.device)
        for leaf, some in zip(predicates.leaves, predicates.tensors, strict=True):
            for tensor in some:
                check_resolved(f"{leaf.name}'s tensor", tensor)
        where, band, blocks = predicates.where, predicates.band, predicates.mask.spec
    wanted = Wanted(
        band, where, blocks, score_specs(score, q, batch), scale, sink_spec(sink, q), _chance(dropout, q), return_lse, options,
        origin_kind(dropout), None if stored is None else stored.kind,
    )  # fmt: skip
    return describe((q.shape, k.shape, v.shape), DTYPES[out_dtype(q)], wanted, batch, lengths, longest), options


def out_dtype(q: torch.Tensor) -> torch.dtype:
    """That of out: q's own, or bfloat16 where q is stored."""
    return torch.bfloat16 if q.dtype is torch.uint8 else q.dtype


def rows_of(q: torch.Tensor, given: Given | None) -> tuple[int, int]:
    """(batch, heads_q): what the first axes of a captured tensor count."""
    return q.shape[0] if given is None else given.batch(q), q.shape[2]


def score_specs(score: Any, q: torch.Tensor, batch: int) -> tuple[ScoreSpec, ...]:
    specs: list[ScoreSpec] = []
    for modifier in score:
        tensors = modifier.tensors(batch, q.shape[2])
        check_modifier(modifier, modifier.scalars(), tensors, q)
        for tensor in tensors:
            check_resolved(f"{modifier.name}'s tensor", tensor)
        described = tuple(TensorSpec(tuple(t.shape), DTYPE_NAMES[t.dtype], wants_grad(t)) for t in tensors)
        specs.append(ScoreSpec(type(modifier), tuple(float(plain(s)) for s in modifier.scalars()), described))
    return tuple(specs)


def sink_spec(sink: Any, q: torch.Tensor) -> TensorSpec | None:
    if sink is None:
        return None
    check_sink(sink, q)
    check_resolved("sink", sink)
    return TensorSpec(tuple(sink.shape), DTYPES[sink.dtype].value, wants_grad(sink))


def _chance(dropout: Any, q: torch.Tensor) -> float | None:
    if dropout is None:
        return None
    check_dropout(dropout, q.device)
    return dropout.p


def origin_kind(dropout: Dropout | None) -> OriginKind | None:
    return None if dropout is None or dropout.origin is None else dropout.origin.kind


def seed_key(seed: Any) -> Any:
    """What of a seed decides whether it is a good one."""
    return isinstance(seed, int) or (seed.shape, seed.dtype, seed.device)


def capture(score: Sequence[Score], batch: int, heads_q: int) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Captured tensors of all modifiers, and what of them and of the scalars a prepared call depends on."""
    captured: list[torch.Tensor] = []
    key: list[Any] = []
    for modifier in score:
        tensors = modifier.tensors(batch, heads_q)
        captured += tensors
        described = ((t.shape, layout_of(t), t.dtype, t.device, wants_grad(t), t.is_neg()) for t in tensors)
        key.append((type(modifier), *exactly(modifier.scalars()), *described))
    return tuple(captured), tuple(key)


def exactly(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values with their types, as a key: True and 1.0 equal 1, but not every place takes them."""
    return type(values), *values, *map(type, values)


def wants_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def layout_of(tensor: torch.Tensor) -> Any:
    return tensor.stride(), tensor.data_ptr() & 15
