"""What a forward leaves for its backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["given", "made"], meta_fields=["perturbed"])
@dataclass(frozen=True)
class Saved:
    """Inputs and outputs of a forward; `perturbed`: of which inputs a gradient may be wanted."""

    given: tuple[Any, ...]
    made: tuple[Any, ...]
    perturbed: tuple[bool, ...]
