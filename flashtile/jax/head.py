"""linear_cross_entropy: the loss of a language model's head in JAX, some classes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from flashtile.errors import InvalidProblem, renamed
from flashtile.jax.arguments import narrowed, number, numbers, scaled, within_32_bits
from flashtile.jax.arrays import Arrays, promotes
from flashtile.jax.ops import IMPLEMENTATIONS, Backward, Forward, refuse_gradients, walked
from flashtile.jax.run import NAMES, run, varying_like
from flashtile.jax.saved import Saved, under_names
from flashtile.kernels.ops.cross_entropy_problem import CrossEntropy, check_reduction
from flashtile.problem.op import FLOATS, Described

CHUNK_BYTES = 64 * 2**20  # of logits at a time, as in PyTorch
STEP = 256  # classes to which chunks are rounded: tiles of a product
UNKNOWN_ROWS = 8192  # where their number is symbolic
CALLED = {"smoothing": "label_smoothing", "weight": "class_weight"}  # what the op of a chunk calls otherwise


@promotes
def linear_cross_entropy(
    x: Any, weight: Any, labels: Any, *, bias: Any = None, class_weight: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, logit_scale: float = 1.0, softcap: float | None = None,
    ignore_index: int = -100, logits_bytes: int | None = None, implementation: str | None = None,
) -> Any:  # fmt: skip
    """Cross-entropy of the logits x weight^T + bias with labels, float32, in bounded memory for the logits.

    x: (..., hidden), weight: (classes, hidden), bias: (classes,), one dtype of fp16, bf16 and fp32; labels: (...), int32.
    class_weight, reduction, softcap and the other options are those of `cross_entropy`, where class_weight is called weight.
    Differentiable in x, weight and bias.

    Logits are in x's dtype, of some classes at a time: of as many as take `logits_bytes` (64 MiB by default, at least 256
    classes). The backward makes them again, which is one product more than with all logits in memory: four instead of three.
    The gradient of x is summed in float32 and rounded once. A matrix product is XLA's; what is made of its logits is done by
    kernels on NVIDIA GPUs and in plain JAX elsewhere, or as implementation says.

    Returns a scalar, or (...) with reduction "none". Raises InvalidProblem for a request without meaning.
    """
    given = {"x": x, "weight": weight, "bias": bias, "labels": within_32_bits(labels), "class_weight": class_weight}
    t = {name: jnp.asarray(array) for name, array in given.items() if array is not None or name in ("x", "weight", "labels")}
    t |= {name: narrowed(t[name]) for name in ("weight", "bias", "class_weight") if name in t}
    x, weight, labels = t["x"], t["weight"], t["labels"]
    if NAMES.get(x.dtype) not in FLOATS:
        raise InvalidProblem(f"x is {x.dtype}; it must be {' or '.join(FLOATS)}.")
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and weight.size and weight.dtype == x.dtype
    if not fits:
        raise InvalidProblem(
            f"weight is {weight.dtype} {weight.shape}; it must be (classes, hidden) for x, {x.dtype} {x.shape}."
        )
    if "bias" in t and (t["bias"].shape != weight.shape[:1] or t["bias"].dtype != x.dtype):
        raise InvalidProblem(
            f"bias is {t['bias'].dtype} {t['bias'].shape}; it must be (classes,) for weight, {x.dtype} {weight.shape}."
        )
    if labels.shape != x.shape[:-1]:
        raise InvalidProblem(f"labels have shape {labels.shape}; it must be that of x {x.shape} but the last.")
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise InvalidProblem(f"implementation is {implementation!r}; it must be one of {known}.")
    check_reduction(reduction)
    logits_bytes = number("logits_bytes", CHUNK_BYTES if logits_bytes is None else logits_bytes)
    if isinstance(logits_bytes, bool) or not isinstance(logits_bytes, int) or logits_bytes < 0:
        raise InvalidProblem(f"logits_bytes is {logits_bytes!r}; it must be an int, at least 0.")
    if isinstance(logit_scale, Tracer) and "bias" in t:
        t["bias"] = scaled("logit_scale", logit_scale, t["bias"])[1]
    logit_scale, t["x"] = scaled("logit_scale", logit_scale, x.reshape(labels.size, x.shape[-1]))
    t["labels"] = labels.reshape(-1)
    options = numbers(
        smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale, softcap=softcap, ignore_index=ignore_index
    )
    described = tuple((name, Described(a.shape, NAMES.get(a.dtype) or str(a.dtype))) for name, a in t.items())
    head = Head(described, reduction, tuple(options.items()), logits_bytes, implementation)
    head.check()
    loss = _compiled(head, *varying_like(list(t.values()), list(t.values())))
    return loss.reshape(labels.shape) if reduction == "none" else loss


@dataclass(frozen=True)
class Head:
    """What is static of one call. given: what its arrays are, by name and in order."""

    given: tuple[tuple[str, Described], ...]
    reduction: str
    options: tuple[tuple[str, Any], ...]
    logits_bytes: int
    implementation: str | None

    def __getitem__(self, name: str) -> Any:
        return dict(self.options)[name]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.given]

    def check(self) -> None:
        """Raise InvalidProblem for options without meaning, and arrays that do not fit, in the caller's names."""
        given = dict(self.given)
        (rows, _), (classes, _) = given["x"].shape, given["weight"].shape
        described = [("logits", Described((rows, classes), given["x"].dtype)), *self._beside()]
        try:
            CrossEntropy(tuple(described), reduction=self.reduction, **dict(self.options))
        except InvalidProblem as error:
            raise renamed(error, CALLED) from None

    def _beside(self) -> list[tuple[str, Described]]:
        given = dict(self.given)
        known = [("labels", given["labels"])]
        return [*known, ("weight", given["class_weight"])] if "class_weight" in given else known

    def chunks(self) -> Iterator[tuple[slice, CrossEntropy]]:
        """The classes of each chunk, and the problem of its logits."""
        given = dict(self.given)
        (rows, _), (classes, _), dtype = given["x"].shape, given["weight"].shape, given["x"].dtype
        rows = UNKNOWN_ROWS if jax.export.is_symbolic_dim(rows) else max(rows, 1)
        width = max(self.logits_bytes // (rows * (4 if dtype == "fp32" else 2)) // STEP, 1) * STEP
        options = {name: value for name, value in self.options if name != "z_loss"}
        for first in range(0, classes, width):
            some = slice(first, min(first + width, classes))
            logits = Described((given["x"].shape[0], some.stop - first), dtype)
            described = (("logits", logits), *self._beside())
            yield some, CrossEntropy(described, **options, shard=True, first_class=first, classes=classes)

    def logits(self, t: Arrays, some: slice) -> Any:
        made = product(t["x"], t["weight"][some].T, t["x"].dtype if "bias" not in t else jnp.float32)
        return made if "bias" not in t else (made + t["bias"][some].astype(jnp.float32)).astype(t["x"].dtype)

    def loss(self, t: Arrays, lse: Any, share: Any) -> Any:
        """Of lse and share of all classes: of rows, or reduced."""
        labels, smoothing, classes = t["labels"], self["smoothing"], t["weight"].shape[0]
        counts = labels != self["ignore_index"]
        of_lse, of_square, total = 1.0, self["z_loss"], counts.sum()
        if "class_weight" in t:
            known, own = counts & (labels >= 0) & (labels < classes), t["class_weight"].astype(jnp.float32)
            of_label = jnp.where(known, own[jnp.where(known, labels, 0)], 0.0)
            of_lse = (1.0 - smoothing) * of_label + smoothing / classes * own.sum()
            if self.reduction == "mean":  # what z_loss adds knows no classes
                of_square, total = of_square * of_label.sum() / total, of_label.sum()
        lse = jnp.where(counts, lse, 0.0)  # whatever ignored rows hold
        made = jnp.where(counts, of_lse * lse + share + of_square * lse * lse, 0.0)
        if self.reduction == "none":
            return made
        return made.sum() / total if self.reduction == "mean" else made.sum()

    def forward(self, *given: Any) -> tuple[Any, ...]:
        """(loss, lse)."""
        t, lse, share = dict(zip(self.names, given, strict=True)), None, None
        for some, problem in self.chunks():
            step = Forward(problem)
            known = {"logits": self.logits(t, some), "labels": t["labels"], "weight": t.get("class_weight")}
            made = run(step, self.implementation, *(known[b.name] for b in step.inputs()))
            new = dict(zip((b.name for b in step.outputs()), made, strict=True))
            lse = new["lse"] if lse is None else jnp.logaddexp(lse, new["lse"])
            share = new["share"] if share is None else share + new["share"]
            t["x"], lse, share = jax.lax.optimization_barrier((t["x"], lse, share))  # one chunk's logits at a time
        return self.loss(t, lse, share), lse

    def backward(self, wanted: tuple[str, ...], lse: Any, dloss: Any, *given: Any) -> tuple[Any, ...]:
        """The gradients of those that are wanted."""
        t = dict(zip(self.names, given, strict=True))
        share = jnp.zeros_like(lse)  # its slope does not depend on it
        dlse, dshare = jax.vjp(partial(self.loss, t), lse, share)[1](dloss)
        made = {name: jnp.zeros(t[name].shape, jnp.float32 if name == "x" else t[name].dtype) for name in wanted}
        made = dict(zip(made, varying_like(list(made.values()), given), strict=True))
        for some, problem in self.chunks():
            step = Backward(problem, frozenset({"logits"}), frozenset({"share", "lse"}))
            known = {"logits": self.logits(t, some), "labels": t["labels"], "weight": t.get("class_weight")}
            known |= {"share": share, "lse": lse, "dshare": dshare, "dlse": dlse}
            (dlogits,) = run(step, self.implementation, *(known[b.name] for b in step.inputs()))
            if "x" in made:
                made["x"] = made["x"] + product(dlogits, t["weight"][some], jnp.float32)
            if "weight" in made:
                made["weight"] = made["weight"].at[some].set(product(dlogits.T, t["x"], t["x"].dtype))
            if "bias" in made:
                made["bias"] = made["bias"].at[some].set(dlogits.sum(0, dtype=jnp.float32).astype(dlogits.dtype))
            t["x"], made = jax.lax.optimization_barrier((t["x"], made))
        return tuple(made[name].astype(t[name].dtype) for name in wanted)


def product(a: Any, b: Any, dtype: Any) -> Any:
    """a b, summed in float32."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32).astype(dtype)


def _forward(head: Head, *given: Any) -> tuple[Any, ...]:
    named = dict(zip(head.names, given, strict=True))
    rows = named["labels"].shape
    shapes = {"loss": rows if head.reduction == "none" else (), "lse": rows}
    return walked("linear_cross_entropy", head.forward, named, shapes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(head: Head, *given: Any) -> Any:
    return _forward(head, *given)[0]


@promotes
def _save(head: Head, *primals: Any) -> Any:
    refuse_gradients(head.names, primals, ("x", "weight", "bias"))
    loss, lse = under_names(("flashtile_linear_cross_entropy",), _forward(head, *(primal.value for primal in primals)))
    return loss, Saved.of(primals, (lse,))


@promotes
def _pull(head: Head, saved: Saved, dloss: Any) -> tuple[Any, ...]:
    names = head.names
    wanted = tuple(n for n, flag in zip(names, saved.perturbed, strict=True) if flag and n in ("x", "weight", "bias"))
    if not wanted or isinstance(dloss, SymbolicZero):
        return (None,) * len(names)
    given = {"lse": saved.made[0], "dloss": dloss, **dict(zip(names, saved.given, strict=True))}
    shapes = {f"d{name}": given[name].shape for name in wanted}
    found = walked("linear_cross_entropy", partial(head.backward, wanted), given, shapes)
    return tuple(dict(zip(wanted, found, strict=True)).get(name) for name in names)


_loss.defvjp(_save, _pull, symbolic_zeros=True)
_compiled = jax.jit(_loss, static_argnums=0)
