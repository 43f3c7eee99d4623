"""Statistics of the softmax in JAX: passes behind a forward. The entropy is differentiable, once and in reverse mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from flashtile.errors import NotSupported
from flashtile.jax.arrays import promotes
from flashtile.jax.derivatives import Call, refusing_p
from flashtile.jax.linear import linear
from flashtile.plan.backend import ROW_STATISTICS, Direction
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.statistics import Statistics, Wish

NAMES = (*ROW_STATISTICS, "mass")
jax.export.register_namedtuple_serialization(Statistics, serialized_name="flashtile.Statistics")


def statistics_of(call: Call, wish: Wish, arrays: dict[str, Any], lse: Any) -> Statistics:
    """What `wish` asks for, of a call's inputs by name and its lse (slabs, heads_q, span_q); max_logit is (items, heads_q)."""
    call = replace(call, problem=replace(call.problem, dropout=None))  # of what the softmax makes, before dropout
    asked = dict(zip(NAMES, (wish.max_logit, wish.entropy, wish.mass), strict=True))
    rows, found = tuple(n for n in ROW_STATISTICS if asked[n]), dict[str, Any]()
    for names, last in ((rows, 0), (("mass",) if wish.mass else (), wish.last)):
        if names:
            given = (*(arrays[name] for name in call.names), jax.lax.stop_gradient(lse))
            found.update(zip(names, _compiled((call, names, last), *given), strict=True))
    largest = _largest(call.problem, arrays, found["peak"]) if wish.max_logit else None
    return Statistics(lse if wish.lse else None, largest, found.get("entropy"), found.get("mass"))


def _largest(p: AttentionProblem, arrays: dict[str, Any], peak: Any) -> Any:
    """Of each item the largest of its rows."""
    if not p.lengths.varlen:
        return peak.max(-1, initial=-jnp.inf)
    ends, row = arrays["cu_seqlens_q"][1:], jnp.arange(peak.shape[-1])
    item = (row[:, None] >= ends[None]).sum(1)  # of rows behind the last item, one more than there are
    return jax.ops.segment_max(jnp.swapaxes(peak[0], 0, 1), item, num_segments=ends.shape[0])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _observe(how: tuple[Call, tuple[str, ...], int], *given: Any) -> tuple[Any, ...]:
    """The statistics of these names, of inputs and lse."""
    call, names, last = how
    made = call.along("statistics", Direction(wanted=frozenset(names), last=last), _known(call, given))
    return tuple(made[name] for name in names)


def _observe_along(how: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    (call, names, _), made = how, tuple[Any, ...](_observe(how, *primals))  # pyright: ignore[reportArgumentType]
    changes = {name: jnp.zeros_like(m) for name, m in zip(names, made, strict=True)}
    moved = {n: t for n, t in zip(call.names, tangents, strict=False) if n != "v" and not isinstance(t, SymbolicZero)}
    if "entropy" in names and moved:
        entropy = made[names.index("entropy")]
        (changes["entropy"],) = linear(_Entropy(call, tuple(moved)), (*primals, entropy), tuple(moved.values()))
    return made, tuple(changes[name] for name in names)


_observe.defjvp(promotes(_observe_along), symbolic_zeros=True)
_compiled = jax.jit(_observe, static_argnums=0)


@dataclass(frozen=True)
class _Entropy:
    """From tangents of inputs to the entropy's. It depends on the inputs, on lse and on the entropy."""

    call: Call
    moved: tuple[str, ...]

    def apply(self, fixed: Sequence[Any], linear: Sequence[Any]) -> tuple[Any, ...]:
        return (refusing_p.bind(fixed[-1], why=_Forwards(self.call.problem)),)

    @promotes
    def transpose(self, fixed: Sequence[Any], arriving: Sequence[Any]) -> tuple[Any, ...]:
        known = _known(self.call, fixed[:-1]) | {"entropy": fixed[-1], "dentropy": arriving[0]}
        made = self.call.along("entropy", Direction(wanted=frozenset(self.moved)), known)
        return tuple(made[f"d{n}"].astype(known[n].dtype) for n in self.moved)

    def change(self, fixed: Sequence[Any], linear: Sequence[Any], moved: Sequence[Any]) -> tuple[Any, ...]:
        reason = "gradients of gradients are not implemented"
        raise NotSupported(f"the second derivative of the entropy of {self.call.problem.spell()}", {"jax": [reason]})


@dataclass(frozen=True)
class _Forwards:
    problem: AttentionProblem

    def error(self) -> NotSupported:
        reason = "tangents are not implemented; use reverse mode, jax.grad or jax.vjp"
        return NotSupported(f"forward mode of the entropy of {self.problem.spell()}", {"jax": [reason]})


def _known(call: Call, given: Sequence[Any]) -> dict[str, Any]:
    return dict(zip((*call.names, "lse"), given, strict=True))
