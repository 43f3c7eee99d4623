"""A call as ranks tell it to each other: everything that they must have in common, as text."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.problem.options import DEFAULT
from flashtile.torch.context.agree import Told, numbers_in
from flashtile.torch.context.wanted import Wanted, has_rows


def described(want: Wanted, **given: Any) -> Told:
    """What decides what is exchanged: types, shapes, dtypes, options. given: the other arguments by name."""
    found = {name: _said(value) for name, value in given.items()}
    found["the mask"] = str((want.band, [[_object(leaf) for leaf in term] for term in want.terms]))
    found["score"] = str([_object(modifier) for modifier in want.score])
    found["scale"], found["sink"] = str(want.scale), _said(want.sink)
    found["dropout"] = "None" if want.dropout is None else f"p={want.dropout.p}, seed={_said(want.dropout.seed)}"
    found["options"] = str(DEFAULT if want.options is None else want.options)
    return found


def numbers(want: Wanted, rows: int, **given: Any) -> Told:
    """The values of tensors that every rank has whole, where they are in the host's memory. Shards differ, and are not asked.

    rows: how many queries a rank has. given: further tensors by name. Of tensors on a device nothing is told: the host would
    wait for it.
    """
    found = {f"what {name} holds": tensor for name, tensor in given.items()}
    found["what sink holds"] = want.sink
    found["what dropout's seed holds"] = None if want.dropout is None else want.dropout.seed
    for i, leaf in enumerate(want.leaves):
        if not getattr(leaf, "along", ()):
            found |= {f"what {name} of mask {_name(leaf)} {i} holds": t for name, t in _tensors(leaf)}
    for i, modifier in enumerate(want.score):
        if not has_rows(modifier, rows):
            found |= {f"what {name} of {_name(modifier)} {i} holds": t for name, t in _tensors(modifier)}
    return numbers_in(found)


def _said(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, (str, int, float, bool, tuple, type(None))) else type(value).__name__
    gradient = ", with a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device.type}{gradient}"


def _object(given: Any) -> Any:
    """A predicate or modifier: its kind, numbers and tensors, and which of its tensors are one."""
    if not hasattr(given, "scalars"):
        return str(given)
    tensors = _tensors(given)
    first = {id(t): name for name, t in reversed(tensors)}
    return (_name(given), *given.scalars(), *(f"{name}={first[id(t)]}: {_said(t)}" for name, t in tensors))


def _tensors(given: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, t) for name, t in vars(given).items() if isinstance(t, torch.Tensor)]


def _name(given: Any) -> str:
    return getattr(given, "name", type(given).__name__)
