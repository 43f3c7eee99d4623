"""How attention is differentiated in JAX, in either mode and twice.

`attend` is a function with a tangent; the tangent is a linear map whose transpose is the backward, itself a function with a
tangent, and so on. Reverse mode asks for transposes alone: an ordinary gradient is a forward and a backward, as it was before
there were tangents. What a forward makes (out, lse and what it keeps) is handed along, and moves with its inputs: no pass asks
for its tangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from flashtile.errors import NotSupported
from flashtile.jax.arrays import JAX_DTYPES, promotes
from flashtile.jax.batching import run_mapped
from flashtile.jax.linear import linear
from flashtile.jax.rule import differentiable
from flashtile.jax.run import varying_like
from flashtile.jax.saved import under_names
from flashtile.jax.step import Along, Backward, Forward
from flashtile.plan.backend import ROW_STATISTICS, Direction, Gradients
from flashtile.plan.buffers import input_buffers
from flashtile.problem.attention import AttentionProblem

LOWEST = float(jnp.finfo(jnp.float32).min)
OUT_AND_LSE = ("flashtile_out", "flashtile_lse")  # names for policies of jax.checkpoint
ROWS = ("out", "lse")
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """What is static of one call."""

    problem: AttentionProblem
    implementation: str | None
    backward: str
    debugs: bool = False  # whether JAX searches results for infinities, and the lse that is kept must have none
    wide_keys: bool = False  # whether k and v come as float32 numbers of 16 bits, so that dk and dv are not rounded

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs, in order."""
        return tuple(b.name for b in input_buffers(self.problem))

    @property
    def backend(self) -> str | None:
        return None if self.implementation == "xla" else self.implementation

    def narrowed(self, known: Arrays) -> Arrays:
        """The same with k, v and their tangents in the problem's dtype, as passes take them."""
        dtype = JAX_DTYPES[self.problem.dtype.value]
        return {n: x.astype(dtype) if self.wide_keys and n in ("k", "v", "tk", "tv") else x for n, x in known.items()}

    def like(self, name: str, known: Arrays) -> Any:
        """The dtype of an input's gradient."""
        return jnp.float32 if self.wide_keys and name in ("k", "v") else known[name].dtype

    def along(self, name: str, direction: Direction, known: Arrays) -> Arrays:
        """What a pass along a direction makes."""
        known = self.narrowed(known)
        problem = wanting(self.problem, direction.wanted)
        wanted = frozenset(direction.wanted & {"q", "k", "v", *ROWS, *ROW_STATISTICS, "mass"})
        step = Along(name, problem, replace(direction, wanted=wanted), self.backend)
        made = run_mapped(step, self.implementation, *(known[b.name] for b in step.inputs()))
        return dict(zip((b.name for b in step.outputs()), made, strict=True))


def wanting(p: AttentionProblem, wanted: Sequence[str] | frozenset[str] | set[str]) -> AttentionProblem:
    """The problem, told which captured tensors want a gradient."""
    score = tuple(
        replace(s, tensors=tuple(replace(t, grad=f"score.{i}.{j}" in wanted) for j, t in enumerate(s.tensors)))
        for i, s in enumerate(p.score)
    )
    return replace(p, score=score, sink=None if p.sink is None else replace(p.sink, grad="sink" in wanted))


def _moving(names: Sequence[str], tangents: Sequence[Any]) -> Arrays:
    """The tangents that there are, by name."""
    return {n: t for n, t in zip(names, tangents, strict=True) if t is not None}


def finite(call: Call, made: Sequence[Any]) -> tuple[Any, ...]:
    """What a forward made, out first; where JAX searches it for infinities, LOWEST stands for -inf in the rest."""
    return (made[0], *(jnp.where(x == -jnp.inf, LOWEST, x) for x in made[1:])) if call.debugs else tuple(made)


