"""Linear maps of arrays that JAX transposes by passes of their own: one primitive, `flashtile_linear`, for all of them.

A map takes arrays that it depends on, and after them what it is linear in. Differentiated, it goes along for what it is linear
in; how it changes with the others it says itself. Nothing of it runs where its transpose alone is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Array = Any


class Map(Protocol):
    """A linear map, hashable and without arrays."""

    def apply(self, fixed: Sequence[Array], linear: Sequence[Array], /) -> tuple[Array, ...]:
        """What it makes."""
        ...

    def transpose(self, fixed: Sequence[Array], arriving: Sequence[Array | None], /) -> tuple[Array, ...]:
        """The gradients of what it is linear in, from those of what it makes; None for zero."""
        ...

    def change(self, fixed: Sequence[Array], linear: Sequence[Array], moved: Sequence[Array | None], /) -> tuple[Array, ...]:
        """How what it makes changes as what it depends on moves along these, None for zero; linear in them."""
        ...


linear_p = Primitive("flashtile_linear")
linear_p.multiple_results = True


def linear(map_: Map, fixed: Sequence[Array], given: Sequence[Array]) -> tuple[Array, ...]:
    """What the map makes, differentiable."""
    return tuple(_bind(map_, len(fixed), *fixed, *given))


def _bind(map_: Map, count: int, *given: Array) -> list[Array]:
    # its program goes along: JAX looks into it for what must know its devices
    program = jax.make_jaxpr(_apply, static_argnums=(0, 1))(map_, count, *given)
    return linear_p.bind(*given, map_=map_, count=count, program=program)


def _apply(map_: Map, count: int, *given: Array) -> tuple[Array, ...]:
    """One function for all, by which JAX finds what it has traced before: a gradient traces its forward once."""
    return tuple(map_.apply(given[:count], given[count:]))


def _run(*given: Array, map_: Map, count: int, program: Any) -> list[Array]:
    return jaxpr_as_fun(program)(*given)


@linear_p.def_impl
def _evaluate(*given: Array, **how: Any) -> Any:
    return jax.jit(lambda *x: linear_p.bind(*x, **how))(*given)


@linear_p.def_abstract_eval
def _abstract(*avals: Any, map_: Map, count: int, program: Any) -> Any:
    return list(program.out_avals)


def _differentiate(primals: Sequence[Array], tangents: Sequence[Any], map_: Map, count: int, program: Any) -> Any:
    made = linear_p.bind(*primals, map_=map_, count=count, program=program)
    moved = [None if isinstance(t, ad.Zero) else t for t in tangents]
    sums: list[tuple[Array, ...]] = []
    if any(t is not None for t in moved[count:]):
        full = [jnp.zeros_like(x) if t is None else t for x, t in zip(primals[count:], moved[count:], strict=True)]
        sums.append(linear_p.bind(*primals[:count], *full, map_=map_, count=count, program=program))
    if any(t is not None for t in moved[:count]):
        sums.append(map_.change(primals[:count], primals[count:], moved[:count]))
    if len(sums) == 2:
        return made, [a + b for a, b in zip(*sums, strict=True)]
    return made, list(sums[0])


ad.primitive_jvps[linear_p] = _differentiate


def _transpose(arriving: Sequence[Any], *given: Any, map_: Map, count: int, program: Any) -> list[Any]:
    there = [None if isinstance(g, ad.Zero) else g for g in arriving]
    if all(g is None for g in there):
        return [None] * len(given)
    made = map_.transpose(given[:count], there)
    there = zip(given[count:], made, strict=True)
    return [None] * count + [m.astype(x.aval.dtype) if ad.is_undefined_primal(x) else None for x, m in there]


ad.primitive_transposes[linear_p] = _transpose


@dataclass(frozen=True)
class _Mapped:
    """A map under `vmap`: axes[i] says whether its i-th array is mapped, along its first axis."""

    map_: Map
    axes: tuple[int | None, ...]
    count: int
    size: int

    def _each(self, function: Any, given: Sequence[Any], axes: Sequence[int | None]) -> tuple[Array, ...]:
        axes = [None if x is None else axis for x, axis in zip(given, axes, strict=True)]
        return jax.vmap(function, in_axes=tuple(axes), axis_size=self.size)(*given)

    def apply(self, fixed: Sequence[Array], linear: Sequence[Array]) -> tuple[Array, ...]:
        each = lambda *x: tuple(self.map_.apply(x[: self.count], x[self.count :]))  # noqa: E731
        return self._each(each, (*fixed, *linear), self.axes)

    def transpose(self, fixed: Sequence[Array], arriving: Sequence[Array | None]) -> tuple[Array, ...]:
        each = lambda *x: self.map_.transpose(x[: self.count], x[self.count :])  # noqa: E731
        made = self._each(each, (*fixed, *arriving), (*self.axes[: self.count], *(0 for _ in arriving)))
        own = self.axes[self.count :]
        return tuple(m if axis is not None else m.sum(0) for m, axis in zip(made, own, strict=True))

    def change(self, fixed: Sequence[Array], linear: Sequence[Array], moved: Sequence[Array | None]) -> tuple[Array, ...]:
        ends = len(fixed), len(fixed) + len(linear)

        def each(*x: Array | None) -> tuple[Array, ...]:
            return self.map_.change(x[: ends[0]], x[ends[0] : ends[1]], x[ends[1] :])

        return self._each(each, (*fixed, *linear, *moved), (*self.axes, *self.axes[: self.count]))


def _map_axes(given: Sequence[Array], axes: Sequence[Any], map_: Map, count: int, program: Any) -> Any:
    first = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(given, axes, strict=True)]
    size = next(x.shape[0] for x, axis in zip(first, axes, strict=True) if axis is not None)
    mapped = _Mapped(map_, tuple(None if axis is None else 0 for axis in axes), count, size)
    made = _bind(mapped, count, *first)
    return made, [0] * len(made)


batching.primitive_batchers[linear_p] = _map_axes
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))
