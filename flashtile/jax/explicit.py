"""Explicit axes of a mesh, which `jax.make_mesh` makes: a step takes them as automatic, and says how its outputs lie.

JAX partitions custom calls over automatic axes alone, and what a step makes inside has no types that a caller could know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

Spec = tuple[Any, ...]  # of an array's axes, each with names of the mesh's axes or None


def automatically(
    function: Callable[..., Any], given: Mapping[str, Any], made: tuple[str, ...], specs: Mapping[str, Spec]
) -> Any:
    """The arrays `made` of those `given`, by name; over explicit axes they lie by `specs`, gradients as what they are of."""
    arrays = tuple(given.values())
    mesh = next((m for m in (jax.typeof(x).sharding.mesh for x in arrays) if m.explicit_axes), None)
    if mesh is None:
        return function(*arrays)
    known = {**specs, **{f"d{name}": jax.typeof(x).sharding.spec for name, x in given.items()}}
    lying = tuple(NamedSharding(mesh, PartitionSpec(*known.get(name, ()))) for name in made)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=lying)(*arrays)
