"""LayerNorm and RMSNorm, with dropout, residual addition, row and column scales, subsets of rows and a second branch.

    h = colscale * drop(rowscale * scale * x) + drop(x1) + residual        (rounded to residual_dtype)
    out = (h - mean(h)) * rstd * weight + bias,  out1 the same with weight1, bias1;   an RMSNorm has no mean

LayerNorm: arXiv 1607.06450; RMSNorm: arXiv 1910.07467. Options and their order as in flash-attention's dropout_layer_norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.kernels.device.columns import column_sums
from flashtile.kernels.device.exchange import MOST_PROGRAMS, talk
from flashtile.kernels.device.number import SHORT
from flashtile.kernels.ops.norm_kernels import (
    Tile,
    norm_backward,
    norm_backward_sums,
    norm_forward,
)
from flashtile.plan.call import Buffer, KernelCall, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.dropout import threshold
from flashtile.problem.dtype import SIZES_BYTES
from flashtile.problem.op import FLOATS, Companion, Described

PARAMETERS = ("weight", "bias", "weight1", "bias1", "colscale")  # of which column sums are the gradients
INTEGERS = ("int32", "int64")


@dataclass(frozen=True)
class Norm(Companion):
    """x (rows, hidden); residual, x1 likewise; weights, biases, colscale (hidden,); rowscale (rows,); seed (1,).

    x_subset (rows,): 1 + the row of x that this row takes, 0 for none. out_subset (rows,): likewise where it goes.
    """

    kind: str = "layer"
    eps: float = 1e-5
    dropout_p: float = 0.0
    scale: float = 1.0
    prenorm: bool = False  # h is an output too
    zero_centered: bool = False  # weights are stored without their 1
    residual_dtype: str | None = None
    out_dtype: str | None = None
    out_rows: int | None = None

    op: ClassVar[str] = "norm"
    tensors: ClassVar[tuple[str, ...]] = (
        "x", "residual", "x1", "weight", "bias", "weight1", "bias1", "rowscale", "colscale", "x_subset", "out_subset", "seed",
    )  # fmt: skip
    differentiable: ClassVar[tuple[str, ...]] = ("x", "residual", "x1", *PARAMETERS)
    linear: ClassVar[tuple[str, ...]] = ("bias", "bias1")

    def check(self) -> None:
        if self.kind not in ("layer", "rms"):
            raise InvalidProblem(f"kind is {self.kind!r}; it must be 'layer' or 'rms'.")
        if not self.has("x") or len(self["x"].shape) != 2 or self["x"].shape[1] < 1:
            raise InvalidProblem("x must be there, with a last axis of at least 1.")
        self.expect_dtype("x", FLOATS)
        self.expect_number("eps", 0.0)
        self.expect_number("dropout_p", 0.0, 1.0)
        self.expect_number("scale")
        self.expect_bool("prenorm", "zero_centered")
        if self.drops != self.has("seed"):
            raise InvalidProblem(f"dropout_p is {self.dropout_p}; it must come with a seed, and 0 without one.")
        self.expect("x_subset", (self.rows,), "(rows,)", INTEGERS)
        self.expect("out_subset", (self.rows,), "(rows,)", INTEGERS)
        self.expect("residual", (self.rows, self.hidden), "(rows, hidden)")
        self.expect("rowscale", (self.rows,), "(rows,)")
        self.expect("x1", (self.rows, self.hidden), "(rows, hidden)")
        for name in PARAMETERS:
            self.expect(name, (self.hidden,), "(hidden,)")
        self.expect("seed", (1,), "(1,)", ("int64",))
        if not self.has("x_subset") and self["x"].shape[0] != self.rows:
            raise InvalidProblem(f"x has {self['x'].shape[0]} rows; there must be {self.rows}, as in residual.")
        if self.has("x1") and any(self.has(n) for n in ("rowscale", "colscale", "x_subset", "out_subset")):
            raise InvalidProblem("x1 is given with scales or subsets; a second branch must come without.")
        if not self.has("weight1") and self.has("bias1"):
            raise InvalidProblem("bias1 is given without weight1; a second output needs its weight.")
        if self.zero_centered and not self.has("weight"):
            raise InvalidProblem("zero_centered is True without a weight; it must be False.")
        if (self.out_rows is None) == self.has("out_subset"):
            raise InvalidProblem(f"out_rows is {self.out_rows}; it must be given with out_subset, and only then.")
        for name in ("residual_dtype", "out_dtype"):
            if getattr(self, name) not in (None, *FLOATS):
                raise InvalidProblem(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(FLOATS)}, or None.")

    @property
    def rows(self) -> int:
        for name in ("x_subset", "residual", "x"):
            found = self.find(name)
            if found is not None:
                return found.shape[0]
        return 0

    @property
    def hidden(self) -> int:
        return self["x"].shape[1]

    @property
    def drops(self) -> bool:
        return self.dropout_p != 0.0

    @property
    def stored(self) -> str:
        """dtype of h."""
        residual = self.find("residual")
        return self.residual_dtype or (residual.dtype if residual is not None else self["x"].dtype)

    @property
    def mixes(self) -> bool:
        """Whether h is another tensor than x."""
        others = ("residual", "x1", "rowscale", "colscale", "x_subset")
        return self.prenorm or self.drops or self.scale != 1.0 or any(map(self.has, others)) or self.stored != self["x"].dtype

    def outputs(self) -> dict[str, Described]:
        out = Described(
            (self.out_rows if self.out_rows is not None else self.rows, self.hidden), self.out_dtype or self["x"].dtype
        )
        made = {"out": out}
        if self.has("weight1"):
            made["out1"] = out
        if self.mixes:
            made["h"] = Described((self.rows, self.hidden), self.stored)
        if self.kind == "layer":
            made["mean"] = Described((self.rows,), "fp32")
        return {**made, "rstd": Described((self.rows,), "fp32")}

    def public(self) -> tuple[str, ...]:
        return ("out", *(("out1",) if self.has("weight1") else ()), *(("h",) if self.prenorm else ()))


@dataclass(frozen=True)
class Launch:
    """How rows are cut: `block` columns a step, `rows` at a time; a backward walks them with so many programs per SM."""

    rows: int
    block: int
    warps: int
    per_sm: int = 1
    stages: int = 1
    holds: bool = True


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def choose_forward(p: Norm) -> Launch:
    """Two to four 16-byte loads in flight per thread; a row that registers do not hold is walked in steps."""
    block = max(_power(p.hidden), 16)
    block = min(block, 32768)  # hidden 65536, rms, an H100: 0.99 of the copy ceiling, with 16384 0.86
    warps = min(max(block // 512, 4), 16) if block <= 16384 else 32
    return Launch(max(1, min(4096 // block, 16)), block, warps)


STRIP = 8192  # columns of a row that is too long for one program


def strips_talk(p: Norm, device: Device) -> bool:
    """Whether the programs of a row's strips wait for one another.

    Two strips pay where the second is not short, and where whole rows leave too few registers: not for an RMSNorm alone, whose
    hidden 16384 on an H100 reaches 0.74 of the copy ceiling, whole 0.92.
    """
    light = p.kind == "rms" and not p.mixes and p.hidden <= 2 * STRIP
    return talk(device) and 1.75 * STRIP < p.hidden <= STRIP * MOST_PROGRAMS and not light


def choose_backward(p: Norm, device: Device, arriving: frozenset[str]) -> Launch:
    """Two to four 16-byte loads of h and of dout per thread, beside its sums of the parameters' gradients.

    The next rows are on their way into shared memory, as far as that holds them. Rows that are too long for registers, or too
    wide for two sums beside them, are cut into strips whose programs tell one another their sums. Of the copy ceiling of an
    H100: hidden 16384 in two strips 0.88 (layer), whole 0.84; with dropout 0.89 and 0.68; 65536 in eight 0.87 (rms 0.92), by a
    pass for the sums before it 0.56.
    """
    block = STRIP if strips_talk(p, device) else min(max(_power(p.hidden), 16), 2 * STRIP)
    warps, rows, holds = min(max(block // 512, 4), 16), max(1, min(2048 // block, 16)), block <= STRIP
    per_sm, most = max(1, 8 // warps), 3
    if strips_talk(p, device):
        warps, most = 16 if p.has("weight1") or p.has("colscale") else 8, 2
    known = p.outputs()
    widths = [SIZES_BYTES[p.stored], *(SIZES_BYTES[known[name].dtype] for name in arriving)]
    widths += [] if holds else [SIZES_BYTES[p[n].dtype] for n in ("weight", "weight1") if p.has(n)]
    widths += [SIZES_BYTES[p[n].dtype] for n in ("x", "colscale") if p.has("colscale")]
    room = (
        device.smem_bytes // per_sm - 2048 - (4 * block if strips_talk(p, device) else 0)
    )  # some of a row's wait for the next
    ahead = min(most, room // (rows * block * sum(widths)))
    return Launch(rows, block, warps, per_sm, 1 + max(ahead, 0), holds)


def tile(p: Norm, launch: Launch) -> Tile:
    chunks = ceil(p.hidden / launch.block)
    return Tile(
        launch.rows, launch.block, p.hidden, chunks, launch.stages, launch.holds, p.kind == "layer",
        p.mixes, p.scale != 1.0, p.drops, p.zero_centered, p.stored, p["x"].dtype == "fp32",
        p["x"].dtype == "fp32" and p.hidden <= SHORT, "evict_last" if chunks > 1 else "",
    )  # fmt: skip


def _pointers(names: tuple[str, ...], present: Any) -> tuple[Pointer | None, ...]:
    return tuple(Pointer(name) if name in present else None for name in names)


def _strides(names: tuple[str, ...], present: Any) -> tuple[Any, ...]:
    return tuple(Strides(name) if name in present else (0, 0) for name in names)


def _drop(p: Norm) -> tuple[int, float]:
    """Words below the first are dropped; what is kept is multiplied by the second."""
    return threshold(p.dropout_p), 1.0 / (1.0 - p.dropout_p) if p.dropout_p < 1.0 else 0.0


def forward(p: Norm, device: Device, made: tuple[str, ...]) -> Steps:
    """One kernel."""
    launch = choose_forward(p)
    inputs = tuple(name for name, _ in p.given)
    args = (
        _pointers(("x", "residual", "x1", "rowscale", "colscale", "x_subset", "seed"), inputs),
        _pointers(("weight", "bias", "weight1", "bias1", "out_subset"), inputs),
        _pointers(("out", "out1", "h"), made), _pointers(("mean", "rstd"), made),
        _strides(("x", "residual", "x1"), inputs), p.rows, p.eps, p.scale, _drop(p),
    )  # fmt: skip
    grid = (ceil(p.rows / launch.rows), 1, 1)
    return Steps((KernelCall(norm_forward, grid, args, (("T", tile(p, launch)),), launch.warps, 1),))


def backward(p: Norm, device: Device, wanted: frozenset[str], arriving: frozenset[str]) -> Steps:
    """The rows' kernel, before it their sums where a row has several strips, after it the parameters'."""
    launch = choose_backward(p, device, arriving)
    constants, warps = (("T", tile(p, launch)),), launch.warps
    inputs, h = kept(p, wanted), "h" if p.mixes else "x"
    sums = tuple(name for name in PARAMETERS if name in wanted)
    slots = tuple(sums.index(name) if name in sums else None for name in PARAMETERS)
    strips = ceil(p.hidden / launch.block)
    together = strips > 1 and strips_talk(p, device)
    programs = max(1, min(device.sm_count * launch.per_sm // (strips if together else 1), ceil(p.rows / launch.rows)))
    scratch: list[Buffer] = []
    present = (*inputs, *(f"d{n}" for n in arriving))
    given = (h, "dout", "dout1", "dh", "mean" if p.kind == "layer" else "", "rstd")
    weights = _pointers(("weight", "weight1", "out_subset"), inputs)
    strides = _strides((h, "dout", "dout1", "dh", "x"), present)
    calls: list[KernelCall] = []
    if together:
        scratch.append(Buffer("words", (p.rows, strips), "int64", "scratch", zeroed=True))
    elif strips > 1:
        scratch.append(Buffer("sums", (2, p.rows), "fp32", "scratch"))
        args = (_pointers(given, present), weights, Pointer("sums"), strides, p.rows)
        calls.append(KernelCall(norm_backward_sums, (ceil(p.rows / launch.rows), 1, 1), args, constants, warps, 1))
    if sums:
        scratch.append(Buffer("partial", (len(sums), programs, p.hidden), "fp32", "scratch"))
    made = [f"d{name}" for name in wanted if name not in same(p, wanted)]
    args = (
        _pointers(given, present), weights, _pointers(("x", "rowscale", "colscale", "x_subset", "seed"), inputs),
        _pointers(("dx", "dresidual", "dx1"), made), _pointers(("sums", "partial", "words"), [b.name for b in scratch]),
        strides, p.rows, p.scale, _drop(p),
    )  # fmt: skip
    calls.append(KernelCall(norm_backward, (strips, programs, 1), args, (*constants, ("SLOTS", slots)), warps, 1))
    if sums:
        calls.append(column_sums("partial", tuple(f"d{name}" for name in sums), programs, p.hidden))
    return Steps(tuple(calls), tuple(scratch))


def kept(p: Norm, wanted: frozenset[str]) -> tuple[str, ...]:
    """What the backward reads."""
    names = ["h" if p.mixes else "x", *(("mean",) if p.kind == "layer" else ()), "rstd"]
    names += [n for n in ("weight", "weight1", "rowscale", "colscale", "x_subset", "out_subset", "seed") if p.has(n)]
    if "colscale" in wanted and "x" not in names:
        names.append("x")
    return tuple(names)


def same(p: Norm, wanted: frozenset[str]) -> dict[str, str]:
    """Gradients that are one tensor: dresidual is dx where nothing is dropped or scaled."""
    plain = not (p.drops or p.has("rowscale") or p.has("colscale") or p.has("x_subset") or p.scale != 1.0)
    if plain and {"x", "residual"} <= wanted and p["x"].dtype == p["residual"].dtype:
        return {"residual": "x"}
    return {}


def zeroed(p: Norm) -> frozenset[str]:
    """Tensors that subsets leave rows of unwritten."""
    return frozenset((("dx",) if p.has("x_subset") else ()) + (("out", "out1") if p.has("out_subset") else ()))


def host_forward(p: Norm, tensors: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    from flashtile.kernels.ops import norm_host

    return norm_host.forward(p, tensors, outputs)


def host_backward(p: Norm, tensors: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    from flashtile.kernels.ops import norm_host

    return norm_host.backward(p, tensors, outputs)


NORM = Op(Norm, forward, backward, host_forward, host_backward, kept, zeroed, same)
