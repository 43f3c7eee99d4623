"""Statistics of the softmax as operators of `torch.library`, for eager calls too: they are few and long.

    flashtile::attention_watched(q, k?, v?, others, which, wanted, text, floats, ints) -> (out, lse, residual, peak, entropy)
    flashtile::attention_statistics(q, k?, v?, others, lse, which, last, wanted, text, floats, ints) -> (peak, entropy, mass)
    flashtile::attention_entropy_backward(dentropy, entropy, q, k?, v?, others, lse, wanted, text, floats, ints) -> gradients

The first is attention and what its forward keeps of rows, in one launch where a backend can; the second a pass behind it.
which: those of "peak", "entropy", "mass" that are wanted, joined by commas; the others are without elements. peak is each row's
largest score; last is of how many last queries mass is, 0 for all. All else as in `operator.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile.plan.backend import ROW_STATISTICS
from flashtile.torch.call.sharded import refuse_shards
from flashtile.torch.execute.directed import entropy_gradients, forward_with_statistics, statistics
from flashtile.torch.execute.replay import laid
from flashtile.torch.routes.derivatives import is_dual_level, record_at_level, refuse_tangents, second_derivative
from flashtile.torch.routes.functional import BACKWARD, wanting
from flashtile.torch.routes.library import define
from flashtile.torch.routes.mapped import map_one_by_one
from flashtile.torch.routes.operator import (
    ASKED,
    GIVEN,
    Maybe,
    below_autograd,
    fake_backward,
    fake_forward,
    layout_of_call,
    residual_of,
    spread,
)
from flashtile.torch.routes.request import read

NAMES = ("peak", "entropy", "mass")


def run_statistics(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], lse: torch.Tensor, which: str, last: int, *asked: Any
) -> tuple[torch.Tensor, ...]:
    refuse_shards()
    with torch.no_grad():
        layout, packs, rest = layout_of_call((q, k, v), others, *asked)
        lse = lse[None] if layout.varlen else lse
        made = statistics(layout.call, layout.slabs(packs), rest, lse, frozenset(which.split(",")), last)
        none = lse.new_empty(0)
        return tuple((made[n][0] if layout.varlen else made[n]).contiguous() if n in made else none.clone() for n in NAMES)


def run_watched(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], which: str, wanted: int, *asked: Any
) -> tuple[torch.Tensor, ...]:
    refuse_shards()
    with torch.no_grad():
        layout, packs, rest = layout_of_call((q, k, v), others, wanted, *asked)
        if wanted:
            layout.call.require_backward()
        names = frozenset(which.split(","))
        (out, lse, *kept), made = forward_with_statistics(layout.call, layout.slabs(packs), rest, names)
        residual, none = residual_of(lse, kept, q.dtype), lse.new_empty(0)
        made = {n: t[0] if layout.varlen else t for n, t in made.items()}
        rows = [made[n].contiguous() if n in made else none.clone() for n in ROW_STATISTICS]
        lse = lse.contiguous()
        if layout.varlen:
            out, lse, residual = out[0], lse[0], residual[0] if residual.dim() > 1 else residual
        return laid(out, layout.out_strides), lse, residual, *rows


def fake_watched(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], which: str, *asked: Any
) -> tuple[torch.Tensor, ...]:
    out, lse, residual = fake_forward(q, k, v, others, *asked)
    rows = (lse.new_empty(lse.shape if n in which.split(",") else 0) for n in ROW_STATISTICS)
    return out, lse, residual, *rows


def fake_statistics(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], lse: torch.Tensor, which: str, last: int, *asked: Any
) -> tuple[torch.Tensor, ...]:
    rows = fake_forward(q, k, v, others, *asked)[1]
    packing, varlen = read(asked[1]).packing(asked[3]), read(asked[1]).varlen
    keys = packing.unpack(tuple(t[None] if varlen else t for t in (q, k, v) if t is not None))["k"].shape[1]
    shapes = {"peak": rows.shape, "entropy": rows.shape, "mass": (*rows.shape[:-1], keys)}
    return tuple(rows.new_empty(shapes[n] if n in which.split(",") else 0) for n in NAMES)


def run_entropy(
    arriving: torch.Tensor, entropy: torch.Tensor, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    lse: torch.Tensor, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    with torch.no_grad():
        layout, packs, rest = layout_of_call((q, k, v), others, *asked)
        lse, entropy, arriving = (t[None] if layout.varlen else t for t in (lse, entropy, arriving))
        found = entropy_gradients(layout.call, layout.slabs(packs), rest, lse, entropy, arriving, layout.needs)
        made: list[torch.Tensor] = []
        for i, grad in enumerate(found):
            if grad is not None:
                made.append(laid(grad[0] if layout.varlen else grad, layout.strides[i]) if i < len(packs) else grad)
        return made


def fake_entropy(
    arriving: torch.Tensor, entropy: torch.Tensor, q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor],
    lse: torch.Tensor, *asked: Any,
) -> list[torch.Tensor]:  # fmt: skip
    return fake_backward(None, None, q, k, v, others, q, lse, lse, *asked)


class _Statistics(torch.autograd.Function):
    """The operator; the entropy alone has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, which: str, last: int, asked: tuple[Any, ...], q: torch.Tensor, k: Maybe, v: Maybe, lse: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        with below_autograd():
            peak, entropy, mass = STATISTICS(q, k, v, list(others), lse, which, last, *asked)
        packs = [t for t in (q, k, v) if t is not None]
        ctx.asked, ctx.count = asked, len(packs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(peak, mass)
        ctx.save_for_backward(*packs, *others, lse, entropy)
        return peak, entropy, mass

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        wanted, count, (*given, lse, entropy) = ctx.asked[0], ctx.count, ctx.saved_tensors
        if not wanted or grads[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        found = iter(ENTROPY(grads[1], entropy, *spread(given[:count]), given[count:], lse, *ctx.asked))
        made = [next(found) if wanted >> i & 1 else None for i in range(len(given))]
        return None, None, None, *spread(made[:count]), None, *made[count:]


class _Watched(torch.autograd.Function):
    """The operator; out, lse and the entropy have gradients."""

    @staticmethod
    def forward(
        ctx: Any, which: str, asked: tuple[Any, ...], q: torch.Tensor, k: Maybe, v: Maybe, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            made = WATCHED(q, k, v, list(others), which, *asked)
        packs = [t for t in (q, k, v) if t is not None]
        ctx.asked, ctx.count = asked, len(packs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made[2], made[3])
        if asked[0]:
            ctx.save_for_backward(*packs, *others, *made[:3], made[4])
        return made

    @staticmethod
    def backward(ctx: Any, *arriving: Maybe) -> Any:
        dout, dlse, _, _, dentropy = arriving
        wanted, saved = ctx.asked[0], ctx.saved_tensors
        if not wanted or (dout is None and dlse is None and dentropy is None):
            return (None,) * len(ctx.needs_input_grad)
        if is_dual_level():
            refuse_tangents("attention with statistics", "autograd", zip(("dout", "dlse", "dentropy"), arriving, strict=False))
        packs, others, kept, entropy = saved[: ctx.count], list(saved[ctx.count : -4]), saved[-4:-1], saved[-1]
        count, given = len(packs) + len(others), spread(packs)
        grads: list[Maybe] = [None] * count
        if dout is not None or dlse is not None:
            made = iter(BACKWARD(dout, dlse, *given, others, *kept, *ctx.asked))
            grads = [next(made) if wanted >> i & 1 else None for i in range(count)]
        if dentropy is not None:
            made = iter(ENTROPY(dentropy, entropy, *given, others, kept[1], *ctx.asked))
            more = [next(made) if wanted >> i & 1 else None for i in range(count)]
            grads = [m if g is None or m is None else g + m for g, m in zip(grads, more, strict=True)]
        return None, None, *spread(grads[: ctx.count]), *grads[ctx.count :]


def _record_watched(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], which: str, wanted: int, text: str, *asked: Any
) -> Any:
    wanted = wanting(wanted, text, (q, k, v), others)
    return record_at_level(_Watched, which, (wanted, text, *asked), q, k, v, *others)


def _record(
    q: torch.Tensor, k: Maybe, v: Maybe, others: list[torch.Tensor], lse: torch.Tensor, which: str, last: int, wanted: int,
    text: str, *asked: Any,
) -> Any:  # fmt: skip
    wanted = wanting(wanted, text, (q, k, v), others)
    return record_at_level(_Statistics, which, last, (wanted, text, *asked), q, k, v, lse, *others)


class _Gradients(torch.autograd.Function):
    """The operator of the entropy's gradients, with a refusal for theirs. Its inputs are there for their edges alone."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Any, ...], *_: Maybe) -> tuple[torch.Tensor, ...]:
        with below_autograd():
            return tuple(ENTROPY(*given))

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        raise second_derivative("attention's entropy", "autograd")


def _record_entropy(*given: Any) -> list[torch.Tensor]:
    arriving, entropy, q, k, v, others, *_ = given
    return list(record_at_level(_Gradients, given, arriving, entropy, q, k, v, *others))


def _tell_watched(*given: Any) -> tuple[str, Any]:
    return "attention with statistics", zip("qkv", given, strict=False)


def _tell(*given: Any) -> tuple[str, Any]:
    return "statistics of attention", zip("qkv", given, strict=False)


def _tell_gradients(arriving: torch.Tensor, entropy: torch.Tensor, *given: Any) -> tuple[str, Any]:
    named = zip(("dentropy", *"qkv"), (arriving, *given), strict=False)
    return "the gradients of attention's entropy", named


WATCHED = define(
    f"attention_watched({GIVEN}str which, {ASKED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_watched, fake_watched, _record_watched, _tell_watched,
)  # fmt: skip
STATISTICS = define(
    f"attention_statistics({GIVEN}Tensor lse, str which, int last, {ASKED}) -> (Tensor, Tensor, Tensor)",
    run_statistics, fake_statistics, _record, _tell,
)  # fmt: skip
ENTROPY = define(
    f"attention_entropy_backward(Tensor dentropy, Tensor entropy, {GIVEN}Tensor lse, {ASKED}) -> Tensor[]",
    run_entropy, fake_entropy, _record_entropy, _tell_gradients,
)  # fmt: skip


map_one_by_one(WATCHED, "attention_watched", 5)
map_one_by_one(STATISTICS, "attention_statistics", 3)
map_one_by_one(ENTROPY, "attention_entropy_backward", None)
