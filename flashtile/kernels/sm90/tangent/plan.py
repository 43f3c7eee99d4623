"""Plans of forward mode: what it refuses, its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashtile.kernels.device.score import form_of
from flashtile.kernels.device.small import is_small
from flashtile.kernels.device.varlen import Schedules
from flashtile.kernels.sm90.host.arguments import over_queries
from flashtile.kernels.sm90.host.choose_forward import forward_grid, tangent_choice
from flashtile.kernels.sm90.host.tile_forward import ForwardLaunch, ForwardTile, cut, make_forward_tile
from flashtile.plan.backend import Direction
from flashtile.plan.buffers import tangent_buffers
from flashtile.plan.call import Descriptor, HostCall, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.rules import told
from flashtile.problem.attention import AttentionProblem


def refusals(p: AttentionProblem, device: Device, direction: Direction) -> list[str]:
    """Reasons against a tangent, beside those against the forward."""
    reasons: list[str] = []
    if "q" not in direction.moved:
        reasons.append("q has no tangent; here it always has one")
    if p.score or p.sink is not None or p.dropout is not None or p.where or p.blocks is not None or p.stored is not None:
        reasons.append("scores are modified, dropped, joined by a sink, stored in 8 bits, or hidden by more than a band")
    if p.lengths.ragged or p.lengths.varlen or p.shares_offset:
        reasons.append("items differ in length, or may repeat a problem whose scores are large")
    if form_of(p).prescale:
        reasons.append("the scale is not positive")
    if cut(p.head_dim)[1] > 1 or cut(p.head_dim_v) != cut(p.head_dim) or p.head_dim > 128:
        reasons.append(
            f"head_dim is {p.head_dim} and head_dim_v {p.head_dim_v}; supported are up to 64, or both from 97 to 128"
        )
    if is_small(p):
        reasons.append("the problem is small; the portable kernels multiply what products of 16 bits round off, too")
    return reasons


def make_tangent_tile(p: AttentionProblem, launch: ForwardLaunch) -> ForwardTile:
    """That of the forward which looks for every maximum; out and its tangent take the place of queries and theirs."""
    made = make_forward_tile(p, launch, form_of(p))
    return replace(
        made,
        softmax=replace(made.softmax, bounded=False, deep=True, watches=False, votes=False, draws_ahead=False, mixes=0),
        schedule=replace(made.schedule, once=False, halves=False),
        pipeline=replace(made.pipeline, staged=False, singly=False),
    )


def plan_tangent(p: AttentionProblem, device: Device, direction: Direction, launch: ForwardLaunch | None = None) -> Plan:
    """One launch; `launch` overrides its tile."""
    launch, fired = tangent_choice(p, device, direction.moved) if launch is None else (launch, ())
    targets = (Pointer("lse"), Pointer("tlse"), None, None, None, None)
    call = tangent_call(p, device, direction, launch, ("out", "tout"), targets)
    return Plan(p, "hopper", "", tangent_buffers(p, direction), (call,), (f"tangent tile {launch.spell()}", *told(fired)))


def plan_second(p: AttentionProblem, device: Device, direction: Direction, plan: Plan) -> Plan:
    """The portable `plan` of a second derivative, whose tangent pass is this one."""
    own, notes = first_pass(p, device, direction, None)
    calls = tuple(own if is_tangent(call) else call for call in plan.calls)
    notes = (*notes, *(n for n in plan.notes if not n.startswith("tangent tile")))
    return replace(plan, backend="hopper", calls=calls, notes=notes)


def first_pass(
    p: AttentionProblem, device: Device, direction: Direction, behind: tuple[int, Pointer] | None
) -> tuple[KernelCall, tuple[str, ...]]:
    """(the tangent pass of a second derivative, its notes); behind: what `attention_tangent` has last of the targets."""
    launch, fired = tangent_choice(p, device, direction.moved)
    given = tuple(Pointer(n) if n in direction.given else None for n in ARRIVING)
    strides = tuple(Strides(n if n in direction.given else "q") for n in ARRIVING)
    made = (None, "tout" if "out" in direction.wanted else None)
    targets = (None, Pointer("tlse") if "lse" in direction.wanted else None, Pointer("rows"), given, strides, behind)
    call = tangent_call(p, device, direction, launch, made, targets)
    return call, (f"tangent tile {launch.spell()}", *told(fired))


ARRIVING = ("dout", "dlse", "tdout", "tdlse")


def is_tangent(call: KernelCall | HostCall) -> bool:
    """Whether a call is a tangent pass, whoever's."""
    return isinstance(call, KernelCall) and call.kernel.fn.__name__ == "attention_tangent"


def tangent_call(
    p: AttentionProblem, device: Device, direction: Direction, launch: ForwardLaunch, made: tuple[str | None, str | None],
    targets: tuple[Any, ...],
) -> KernelCall:  # fmt: skip
    """The launch, which makes out and its tangent under these names, None if not wanted."""
    from flashtile.kernels.sm90.tangent.kernel import attention_tangent

    tile = make_tangent_tile(p, launch)
    tiles, tail = over_queries(p, launch, tile, Schedules(p))
    moved = (replace(t, name=f"t{t.name}") if t.name in direction.moved else None for t in tiles)
    outs = (name and Descriptor(name, (1, 1, tile.rows, tile.columns_v)) for name in made)
    args = (*tiles, *moved, *outs, targets, *tail)
    return KernelCall(attention_tangent, forward_grid(p, launch, device), args, (("T", tile),), launch.num_warps, early=True)
