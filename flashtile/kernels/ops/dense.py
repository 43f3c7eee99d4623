"""Linear layers with GELU between: the products are cuBLAS's. What stands between them is part of the products where cuBLASLt
knows it, of a product of our own where it is large and on Hopper, and else one pass of ours.

    pre = x weight1^T + bias1,  act = activation(pre),  out = act weight2^T + bias2   (without weight2: out = act)

In a backward that pass reads the gradient of act and pre once, writes that of pre over the former, and sums bias1's on the
way. GELU is its tanh approximation (arXiv 1606.08415).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.kernels.device.columns import column_sums
from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.gelu import CUBIC, RISE
from flashtile.kernels.sm90.backend import gluon_refusal
from flashtile.plan.call import Buffer, HostCall, KernelCall, Pointer
from flashtile.plan.device import Device
from flashtile.plan.op import Op, Steps
from flashtile.problem.op import FLOATS, Companion, Described
from flashtile.triton_glue import language as _triton
from flashtile.triton_glue.language import jit, tl

ACTIVATIONS = ("gelu_tanh", "relu", "sqrelu")


@dataclass(frozen=True)
class Dense(Companion):
    """x (rows, width); weight1 (hidden, width), bias1 (hidden,); weight2 (out, hidden), bias2 (out,).

    recompute: the backward makes act again from pre, on the way, instead of keeping it. returns_pre: the caller gets pre.
    """

    activation: str = "gelu_tanh"
    recompute: bool = False
    returns_pre: bool = False

    op: ClassVar[str] = "dense"
    tensors: ClassVar[tuple[str, ...]] = ("x", "weight1", "bias1", "weight2", "bias2")
    differentiable: ClassVar[tuple[str, ...]] = ("x", "weight1", "bias1", "weight2", "bias2")
    linear: ClassVar[tuple[str, ...]] = ("bias2",)

    def check(self) -> None:
        if not (self.has("x") and self.has("weight1") and len(self["x"].shape) == 2 and len(self["weight1"].shape) == 2):
            raise InvalidProblem("x must be (..., width), and weight1 (hidden, width).")
        self.expect_dtype("x", FLOATS)
        dtype, (hidden, width) = (self["x"].dtype,), self["weight1"].shape
        if self["x"].shape[1] != width or not hidden or not width:
            raise InvalidProblem(
                f"weight1 has shape {(hidden, width)}; it must be (hidden, width), x's being {self['x'].shape[1]}."
            )
        self.expect("weight1", (hidden, width), "(hidden, width)", dtype)
        self.expect("bias1", (hidden,), "(hidden,)", dtype)
        second = self.find("weight2")
        if second is None and self.has("bias2"):
            raise InvalidProblem("bias2 is given without weight2; it must come with one.")
        if second is not None:
            out = second.shape[0]
            self.expect("weight2", (out, hidden), "(out, hidden)", dtype)
            self.expect("bias2", (out,), "(out,)", dtype)
        if self.activation not in ACTIVATIONS:
            raise InvalidProblem(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")
        self.expect_bool("recompute", "returns_pre")
        if self.recompute and second is None:
            raise InvalidProblem("recompute is True without weight2; there is nothing to make again.")

    @property
    def rows(self) -> int:
        return self["x"].shape[0]

    @property
    def hidden(self) -> int:
        return self["weight1"].shape[0]

    def outputs(self) -> dict[str, Described]:
        inner = Described((self.rows, self.hidden), self["x"].dtype)
        if not self.has("weight2"):
            return {"out": inner, "pre": inner}
        made = {"out": Described((self.rows, self["weight2"].shape[0]), self["x"].dtype), "pre": inner}
        return made if self.recompute else {**made, "act": inner}

    def public(self) -> tuple[str, ...]:
        return ("out", "pre") if self.returns_pre else ("out",)

    def constant(self) -> tuple[str, ...]:
        return ("pre",) if self.returns_pre else ()

    def flops(self, wanted: frozenset[str] | None = None) -> int:
        first, second = (2 * self.rows * (w.shape[0] * w.shape[1] if w else 0) for w in map(self.find, ("weight1", "weight2")))
        if wanted is None:
            return first + second
        below = bool(wanted & {"x", "weight1", "bias1"})
        return second * (below + ("weight2" in wanted)) + first * len(wanted & {"x", "weight1"})


@dataclass(frozen=True)
class DenseTile:
    """Compile-time part: `rows` x `block` elements a step."""

    rows: int
    block: int
    activation: str


# -- kernels --------------------------------------------------------------------------------------------------------------


@jit
def activate(x, T: tl.constexpr):
    """(activation, its derivative)."""
    if T.activation == "gelu_tanh":
        inner = RISE * (x + CUBIC * x * x * x)
        decay = tl.exp2(-tl.maximum(inner, -80.0) * LOG2E)
        gate = 1.0 / (1.0 + decay)
        slope = RISE * (1.0 + 3.0 * CUBIC * x * x)
        return x * gate, gate + x * gate * (decay * gate) * slope
    else:
        positive = tl.where(x > 0.0, x, 0.0)
        if T.activation == "relu":
            return positive, tl.where(x > 0.0, 1.0, 0.0)
        else:
            return positive * positive, 2.0 * positive


@jit
def dense_activate(pre_ptr, act_ptr, count, BLOCK: tl.constexpr, T: tl.constexpr):
    """act = activation(pre), element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    act, _slope = activate(tl.load(pre_ptr + at, mask=at < count, other=0.0).to(tl.float32), T)
    tl.store(act_ptr + at, act.to(act_ptr.dtype.element_ty), mask=at < count)


