"""The passes beyond the first derivative, of a prepared call: their tensors by name, their plans, their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashtile import dispatch
from flashtile.plan.backend import Direction
from flashtile.torch.execute.bound import Bound
from flashtile.torch.execute.prepared import PreparedCall, Tensors, alignment
from flashtile.torch.execute.replay import addresses_of

Maybe = torch.Tensor | None


def tangents(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], moved: Sequence[Maybe]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and the tangents of both. moved: those of packs and others, None for zero."""
    tensors, names = _along(call, packs, others, moved)
    made = _run(call, "tangent", Direction(names), tensors)
    return made["out"], made["lse"], made["tout"], made["tlse"]


def second_derivatives(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], moved: Sequence[Maybe],
    arriving: Mapping[str, Maybe], needs: Sequence[bool], tangents: bool = False,
) -> list[Maybe]:  # fmt: skip
    """How the gradients of packs and others change, where needed, as these and the gradients that arrive move.

    tangents: those of out and lse are wanted too, behind the others; the passes come by them anyway.
    arriving: "dout", "dlse", "tdout", "tdlse", None for zero.
    """
    tensors, names = _along(call, packs, others, moved)
    given = {name: _resolved(t) for name, t in arriving.items() if t is not None}
    wanted, made_names = call.wish(tuple(needs))
    along = ("out", "lse") if tangents else ()
    made = _run(call, "second", Direction(names, frozenset(given), wanted.union(along)), tensors | given)
    _join_packs(call, made)
    found = [None if name is None else made[name] for name in made_names]
    found = [None if g is None else g.to(t.dtype) for g, t in zip(found, (*packs, *others), strict=True)]
    return [*found, *(made[f"t{name}"] for name in along)]


def statistics(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], lse: torch.Tensor,
    wanted: frozenset[str], last: int,
) -> Tensors:  # fmt: skip
    """Those of "peak", "entropy" and "mass" that are wanted, by name. last: of how many last queries mass is, 0 for all.

    Mass has a pass of its own, of those queries alone.
    """
    tensors, made = {**call.tensors(packs, others), "lse": _resolved(lse).contiguous()}, Tensors()
    for some, count in ((wanted - {"mass"}, 0), (wanted & {"mass"}, last)):
        if some:
            found = _run(call, "statistics", Direction(wanted=some, last=count), dict(tensors))
            made.update({name: found[name] for name in some})
    return made


def forward_with_statistics(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], wanted: frozenset[str]
) -> tuple[list[torch.Tensor], Tensors]:
    """(what `call.forward` returns, those of "peak" and "entropy" that are wanted).

    One launch where the forward's backend keeps them beside out; elsewhere the forward, and a pass behind it.
    """
    plan = dispatch.plan_watched(call.problem, call.place, wanted, call.options.backend)
    if plan is None:
        made = call.forward(packs, others)
        return made, statistics(call, packs, others, made[1], wanted, 0)
    tensors = call.tensors(packs, others)
    given = tensors.values()
    key = "watched", wanted, alignment(addresses_of(given)) if call.on_gpu else 0, *map(torch.Tensor.stride, given)
    bound = call.bound_directed.get(key)
    if bound is None:
        bound = call.bound_directed[key] = Bound(plan, tensors, call.device)
    found = bound.run(tensors)
    return [found[name] for name in call.kept], {name: found[name] for name in wanted}


def entropy_gradients(
    call: PreparedCall, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], lse: torch.Tensor,
    entropy: torch.Tensor, arriving: torch.Tensor, needs: Sequence[bool],
) -> list[Maybe]:  # fmt: skip
    """The gradients of packs and others, where needed, that `arriving` at the entropy makes."""
    wanted, made_names = call.wish(tuple(needs))
    known = {"lse": _resolved(lse), "entropy": entropy, "dentropy": _resolved(arriving)}
    known = {name: t.contiguous() for name, t in known.items()}
    made = _run(call, "entropy", Direction(wanted=wanted - {"v"}), call.tensors(packs, others) | known)
    if "v" in wanted:
        made["dv"] = torch.zeros_like(made["v"])
    _join_packs(call, made)
    found = [None if name is None else made[name] for name in made_names]
    return [None if g is None else g.to(t.dtype) for g, t in zip(found, (*packs, *others), strict=True)]


def _join_packs(call: PreparedCall, made: Tensors) -> None:
    """Add the gradients of packed tensors, of those of their parts."""
    for pack in call.packing.packs:
        parts = [made[f"d{name}"] for name in pack.parts if f"d{name}" in made]
        if len(parts) > 1:
            made["d" + "".join(pack.parts)] = torch.stack(parts, 2) if pack.heads is None else torch.cat(parts, 2)


def _run(call: PreparedCall, name: str, direction: Direction, tensors: Tensors) -> Tensors:
    """The tensors with a pass's outputs."""
    given = tensors.values()
    key = name, direction, alignment(addresses_of(given)) if call.on_gpu else 0, *map(torch.Tensor.stride, given)
    bound = call.bound_directed.get(key)
    if bound is None:
        plan = dispatch.plan_pass(name, call.problem, call.place, direction, call.options.backend)
        bound = call.bound_directed[key] = Bound(plan, tensors, call.device)
    return bound.run(tensors)


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
