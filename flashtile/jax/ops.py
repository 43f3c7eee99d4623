"""Norms, rotary, cross-entropy and softmax: the public JAX functions, and one way to run them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.jax.arguments import narrowed, number, scaled, within_32_bits
from flashtile.jax.arrays import JAX_DTYPES, Arrays, promotes
from flashtile.jax.batching import one_by_one, undifferentiated
from flashtile.jax.explicit import Spec, automatically
from flashtile.jax.formulas import FORMULAS
from flashtile.jax.run import NAMES, run, varying_like
from flashtile.jax.saved import Saved, under_names
from flashtile.kernels.ops.catalogue import OPS, unsupported
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import Device
from flashtile.plan.op import plan_backward, plan_forward
from flashtile.problem.op import Companion, Described

IMPLEMENTATIONS = (None, "triton", "xla")
PARAMETERS = {"weight", "bias", "cos", "sin"}  # which jax_enable_x64 makes float64, whatever they go with
AS_IT_IS: Mapping[str, str] = {}


@promotes
def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, residual: Any = None, prenorm: bool = False,
    zero_centered: bool = False, out_dtype: Any = None, implementation: str | None = None,
) -> Any:  # fmt: skip
    """(h - mean(h)) / sqrt(var(h) + eps) * weight + bias along the last axis, with h = x + residual.

    x, residual: (..., hidden), fp16, bf16 or fp32; weight, bias: (hidden,). prenorm: also return h. zero_centered: weights
    are stored without their 1. out_dtype: x's by default. Differentiable in all arrays; their sums over rows are in a fixed
    order. implementation: "triton", "xla", or None for kernels on NVIDIA GPUs and plain JAX elsewhere.

    Returns out (..., hidden), or (out, h). All functions here raise InvalidProblem, and NotSupported with reasons.
    """
    options = dict(kind="layer", eps=eps, prenorm=prenorm, zero_centered=zero_centered)
    return _norm(x, weight, bias, residual, options, out_dtype, implementation)


@promotes
def rms_norm(
    x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-6, *, residual: Any = None, prenorm: bool = False,
    zero_centered: bool = False, out_dtype: Any = None, implementation: str | None = None,
) -> Any:  # fmt: skip
    """h / sqrt(mean(h^2) + eps) * weight + bias; all else as in `layer_norm`."""
    options = dict(kind="rms", eps=eps, prenorm=prenorm, zero_centered=zero_centered)
    return _norm(x, weight, bias, residual, options, out_dtype, implementation)


def _norm(x: Any, weight: Any, bias: Any, residual: Any, options: dict[str, Any], out_dtype: Any, implementation: Any) -> Any:
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise InvalidProblem("x has no axis; it must be (..., hidden).")
    if out_dtype is not None:
        options["out_dtype"] = NAMES.get(jnp.dtype(out_dtype), str(out_dtype))
    wide = {"x": x, "residual": residual}
    for name, array in wide.items():
        if array is not None and jnp.shape(array) != x.shape:
            raise InvalidProblem(f"{name} has shape {jnp.shape(array)}; it must be that of x, {x.shape}.")
    rows = math.prod(x.shape[:-1])
    flat = {name: None if a is None else jnp.reshape(a, (rows, x.shape[-1])) for name, a in wide.items()}
    made = _apply_op("norm", {**flat, "weight": weight, "bias": bias}, options, implementation)
    shaped = tuple(m.reshape(x.shape) for m in made)
    return shaped if number("prenorm", options["prenorm"]) else shaped[0]


@promotes
def rotary(
    q: Any, k: Any, cos: Any, sin: Any, *, interleaved: bool = False, conjugate: bool = False, offset: int = 0,
    positions: Any = None, implementation: str | None = None,
) -> Any:  # fmt: skip
    """q, or (q, k) where k is given, rotated by the angles of their positions, in float32.

    q: (B, T, N, H), k: (B, T, K, H) or None, fp16, bf16 or fp32; cos, sin: (length, rotary_dim / 2), likewise. positions:
    int32 (B, T); without them offset + 0, 1, 2, ... interleaved: element 2 i is paired with 2 i + 1, not i with
    i + rotary_dim / 2. conjugate: turn back. A position beyond the tables gives NaN where it is in an array. Differentiable in
    q and k.
    """
    arrays = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": within_32_bits(positions)}
    options = dict(interleaved=interleaved, conjugate=conjugate, offset=offset)
    made = _apply_op("rotary", arrays, options, implementation)
    return made[0] if k is None else made


@promotes
def cross_entropy(
    logits: Any, labels: Any, *, weight: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
    return_lse: bool = False, implementation: str | None = None,
) -> Any:  # fmt: skip
    """Cross-entropy, float32, of logits (..., classes), fp16, bf16 or fp32, with int32 labels (...); differentiable in logits.

    loss = (1 - label_smoothing) (lse - x_label) + label_smoothing * mean(lse - x) + z_loss * lse^2,  x = logit_scale * logits

    weight: of each class, (classes,), without a gradient: each class's lse - x above counts so much, as torch's; what z_loss
    adds knows no classes. reduction: "mean" over the rows whose label is not ignore_index, with weights divided by those of
    their labels, "sum", or "none", which gives (...). softcap: x = softcap * tanh(logit_scale * logits / softcap), as in
    Gemma's head. return_lse: also return each row's log of the sum of exponentials, without a gradient. A label that is no
    class gives NaN, in the loss and in its row's gradient.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(within_32_bits(labels))
    logit_scale, logits = scaled("logit_scale", logit_scale, logits)
    if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
        raise InvalidProblem(f"labels have shape {labels.shape}; it must be that of logits {logits.shape} but the last.")
    options = dict(
        reduction=reduction, smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale, softcap=softcap,
        ignore_index=ignore_index,
    )  # fmt: skip
    arrays = {"logits": logits.reshape(labels.size, logits.shape[-1]), "labels": labels.reshape(-1), "weight": weight}
    called, results = {"smoothing": "label_smoothing"}, 2 if number("return_lse", return_lse) else 1
    loss, *lse = _apply_op("cross_entropy", arrays, options, implementation, called, results)
    loss = loss.reshape(labels.shape) if reduction == "none" else loss
    return (loss, lse[0].reshape(labels.shape)) if return_lse else loss


