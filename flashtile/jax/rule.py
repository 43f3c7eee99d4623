"""Functions of arrays that say themselves how they change: one primitive, `flashtile_rule`, for all of them.

`jax.custom_jvp` says so once. Where reverse mode goes through `jax.lax.scan`, JAX takes apart what is known from what is not,
and forgets the rule: a second derivative would meet a kernel, which has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Arrays = tuple[Any, ...]


class Rule(Protocol):
    """A function, hashable and without arrays."""

    def apply(self, *given: Any) -> Arrays:
        """What it makes."""
        ...

    def along(self, primals: Sequence[Any], tangents: Sequence[Any | None], /) -> tuple[Arrays, Arrays]:
        """What it makes, and how that changes along tangents, None for zero; linear in them."""
        ...


rule_p = Primitive("flashtile_rule")
rule_p.multiple_results = True


def differentiable(rule: Rule, *given: Any) -> Arrays:
    """What the function makes."""
    # its program goes along: JAX looks into it for what must know its devices
    program = jax.make_jaxpr(_apply, static_argnums=0)(rule, *given)
    return tuple(rule_p.bind(*given, rule=rule, program=program))


def _apply(rule: Rule, *given: Any) -> Arrays:
    """One function for all, by which JAX finds what it has traced before: a gradient traces its forward once."""
    return tuple(rule.apply(*given))


@rule_p.def_impl
def _run(*given: Any, rule: Rule, program: Any) -> list[Any]:
    return jaxpr_as_fun(program)(*given)


@rule_p.def_abstract_eval
def _abstract(*avals: Any, rule: Rule, program: Any) -> Any:
    return list(program.out_avals)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], rule: Rule, program: Any) -> Any:
    made, moved = rule.along(tuple(primals), [None if isinstance(t, ad.Zero) else t for t in tangents])
    return list(made), list(moved)


ad.primitive_jvps[rule_p] = _differentiate


@dataclass(frozen=True)
class _Mapped:
    """A function under `vmap`: axes[i] says whether its i-th array is mapped, along its first axis."""

    rule: Rule
    axes: tuple[int | None, ...]
    size: int

    def apply(self, *given: Any) -> Arrays:
        return jax.vmap(self.rule.apply, in_axes=self.axes, axis_size=self.size)(*given)

    def along(self, primals: Sequence[Any], tangents: Sequence[Any | None]) -> tuple[Arrays, Arrays]:
        count = len(primals)
        axes = [None if t is None else axis for t, axis in zip(tangents, self.axes, strict=True)]

        def each(*x: Any) -> tuple[Arrays, Arrays]:
            return self.rule.along(x[:count], x[count:])

        return jax.vmap(each, in_axes=(*self.axes, *axes), axis_size=self.size)(*primals, *tangents)


def _map_axes(given: Sequence[Any], axes: Sequence[Any], rule: Rule, program: Any) -> Any:
    first = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(given, axes, strict=True)]
    size = next(x.shape[0] for x, axis in zip(first, axes, strict=True) if axis is not None)
    made = differentiable(_Mapped(rule, tuple(None if axis is None else 0 for axis in axes), size), *first)
    return made, [0] * len(made)


batching.primitive_batchers[rule_p] = _map_axes
mlir.register_lowering(rule_p, mlir.lower_fun(_run, multiple_results=True))
