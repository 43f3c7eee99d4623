"""The passes beyond the first derivative, of a prepared call: their tensors by name, their plans, their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashtile import dispatch
from flashtile.plan.backend import Direction
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.prepared import PreparedCall, Tensors

Maybe = torch.Tensor | None


def tangents(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], moved: Sequence[Maybe]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tangents of out and lse. moved: those of packs and others, None for zero."""
    tensors, names = _along(call, packs, others, moved)
    plan = dispatch.plan_pass("tangent", call.problem, call.place, Direction(names), call.options.backend)
    made = Bound(plan, tensors, call.device).run(tensors)
    return made["tout"], made["tlse"]


def second_derivatives(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], moved: Sequence[Maybe],
    arriving: Mapping[str, Maybe], needs: Sequence[bool],
) -> list[Maybe]:  # fmt: skip
    """How the gradients of packs and others change, where needed, as these and the gradients that arrive move.

    arriving: "dout", "dlse", "tdout", "tdlse", None for zero.
    """
    tensors, names = _along(call, packs, others, moved)
    given = {name: _resolved(t) for name, t in arriving.items() if t is not None}
    wanted, made_names = call.wish(tuple(needs))
    direction = Direction(names, frozenset(given), wanted)
    plan = dispatch.plan_pass("second", call.problem, call.place, direction, call.options.backend)
    made = Bound(plan, tensors | given, call.device).run(tensors | given)
    for pack in call.packing.packs:
        parts = [made[f"d{name}"] for name in pack.parts if f"d{name}" in made]
        if len(parts) > 1:
            whole = torch.stack(parts, 2) if pack.heads is None else torch.cat(parts, 2)
            made["d" + "".join(pack.parts)] = whole
    found = [None if name is None else made[name] for name in made_names]
    return [None if g is None else g.to(t.dtype) for g, t in zip(found, (*packs, *others), strict=True)]


def _along(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], moved: Sequence[Maybe]
) -> tuple[Tensors, frozenset[str]]:
    """All inputs by name with the tangents that there are, and the names of what moves."""
    tensors, names = call.tensors(packs, others), list[str]()
    for pack, tangent in zip(call.packing.packs, moved, strict=False):
        if tangent is not None:
            for name, part in pack.views(_resolved(tangent)).items():
                tensors[f"t{name}"] = part
                names.append(name)
    for name, tangent in zip(call.names, moved[len(packs) :], strict=True):
        if tangent is not None and (name.startswith("score.") or name == "sink"):
            tensors[f"t{name}"] = _resolved(tangent)
            names.append(name)
    return tensors, frozenset(names)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_neg() if tensor.is_neg() else tensor