@promotes
def softmax(
    x: Any, mask: Any = None, *, scale: float = 1.0, causal: bool = False, masked_score: float | None = None,
    implementation: str | None = None,
) -> Any:  # fmt: skip
    """softmax(scale * x) along the last axis, over the scores that are seen; 0 elsewhere and in rows that see none.

    x: (..., rows, columns), two to four axes, fp16, bf16 or fp32; the result is alike. mask: bool, True where a score is
    hidden, broadcasting to x. causal: row i sees columns j <= i + columns - rows. masked_score: the score of what the mask
    hides, instead of -inf.
    """
    x = jnp.asarray(x)
    if not 2 <= x.ndim <= 4:
        raise InvalidProblem(f"x has shape {x.shape}; it must be (..., rows, columns), of two to four axes.")
    wide = (1,) * (4 - x.ndim) + x.shape
    if mask is not None:
        try:
            mask = jnp.broadcast_to(jnp.asarray(mask), x.shape).reshape(wide)
        except ValueError as error:
            raise InvalidProblem(f"mask has shape {jnp.shape(mask)}; it must broadcast to that of x, {x.shape}.") from error
    scale, x = scaled("scale", scale, x)
    options = dict(scale=scale, causal=causal, masked_score=masked_score)
    return _apply_op("softmax", {"x": x.reshape(wide), "mask": mask}, options, implementation)[0].reshape(x.shape)


