"""What a forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def under_names(names: Sequence[str], made: Sequence[Any]) -> tuple[Any, ...]:
    """What a forward made under names by which policies of `jax.checkpoint` keep it; the last name is for all that follows."""
    return tuple(checkpoint_name(x, names[min(i, len(names) - 1)]) for i, x in enumerate(made))


@partial(jax.tree_util.register_dataclass, data_fields=["given", "made", "marks"], meta_fields=[])
@dataclass(frozen=True)
class Saved:
    """Inputs and outputs of a forward, and of which inputs a gradient may be wanted.

    The latter as the shape of an array without elements, (0, bits). JAX keeps a forward's program for each set of inputs, but
    what is no array of the latest one alone, and hands that to every backward.
    """

    given: tuple[Any, ...]
    made: tuple[Any, ...]
    marks: Any

    @staticmethod
    def of(primals: Sequence[Any], made: tuple[Any, ...]) -> Saved:
        """Of a forward's primals, as `custom_vjp` hands them over with symbolic zeros."""
        bits = sum(primal.perturbed << i for i, primal in enumerate(primals))
        return Saved(tuple(primal.value for primal in primals), made, jnp.zeros((0, bits), jnp.bool_))

    @property
    def perturbed(self) -> tuple[bool, ...]:
        bits = self.marks.shape[1]
        return tuple(bool(bits >> i & 1) for i in range(len(self.given)))