@jit
def dense_backward(pointers, rows, hidden, steps, T: tl.constexpr):
    """dpre = dact * activation'(pre), written over dact or where it says; act again; sums of dpre over `steps` tiles of rows.

    pointers = (pre, dact, dpre, act or None, partial sums (programs, hidden) or None).
    """
    pre_ptr, dact_ptr, dpre_ptr, act_ptr, partial_ptr = pointers
    ROWS: tl.constexpr = T.rows
    BLOCK: tl.constexpr = T.block
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) * steps
    for step in tl.range(first, first + steps):
        row = tl.cast(step, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < hidden)[None, :]
        at = row[:, None] * hidden + column[None, :]
        act, slope = activate(tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32), T)
        dpre = tl.load(dact_ptr + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
        if act_ptr is not None:
            tl.store(act_ptr + at, act.to(act_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            total += dpre
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0) * hidden + column, tl.sum(total, 0), mask=column < hidden)


# -- products, by PyTorch -------------------------------------------------------------------------------------------------

Tensors = dict[str, Any]


def linear(x: Any, weight: Any, bias: Any) -> Any:
    from torch.nn.functional import linear as product

    return product(x, weight, bias)


def transposes(weight: Any) -> bool:
    """Whether this weight's gradient is formed as (x^T dout)^T instead of dout^T x, by the rule of PyTorch's autograd.

    In float32 alone: there cuBLAS rounds the two differently. In 16 bits it would be a copy for nothing, and the weight is
    None where nothing else of it is read.
    """
    from torch import float32

    return weight is not None and weight.dtype == float32 and weight.stride() != (weight.shape[1], 1)


def weight_gradient(dout: Any, x: Any, weight: Any) -> Any:
    """That of the weight of x weight^T, which is `kept` where `transposes` asks how it lies."""
    return (x.t() @ dout).t() if transposes(weight) else dout.t() @ x


def first_product(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    return {outputs[0]: linear(t["x"], t["weight1"], t.get("bias1"))}


def activated_product(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """The activation within cuBLASLt's product, of sums that were never rounded; and what it was taken of, if that is kept."""
    from torch import ops

    from flashtile.kernels.ops import cublaslt

    if len(outputs) == 2:
        return dict(zip(outputs, cublaslt.activated(t["x"], t["weight1"], t.get("bias1")), strict=True))
    bias = t["bias1"] if "bias1" in t else t["x"].new_zeros(p.hidden)
    made = ops.aten._addmm_activation(bias, t["x"], t["weight1"].t(), use_gelu=p.activation == "gelu_tanh")
    return {outputs[0]: made}


def second_product(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    return {"out": linear(t["act"], t["weight2"], t.get("bias2"))}


def outer_gradients(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """That of act, and of the second layer's parameters where act is there already."""
    made: Tensors = {"dact": t["dout"] @ t["weight2"] if p.has("weight2") else t["dout"].contiguous()}
    if "dbias2" in outputs:
        made["dbias2"] = t["dout"].sum(0)
    if "dweight2" in outputs:
        made["dweight2"] = weight_gradient(t["dout"], t["act"], t["weight2"])
    return made


def fused_gradients(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """Of two layers: GELU's derivative and the sums for biases are parts of products. dpre may be there already."""
    from flashtile.kernels.ops import cublaslt

    made = parameter_gradients("2", t["dout"], t.get("act"), outputs)
    if not {"dx", "dweight1", "dbias1"}.isdisjoint(outputs):
        dpre = t["dpre"] if "dpre" in t else cublaslt.times_derivative(t["dout"], t["weight2"], t["pre"])
        made |= parameter_gradients("1", dpre, t.get("x"), outputs)
        if "dx" in outputs:
            made["dx"] = dpre @ t["weight1"]
    return made


def parameter_gradients(layer: str, dout: Any, x: Any, outputs: tuple[str, ...]) -> Tensors:
    """Of a layer's weight and bias, as far as they are among the outputs."""
    from flashtile.kernels.ops import cublaslt

    weight, bias = (f"d{name}{layer}" for name in ("weight", "bias"))
    if weight in outputs and bias in outputs:
        return dict(zip((weight, bias), cublaslt.with_sums(dout.t(), x), strict=True))
    if weight in outputs:
        return {weight: dout.t() @ x}
    return {bias: dout.sum(0)} if bias in outputs else {}


def inner_gradients(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    """Of what is below dpre, and of weight2 where act was made again."""
    made: Tensors = {}
    dpre = t["dpre"] if "dpre" in t else t["dact"]
    if "dweight2" in outputs:
        made["dweight2"] = weight_gradient(t["dout"], t["act"], t["weight2"])
    if "dx" in outputs:
        made["dx"] = dpre @ t["weight1"]
    if "dweight1" in outputs:
        made["dweight1"] = weight_gradient(dpre, t["x"], t.get("weight1"))
    return made


# -- plans ----------------------------------------------------------------------------------------------------------------

BLOCK, WARPS = 4096, 4  # elements of act at a time

TILE_ROWS, TILE_COLUMNS, STEPS = 4, 512, 32  # of the backward: 128 rows a program, whose sums are few beside what it reads


def fuses(p: Dense, device: Device, keeps: bool) -> bool:
    """Whether cuBLASLt has the activation, or, if what it is taken of is kept, has that too and its derivative."""
    known = ("gelu_tanh",) if keeps else ("gelu_tanh", "relu")
    sizes = (n for name in ("weight1", "weight2") if p.has(name) for n in p[name].shape)
    return device.kind == "cuda" and p.activation in known and p["x"].dtype != "fp32" and not any(n % 8 for n in sizes)


def multiplies(p: Dense, device: Device, depth: int, ending: str, sums: bool = False) -> bool:
    """Whether a product so deep that ends with GELU, or its derivative, is Hopper's own instead of cuBLASLt's."""
    if device.target != "sm90" or p.activation != "gelu_tanh" or _triton.INTERPRETED or gluon_refusal():
        return False
    from flashtile.kernels.ops import sm90_gemm as product

    return product.fills(p.rows, p.hidden, depth, product.TILES[ending], sums, device)


def own_forward(p: Dense, device: Device, act: str, keeps: bool) -> KernelCall:
    """act, and pre if that is kept, by Hopper's own product."""
    from flashtile.kernels.ops import sm90_gemm as product

    return product.gelu_call(p.rows, p.hidden, act, p.has("bias1"), keeps, product.TILES["gelu"], device)


def own_backward(p: Dense, device: Device, wanted: frozenset[str]) -> Steps:
    """dpre and bias1's gradient by Hopper's own product, then the other products."""
    from flashtile.kernels.ops import sm90_gemm as product

    tile, sums = product.TILES["derivative"], "bias1" in wanted
    programs = product.parts(p.rows, tile)
    calls: list[KernelCall | HostCall] = [
        product.derivative_call(p.rows, p.hidden, p["weight2"].shape[0], tile, sums, device),
    ]
    scratch = [Buffer("dpre", (p.rows, p.hidden), p["x"].dtype, "scratch")]
    if sums:
        scratch.append(Buffer("partial", (1, programs, p.hidden), "fp32", "scratch"))
        calls.append(column_sums("partial", ("dbias1",), programs, p.hidden))
    others = tuple(f"d{n}" for n in p.differentiable if n in wanted and n != "bias1")
    if others:
        calls.append(HostCall(fused_gradients, others))
    return Steps(tuple(calls), tuple(scratch))


def forward(p: Dense, device: Device, made: tuple[str, ...], apart: bool = False) -> Steps:
    """Product, activation, product; the activation is part of the first, if not asked for `apart`, or lies over it."""
    two, keeps = p.has("weight2"), "pre" in made
    act = "act" if two else "out"
    scratch = [Buffer("act", (p.rows, p.hidden), p["x"].dtype, "scratch")] if two and "act" not in made else []
    calls: list[KernelCall | HostCall] = []
    if fuses(p, device, keeps) and not apart and multiplies(p, device, p["x"].shape[1], "gelu"):
        calls.append(own_forward(p, device, act, keeps))
    elif fuses(p, device, keeps) and not apart:
        calls.append(HostCall(activated_product, (act, "pre") if keeps else (act,)))
    else:
        pre, count = "pre" if keeps else act, p.rows * p.hidden
        calls.append(HostCall(first_product, (pre,)))
        constants = (("BLOCK", BLOCK), ("T", DenseTile(0, 0, p.activation)))
        args = (Pointer(pre), Pointer(act), count)
        calls.append(KernelCall(dense_activate, (ceil(count / BLOCK), 1, 1), args, constants, WARPS, 1))
    if two:
        calls.append(HostCall(second_product, ("out",)))
    return Steps(tuple(calls), tuple(scratch))


def backward(p: Dense, device: Device, wanted: frozenset[str], arriving: frozenset[str], apart: bool = False) -> Steps:
    """Products above, the pass between them, products below; products alone where what is between is part of them."""
    two, inner = p.has("weight2"), Described((p.rows, p.hidden), p["x"].dtype)
    if two and not p.recompute and not apart and fuses(p, device, keeps=True):
        depth, sums = p["weight2"].shape[0], "bias1" in wanted
        if (sums or wanted & {"x", "weight1"}) and multiplies(p, device, depth, "derivative", sums):
            return own_backward(p, device, wanted)
        return Steps((HostCall(fused_gradients, tuple(f"d{n}" for n in p.differentiable if n in wanted)),), ())
    makes_act = p.recompute and "weight2" in wanted
    above = [f"d{n}" for n in ("weight2", "bias2") if n in wanted and not (n == "weight2" and makes_act)]
    below = [f"d{n}" for n in ("x", "weight1", "weight2") if n in wanted and not (n == "weight2" and not makes_act)]
    scratch = [Buffer("dact", inner.shape, inner.dtype, "scratch")]
    scratch += [] if two else [Buffer("dpre", inner.shape, inner.dtype, "scratch")]
    scratch += [Buffer("act", inner.shape, inner.dtype, "scratch")] if makes_act else []
    calls: list[KernelCall | HostCall] = [HostCall(outer_gradients, ("dact", *above))]
    if below or "bias1" in wanted:
        programs = max(1, ceil(p.rows / (TILE_ROWS * STEPS)))
        if "bias1" in wanted:
            scratch.append(Buffer("partial", (1, programs, p.hidden), "fp32", "scratch"))
        pointers = (
            Pointer("pre"), Pointer("dact"), Pointer("dact" if two else "dpre"), Pointer("act") if makes_act else None,
            Pointer("partial") if "bias1" in wanted else None,
        )  # fmt: skip
        constants = (("T", DenseTile(TILE_ROWS, TILE_COLUMNS, p.activation)),)
        grid = (programs, ceil(p.hidden / TILE_COLUMNS), 1)
        calls.append(KernelCall(dense_backward, grid, (pointers, p.rows, p.hidden, STEPS), constants, WARPS, 1))
        if "bias1" in wanted:
            calls.append(column_sums("partial", ("dbias1",), programs, p.hidden))
        if below:
            calls.append(HostCall(inner_gradients, tuple(below)))
    return Steps(tuple(calls), tuple(scratch))


def kept(p: Dense, wanted: frozenset[str]) -> tuple[str, ...]:
    """What the backward reads; act only for weight2, and not where it is made again. Of weights also how they lie."""
    below = bool(wanted & {"x", "weight1", "bias1"})
    names = ["weight2"] if p.has("weight2") else []
    names += ["pre"] if below or (p.recompute and "weight2" in wanted) else []
    names += ["act"] if "weight2" in wanted and not p.recompute else []
    names += ["weight1"] if "x" in wanted or ("weight1" in wanted and p["x"].dtype == "fp32") else []
    names += ["bias1"] if below and p.has("bias1") else []  # for second derivatives, which make pre again
    return (*names, *(("x",) if "weight1" in wanted else ()))


# -- plain PyTorch --------------------------------------------------------------------------------------------------------


def host_activate(p: Dense, pre: Any) -> tuple[Any, Any]:
    """(activation, its derivative), in float32."""
    x = pre.float()
    if p.activation == "gelu_tanh":
        t = (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh()
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope
    positive = x.clamp(min=0.0)
    return (positive, (x > 0).float()) if p.activation == "relu" else (positive * positive, 2.0 * positive)


def host_forward(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    made = first_product(p, t, ("pre",))
    act = host_activate(p, made["pre"])[0].to(t["x"].dtype)
    if p.has("weight2"):
        made |= {"act": act, **second_product(p, {**t, "act": act}, ("out",))}
    else:
        made["out"] = act
    return {name: made[name] for name in outputs}


def host_backward(p: Dense, t: Tensors, outputs: tuple[str, ...]) -> Tensors:
    act = None
    if "pre" in t:
        act, slope = host_activate(p, t["pre"])
        t = {"act": act.to(t["pre"].dtype), **t}
        made = outer_gradients(p, t, outputs)
        dpre = made["dact"].float() * slope
        below = tuple(name for name in outputs if name not in made)
        made |= {"dbias1": dpre.sum(0), **inner_gradients(p, {**t, "dpre": dpre.to(t["pre"].dtype)}, below)}
    else:
        made = outer_gradients(p, t, outputs)
    return {name: made[name] for name in outputs}


DENSE = Op(Dense, forward, backward, host_forward, host_backward, kept)
APART = Op(Dense, partial(forward, apart=True), partial(backward, apart=True), host_forward, host_backward, kept)
