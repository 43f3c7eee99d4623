"""Ops that are not attention as C functions: how many rows there are is given at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtile.errors import NotSupported
from flashtile.export.entry import Entry, Sizes
from flashtile.kernels.ops.catalogue import OPS
from flashtile.kernels.ops.dense import APART
from flashtile.plan.call import Buffer, KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.plan.op import Op, plan_backward, plan_forward
from flashtile.problem.op import Companion
from flashtile.triton_glue.compile import contiguous

# Inputs whose first axis are the rows.
BY_ROW = {
    "norm": ("x", "residual", "x1", "rowscale"),
    "cross_entropy": ("logits", "labels"),
    "dense": ("x",),
}
ROWS = (1, 2, 3, 16, 100, 1024, 4096, 100000)


@dataclass(frozen=True)
class CompanionExport:
    """A problem, whose rows stand for any number of them; tensors are dense.

    Of `dense` the products are the caller's, who has cuBLAS: its functions take and make what stands between them.
    """

    problem: Companion

    def __post_init__(self) -> None:
        p = self.problem
        reasons: list[str] = []
        if p.op not in BY_ROW:
            reasons.append(f"{p.op} has no axis of rows alone; exported are {', '.join(BY_ROW)}")
        reasons += [f"{name} is given; rows are then not those of x" for name in ("x_subset", "out_subset") if p.has(name)]
        if reasons:
            raise NotSupported(p.spell(), {"export": reasons})

    def at(self, sizes: Sizes) -> Companion:
        """The problem with so many rows."""
        given = tuple(
            (name, replace(d, shape=(sizes["rows"], *d.shape[1:])) if name in BY_ROW[self.problem.op] else d)
            for name, d in self.problem.given
        )
        return replace(self.problem, given=given)

    def samples(self, device: Device) -> list[dict[str, int]]:
        """Rows at which plans are made."""
        return [sizes for rows in (4096, *ROWS) for sizes in self.complete(dict(rows=rows), device)]

    def complete(self, sizes: Sizes, device: Device) -> list[dict[str, int]]:
        """Rows that a caller gives, with what the run-time finds for them."""
        return [dict(rows=sizes["rows"], sm_count=device.sm_count)]

    def forward(self, sizes: Sizes, device: Device) -> Plan:
        p = self.at(sizes)
        return _without_products(plan_forward(_op(p), p, _sized(device, sizes), "triton", keeps=True), {"pre"})

    def backward(self, sizes: Sizes, device: Device) -> Plan:
        p = self.at(sizes)
        wanted = frozenset(name for name, _ in p.given if name in p.differentiable)
        arriving = frozenset(p.public()) - frozenset(p.constant())
        return _without_products(plan_backward(_op(p), p, _sized(device, sizes), "triton", wanted, arriving), {"pre", "dact"})


def _op(p: Companion) -> Op:
    """How plans are made: those of `dense` without what cuBLASLt does on the way."""
    return APART if p.op == "dense" else OPS[p.op]


def _sized(device: Device, sizes: Sizes) -> Device:
    return replace(device, sm_count=sizes["sm_count"])


def _without_products(plan: Plan, given: set[str]) -> Plan:
    """The plan's kernels alone, where it has other steps: of what those make, `given` is then the caller's to bring."""
    calls = tuple(call for call in plan.calls if isinstance(call, KernelCall))
    if calls == plan.calls:
        return plan
    used = {name for call in calls for name in call.buffers()}
    buffers: list[Buffer] = []
    for b in plan.buffers:
        if b.name in used:
            between = b.role == "scratch" and b.name in ("dact", "dpre", "act")
            role = "input" if b.name in given else "output" if between else b.role
            buffers.append(replace(b, role=role))
    return replace(plan, buffers=tuple(buffers), calls=calls)


def companion_entries(name: str, export: CompanionExport) -> list[Entry]:
    """Forward and backward of an op."""
    derive = "    sizes[1] = gpu->sm_count;\n    return FLASHTILE_OK;\n"
    return [
        Entry(f"{name}_{direction}", export.problem.spell(), direction, ("rows",), ("sm_count",), plan,
              lambda b, sizes: contiguous(b.shape), lambda name: (), export.samples, export.complete, derive)
        for direction, plan in (("forward", export.forward), ("backward", export.backward))
    ]  # fmt: skip


def name_of(p: Companion) -> str:
    """What the functions of a problem are called unless the caller says."""
    first, out = p.given[0][1], next(iter(p.outputs().values()))
    columns = dict.fromkeys((*first.shape[1:], *out.shape[1:]))
    words = [p.op, first.dtype, "x".join(map(str, columns))]
    for option, value in p.options().items():
        words += [option] if value is True else [str(value)] if isinstance(value, str) else []
    return "_".join(words)