# -- out and lse ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attend:
    """The forward: (out, lse, what it keeps for its backward)."""

    call: Call

    def apply(self, *given: Any) -> tuple[Any, ...]:
        call = self.call
        taken = call.narrowed(dict(zip(call.names, given, strict=True))).values()
        made = run_mapped(Forward(call.problem, call.backend), call.implementation, *taken)
        return finite(call, made if call.backward != "xla" else made[:2])  # of kernels' rows a plain backward knows nothing

    @promotes
    def along(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        call = self.call
        made = under_names(OUT_AND_LSE, attend(call, *primals))
        moved = _moving(call.names, tangents)
        if not moved:
            return made, tuple(jnp.zeros_like(m) for m in made)
        fixed = call.narrowed(dict(zip(call.names, primals, strict=True))).values()  # what is kept for a backward
        found = linear(Tangent(call, tuple(moved)), (*fixed, *made), tuple(moved.values()))
        return made, (*found, *(jnp.zeros_like(m) for m in made[2:]))


def attend(call: Call, *given: Any) -> tuple[Any, ...]:
    """(out, lse, what a forward keeps for its backward)."""
    return differentiable(Attend(call), *given)


@dataclass(frozen=True)
class Tangent:
    """From tangents of inputs to those of out and lse. It depends on the inputs, and on what the forward made of them."""

    call: Call
    moved: tuple[str, ...]

    @promotes
    def apply(self, fixed: Sequence[Any], linear: Sequence[Any]) -> tuple[Any, ...]:
        known = dict(zip(self.call.names, fixed, strict=False)) | _named("t", self.moved, linear)
        made = self.call.along("tangent", Direction(frozenset(self.moved)), known)
        return made["tout"], made["tlse"]

    @promotes
    def transpose(self, fixed: Sequence[Any], arriving: Sequence[Any]) -> tuple[Any, ...]:
        there = [n for n, g in zip(ROWS, arriving, strict=True) if g is not None]
        given = (*fixed, *(g for g in arriving if g is not None))
        return pull(Pull(self.call, self.moved, tuple(there)), *given)

    def change(self, fixed: Sequence[Any], linear_: Sequence[Any], moved: Sequence[Any]) -> tuple[Any, ...]:
        names = self.call.names
        there = _moving(names, moved[: len(names)])
        if not there:
            like = fixed[len(names) : len(names) + 2]
            return tuple(jnp.zeros_like(x) for x in like)
        change = TangentChange(self.call, self.moved, tuple(there))
        return linear(change, (*fixed, *linear_), tuple(there.values()))


@dataclass(frozen=True)
class TangentChange:
    """How tangents of out and lse change as inputs move: what reverse mode over forward mode transposes."""

    call: Call
    tangents: tuple[str, ...]
    moved: tuple[str, ...]

    def _known(self, fixed: Sequence[Any]) -> Arrays:
        names = self.call.names
        return dict(zip(names, fixed, strict=False)) | _named("t", self.tangents, fixed[-len(self.tangents) :])

    def apply(self, fixed: Sequence[Any], linear: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(refusing_p.bind(m, why=_Twice(self.call.problem)) for m in fixed[len(self.call.names) :][:2])

    @promotes
    def transpose(self, fixed: Sequence[Any], arriving: Sequence[Any]) -> tuple[Any, ...]:
        known = self._known(fixed)
        there = {f"d{n}": g for n, g in zip(ROWS, arriving, strict=True) if g is not None}
        direction = Direction(frozenset(self.tangents), frozenset(there), frozenset(self.moved))
        made = self.call.along("second", direction, known | there)
        return tuple(made[f"d{n}"].astype(known[n].dtype) for n in self.moved)

    def change(self, fixed: Sequence[Any], linear: Sequence[Any], moved: Sequence[Any]) -> tuple[Any, ...]:
        raise _third(self.call.problem)


# -- gradients ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pull:
    """What is static of a backward: gradients of which inputs, from those of which rows."""

    call: Call
    wanted: tuple[str, ...]
    arriving: tuple[str, ...]

    def parts(self, given: Sequence[Any]) -> tuple[Arrays, Sequence[Any], Arrays]:
        """(inputs, what the forward made, gradients that arrive)."""
        count, names = len(given) - len(self.arriving), self.call.names
        made = given[len(names) : count]
        return dict(zip(names, given, strict=False)), made, _named("d", self.arriving, given[count:])

    def apply(self, *given: Any) -> tuple[Any, ...]:
        """The gradients that are wanted."""
        call, (known, (out, *kept), arriving) = self.call, self.parts(given)
        problem = wanting(call.problem, self.wanted)
        gradients = Gradients(frozenset("qkv") & frozenset(self.wanted), "dlse" in arriving, call.wide_keys)
        if call.debugs:
            kept = [jnp.where(x == LOWEST, -jnp.inf, x) for x in kept]
        if "dout" not in arriving:
            arriving["dout"] = varying_like([jnp.zeros(out.shape, out.dtype)], [out])[0]
        plain = "xla" in (call.implementation, call.backward)
        backward: Any = "auto" if call.backward == "xla" else call.backward
        step = Backward(problem, gradients, None if plain else call.implementation, backward, call.backward != "xla")
        every = {**known, "out": out, "lse": kept[0], **arriving, **dict(zip(("stats",), kept[1:], strict=False))}
        made = run_mapped(step, "xla" if plain else call.implementation, *(every[b.name] for b in step.inputs()))
        found = dict(zip((b.name for b in step.outputs()), made, strict=True))
        return tuple(found[f"d{n}"].astype(call.like(n, known)) for n in self.wanted)

    @promotes
    def along(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """These, and how they change."""
        made = pull(self, *primals)
        known, _, arriving = self.parts(primals)
        count = len(primals) - len(arriving)
        moved = _moving(self.call.names, tangents[: len(known)])
        moved |= _moving([f"d{n}" for n in self.arriving], tangents[count:])
        if not moved:
            return made, tuple(jnp.zeros_like(m) for m in made)
        second = Second(self, tuple(moved))
        return made, linear(second, (*known.values(), *arriving.values()), tuple(moved.values()))


def pull(how: Pull, *given: Any) -> tuple[Any, ...]:
    """The gradients that are wanted."""
    return differentiable(how, *given)


@dataclass(frozen=True)
class Second:
    """From tangents of inputs, and of gradients that arrive, to those of gradients.

    The Hessian is symmetric: transposed it is the same pass, along what arrives, and tangents of out and lse along that are
    the gradients of dout and dlse.
    """

    how: Pull
    moved: tuple[str, ...]

    def _known(self, fixed: Sequence[Any]) -> Arrays:
        return dict(zip((*self.how.call.names, *(f"d{n}" for n in self.how.arriving)), fixed, strict=True))

    @promotes
    def apply(self, fixed: Sequence[Any], linear: Sequence[Any]) -> tuple[Any, ...]:
        known = self._known(fixed)
        rows = {f"d{n}" for n in ROWS}
        given = frozenset(f"d{n}" for n in self.how.arriving) | {f"t{n}" for n in self.moved if n in rows}
        direction = Direction(frozenset(self.moved) - rows, given, frozenset(self.how.wanted))
        made = self.how.call.along("second", direction, known | _named("t", self.moved, linear))
        return tuple(made[f"d{n}"].astype(self.how.call.like(n, known)) for n in self.how.wanted)

    @promotes
    def transpose(self, fixed: Sequence[Any], arriving: Sequence[Any]) -> tuple[Any, ...]:
        known = self._known(fixed)
        there = {f"t{n}": g for n, g in zip(self.how.wanted, arriving, strict=True) if g is not None}
        rows = {n[1:] for n in self.moved if n in ("dout", "dlse")}
        wanted = frozenset(n for n in self.moved if n[1:] not in rows or not n.startswith("d")) | rows
        direction = Direction(frozenset(n[1:] for n in there), frozenset(f"d{n}" for n in self.how.arriving), wanted)
        made = self.how.call.along("second", direction, known | there)
        places = {n: f"t{n[1:]}" if n in ("dout", "dlse") else f"d{n}" for n in self.moved}
        return tuple(made[place].astype(known[n].dtype) for n, place in places.items())

    def change(self, fixed: Sequence[Any], linear: Sequence[Any], moved: Sequence[Any]) -> tuple[Any, ...]:
        raise _third(self.how.call.problem)


# What has a shape, so that reverse mode can transpose around it, and refuses where it would be computed.
refusing_p = Primitive("flashtile_refusing")


@dataclass(frozen=True)
class _Twice:
    problem: AttentionProblem

    def error(self) -> NotSupported:
        reason = "tangents of tangents are not implemented; use reverse mode over forward mode, or jax.hessian"
        return NotSupported(f"forward mode over forward mode of {self.problem.spell()}", {"jax": [reason]})


@refusing_p.def_abstract_eval
def _like(aval: Any, *, why: Any) -> Any:
    return aval


def _refuse(*_: Any, why: Any) -> Any:
    raise why.error()


refusing_p.def_impl(_refuse)
mlir.register_lowering(refusing_p, _refuse)
batching.primitive_batchers[refusing_p] = lambda given, axes, *, why: (refusing_p.bind(*given, why=why), axes[0])


def _named(prefix: str, names: Sequence[str], arrays: Sequence[Any]) -> Arrays:
    return {f"{prefix}{n}": x for n, x in zip(names, arrays, strict=True)}


def _third(p: AttentionProblem) -> NotSupported:
    return NotSupported(f"third derivatives of {p.spell()}", {"jax": ["second derivatives have no derivative"]})