# -- one way to run them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """An op's forward, with all that a backward by kernels reads."""

    problem: Companion

    def inputs(self) -> tuple[Buffer, ...]:
        return tuple(Buffer(name, d.shape, d.dtype, "input") for name, d in self.problem.given)

    def outputs(self) -> tuple[Buffer, ...]:
        return tuple(Buffer(name, d.shape, d.dtype, "output") for name, d in self.problem.outputs().items())

    def plan(self, device: Device) -> Plan:
        return _launchable(plan_forward(OPS[self.problem.op], self.problem, device, "triton", True), device)

    def plain_refusals(self) -> list[str]:
        return []

    def plain(self, arrays: Arrays) -> Arrays:
        """What serves the kernels' backward alone is zero: the formula's own reads the inputs."""
        public, made = self.problem.public(), FORMULAS[self.problem.op](self.problem, arrays)
        found = {b.name: jnp.zeros(b.shape, JAX_DTYPES[b.dtype]) for b in self.outputs() if b.name not in public}
        described = self.problem.outputs()
        return {**found, **{name: made[name].astype(JAX_DTYPES[described[name].dtype]) for name in public}}


@dataclass(frozen=True)
class Backward:
    """An op's backward, from its inputs, its outputs and the gradients of those that arrive."""

    problem: Companion
    wanted: frozenset[str]
    arriving: frozenset[str]

    def inputs(self) -> tuple[Buffer, ...]:
        known = {**dict(self.problem.given), **self.problem.outputs()}
        arriving = [f"d{name}" for name in self.problem.public() if name in self.arriving]
        known |= {name: known[name[1:]] for name in arriving}
        return tuple(Buffer(name, d.shape, d.dtype, "input") for name, d in known.items())

    def outputs(self) -> tuple[Buffer, ...]:
        given = self.problem.given
        return tuple(Buffer(f"d{name}", d.shape, d.dtype, "output") for name, d in given if name in self.wanted)

    def plan(self, device: Device) -> Plan:
        op = OPS[self.problem.op]
        return _launchable(plan_backward(op, self.problem, device, "triton", self.wanted, self.arriving), device)

    def plain_refusals(self) -> list[str]:
        return []

    def plain(self, arrays: Arrays) -> Arrays:
        names = [b.name[1:] for b in self.outputs()]
        public = [name for name in self.problem.public() if name in self.arriving]
        described = self.problem.outputs()

        def formula(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
            made = FORMULAS[self.problem.op](self.problem, {**arrays, **dict(zip(names, leaves, strict=True))})
            return tuple(made[name].astype(JAX_DTYPES[described[name].dtype]) for name in public)

        _, pull = jax.vjp(formula, tuple(arrays[name] for name in names))
        (grads,) = pull(tuple(arrays[f"d{name}"] for name in public))
        return {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def _launchable(plan: Plan, device: Device) -> Plan:
    from flashtile.jax.launch import refusals

    reasons = unsupported("triton", device) or refusals(plan)
    if reasons:
        raise NotSupported(f"{plan.problem.spell()} on {device.target}", {"triton": reasons})
    return plan


def _run(step: Forward | Backward, implementation: str | None, *given: Any) -> tuple[Any, ...]:
    named = dict(zip((b.name for b in step.inputs()), given, strict=True))
    shapes = {b.name: b.shape for b in step.outputs()}
    return walked(step.problem.spell(), lambda *given: tuple(run(step, implementation, *given)), named, shapes)


def walked(
    what: str, function: Callable[..., tuple[Any, ...]], given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, ...]:
    """The function of what is `given`, a pass of `what`: `vmap` walks it, and nothing differentiates it.

    shapes: of what it makes, by name; gradients are called after what they are of.
    """
    call = custom_vmap(function)
    call.def_vmap(one_by_one(call))
    specs = {name: _spec_of(shape, tuple(given.values())) for name, shape in shapes.items()}
    return automatically(undifferentiated(what, call), given, tuple(specs), specs)


def _spec_of(shape: tuple[int, ...], given: Sequence[Any]) -> Spec:
    """How an output lies over explicit axes: as the first of the inputs whose axes begin with its own."""
    alike = next((x for x in given if x.shape[: len(shape)] == shape), None)
    return () if alike is None else tuple(jax.typeof(alike).sharding.spec)[: len(shape)]


@dataclass(frozen=True)
class Call:
    """What is static of one call."""

    problem: Companion
    implementation: str | None
    results: int | None  # how many of the op's outputs the caller asked for; None for all that it may have

    def public(self) -> tuple[str, ...]:
        return self.problem.public()[: self.results]


def _apply_op(
    op: str, arrays: dict[str, Any], options: dict[str, Any], implementation: str | None,
    called: Mapping[str, str] = AS_IT_IS, results: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What the op gives its caller. called: the caller's names, where they are not the op's; errors say those."""
    if implementation not in IMPLEMENTATIONS:
        raise InvalidProblem(
            f"implementation is {implementation!r}; it must be one of {', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    kind = OPS[op].kind
    options = {name: number(called.get(name, name), value) for name, value in options.items()}
    given = {name: jnp.asarray(arrays[name]) for name in kind.tensors if arrays.get(name) is not None}
    given |= {name: narrowed(given[name]) for name in PARAMETERS & given.keys()}
    described = tuple((name, Described(a.shape, NAMES.get(a.dtype) or str(a.dtype))) for name, a in given.items())
    values = list(given.values())
    try:
        problem = kind(described, **options)
    except InvalidProblem as error:
        raise renamed(error, called) from None
    return _compiled(Call(problem, implementation, results), *varying_like(values, values))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(call: Call, *given: Any) -> tuple[Any, ...]:
    return _run(Forward(call.problem), call.implementation, *given)[: len(call.public())]


def refuse_gradients(names: Sequence[str], primals: Sequence[Any], differentiable: Sequence[str]) -> None:
    """Raise InvalidProblem where a gradient is wanted of an array that has none."""
    for name, primal in zip(names, primals, strict=True):
        if primal.perturbed and name not in differentiable and jnp.issubdtype(primal.value.dtype, jnp.floating):
            raise InvalidProblem(
                f"{name} is differentiated, and has no gradient here: pass jax.lax.stop_gradient({name}), or leave it out of "
                "what is differentiated."
            )


@promotes
def _save(call: Call, *primals: Any) -> Any:
    refuse_gradients([name for name, _ in call.problem.given], primals, call.problem.differentiable)
    made = _run(Forward(call.problem), call.implementation, *(primal.value for primal in primals))
    made = under_names((f"flashtile_{call.problem.op}",), made)
    return made[: len(call.public())], Saved.of(primals, made)


@promotes
def _pull(call: Call, saved: Saved, arriving: tuple[Any, ...]) -> tuple[Any, ...]:
    problem, names = call.problem, [name for name, _ in call.problem.given]
    perturbed = (name for name, flag in zip(names, saved.perturbed, strict=True) if flag)
    wanted = frozenset(perturbed) & frozenset(problem.differentiable)
    flows = {name: grad for name, grad in zip(call.public(), arriving, strict=True) if not isinstance(grad, SymbolicZero)}
    flows = {name: grad for name, grad in flows.items() if name not in problem.constant()}
    if not wanted or not flows:
        return (None,) * len(names)
    made = dict(zip(problem.outputs(), saved.made, strict=True))
    for name in problem.always_arrive():
        if name not in flows:
            flows[name] = varying_like([jnp.zeros(made[name].shape, made[name].dtype)], [made[name]])[0]
    step = Backward(problem, wanted, frozenset(flows))
    known = {**dict(zip(names, saved.given, strict=True)), **made, **{f"d{name}": grad for name, grad in flows.items()}}
    grads = _run(step, call.implementation, *(known[b.name] for b in step.inputs()))
    found = dict(zip((b.name for b in step.outputs()), grads, strict=True))
    return tuple(found.get(f"d{name}") for name in names)


_apply.defvjp(_save, _pull, symbolic_zeros=True)
_compiled = jax.jit(_apply, static_argnums=0)
