"""linear_cross_entropy: the loss of a language model's head, without its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.kernels.companions.cross_entropy import check_reduction
from flashtile.kernels.companions.dense import transposes
from flashtile.ops.loss import CALLED
from flashtile.spec.companion import FLOATS
from flashtile.torch.companion import autocast, check_tensors, prepare, rows
from flashtile.torch.companion_call import NAMES, Call
from flashtile.torch.derivative import NOTHING, first_derivatives, is_dual_level, is_mapped, refuse_tangents
from flashtile.torch.namespace import define
from flashtile.torch.plain import is_watched

CHUNK_BYTES = 64 * 2**20  # of logits that one product makes: with gradients no more than what the conversion of dx takes
STEP = 256  # classes to which parts are rounded: tiles of a product


@dataclass(frozen=True)
class Part:
    """Classes `first` to `first + width`, of which the gradients are made at once.

    Their logits lie from element `place` on of the gradient of weight, which `lends` its memory, or of memory of their own.
    Those of a stored part are computed once.
    """

    first: int
    width: int
    place: int
    stored: bool
    lends: bool

    def logits(self, rows: int, lent: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Where those of all rows lie."""
        memory = lent if self.lends else own
        return memory[self.place : self.place + self.width * rows].view(rows, self.width)


def lay_out(rows: int, hidden: int, classes: int, own: int, chunk: int, lends: bool) -> list[Part]:
    """The parts, in order. own: classes whose logits have memory of their own; chunk: at most so many, made by one product.

    With `lends` logits lie in the memory of weight's gradient too, which fills from its beginning. Those of the first parts
    fill its end; of such a part the gradient, (first + width) * hidden elements with those before, ends where its logits begin.
    Next come those that are stored in memory of their own, all that are left or what a chunk leaves. Behind them parts are as
    wide as leaves room for their logits behind their gradient, or in memory of their own.
    """
    if own >= classes:
        return [Part(0, classes, 0, True, False)]
    parts: list[Part] = []
    stored = (classes - chunk) * hidden // max(rows, hidden) // chunk * chunk if lends else 0
    begin, first = classes * hidden - stored * rows, 0
    while first < stored:
        room = (begin + first * (rows - hidden)) // hidden
        width = min(stored - first, room // chunk * chunk)
        parts.append(Part(first, width, begin + first * rows, True, True))
        first += width
    if own >= classes - first:
        return [*parts, Part(first, classes - first, 0, True, False)]
    if own - chunk >= STEP:
        parts.append(Part(first, (own - chunk) // STEP * STEP, chunk * rows, True, False))
        first += parts[-1].width
    while first < classes:
        room = (classes - first) * hidden // (rows + hidden) // STEP * STEP if lends else 0
        width = min(max(room, own), classes - first)
        lent = width <= room
        parts.append(Part(first, width, classes * hidden - width * rows if lent else 0, False, lent))
        first += width
    return parts


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    logits_bytes: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits x weight^T with labels, a float32 scalar, in bounded memory for the logits.

    x: (..., hidden), weight: (classes, hidden), one dtype of fp16, bf16 and fp32; labels: (...). reduction: "mean" or
    "sum"; the other options as in `cross_entropy`.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Some classes at a time: a first pass makes lse, a second one the gradients, of which that of weight is summed over all
    rows at once, in float32, and rounded once. Logits that stay in memory between the passes are not computed again: in that
    of weight's gradient nearly half of them where there are twice as many rows as hidden, nearly all where there are no more;
    and in `logits_bytes` (at least 256 classes of all rows), which come on top of the gradients and of dx in float32. 8192
    rows of 4096 hidden and 128,256 classes in 16 bits: 3.5 products by the default of 64 MiB, 3 from 1056 MiB on.
    The gradients are made by the forward and serve one backward. Raises InvalidProblem for a request without meaning,
    NotSupported for tangents (`torch.autograd.forward_ad`).
    """
    check_tensors({"x": x, "weight": weight, "labels": labels})
    if NAMES.get(x.dtype) not in FLOATS:
        raise InvalidProblem(f"x is {x.dtype}; it must be {' or '.join(FLOATS)}.")
    x, weight = autocast(x, weight)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or weight.dtype != x.dtype or not weight.numel():
        raise InvalidProblem(
            f"weight is {weight.dtype} {tuple(weight.shape)}; it must be (classes, hidden) for x, {x.dtype} {tuple(x.shape)}."
        )
    if labels.shape != x.shape[:-1]:
        raise InvalidProblem(f"labels have shape {tuple(labels.shape)}; it must be that of x {tuple(x.shape)} but the last.")
    check_reduction(reduction, ("mean", "sum"))
    logits_bytes = CHUNK_BYTES if logits_bytes is None else logits_bytes
    if isinstance(logits_bytes, bool) or not isinstance(logits_bytes, int) or logits_bytes < 0:
        raise InvalidProblem(f"logits_bytes is {logits_bytes!r}; it must be an int, at least 0.")
    options = (float(label_smoothing), float(z_loss), float(logit_scale), ignore_index, logits_bytes)
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    given = (rows(x), weight, labels.reshape(-1).contiguous())
    if is_watched(x, weight, labels):
        return HEAD(*given, reduction == "mean", *options, *wanted, backend or "")[0]
    if is_dual_level():
        refuse_tangents("linear_cross_entropy", backend or "torch", (("x", x), ("weight", weight)))
    if any(wanted):
        return _Differentiable.apply(*given, reduction == "mean", options, backend)[0]  # pyright: ignore[reportIndexIssue]
    return _Head(*given, options, backend).run(reduction == "mean", False, False)[0]


class _Head:
    """One call: its products and, by the ops of a shard of classes, what is made of their logits."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Any, backend: str | None):
        self.x, self.weight, self.labels, self.backend = x.detach(), weight.detach(), labels, backend
        smoothing, self.z_loss, logit_scale, self.ignore_index, self.logits_bytes = options
        self.options = dict(smoothing=smoothing, logit_scale=logit_scale, ignore_index=self.ignore_index, shard=True)
        self.width = self.wide(min(CHUNK_BYTES, self.logits_bytes))

    def wide(self, size_bytes: int) -> int:
        """Classes, whose logits of all rows take so many bytes; at least a step, at most all."""
        width = size_bytes // (max(len(self.x), 1) * self.x.element_size())
        return min(max(width // STEP * STEP, STEP), len(self.weight))

    def shard(self, logits: torch.Tensor, first: int, differentiated: bool) -> Call:
        """The op on the logits of the classes from `first` on."""
        options = {**self.options, "first_class": first, "classes": len(self.weight), "inplace": differentiated}
        with torch.set_grad_enabled(differentiated):
            given = {"logits": logits.detach().requires_grad_(differentiated), "labels": self.labels}
            return prepare("cross_entropy", given, options, self.backend, CALLED)

    def run(self, mean: bool, wants_x: bool, wants_weight: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, dx, dweight), the latter empty where they are not wanted."""
        x, count, empty = self.x, len(self.x), self.x.new_empty(0)
        dweight = x.new_empty(self.weight.shape) if wants_weight else empty
        wide = self.wide(self.logits_bytes) if wants_x or wants_weight else self.width
        parts = lay_out(count, x.shape[1], len(self.weight), wide, self.width, wants_weight)
        size = max([self.width * count, *(part.place + part.width * count for part in parts if not part.lends)])
        lent, own = dweight.view(-1), x.new_empty(size)

        lse, share = self.fold(parts, lent, own)
        counts = self.labels != self.ignore_index
        total = counts.sum() if mean else 1.0
        loss = torch.where(counts, lse + share + self.z_loss * lse * lse, 0.0).sum() / total
        if not (wants_x or wants_weight):
            return loss, empty, empty
        weights = counts.float() / total
        given = {"labels": self.labels, "lse": lse, "dshare": weights}
        given["dlse"] = torch.where(counts, weights * (1.0 + 2.0 * self.z_loss * lse), 0.0)
        dx = x.new_zeros(x.shape, dtype=torch.float32) if wants_x else empty
        for part in parts:
            self.differentiate(part, part.logits(count, lent, own), given, dx, dweight)
        del own  # dx in 16 bits takes its place
        return loss, dx.to(x.dtype), dweight

    def fold(self, parts: list[Part], lent: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(lse, share) of all classes, as many of them at a time as have memory of their own."""
        x, count = self.x, len(self.x)
        lse, share = x.new_full((count,), -torch.inf, dtype=torch.float32), x.new_zeros(count, dtype=torch.float32)
        for part in parts:
            for first in range(part.first, part.first + part.width, self.width):
                width = min(self.width, part.first + part.width - first)
                if part.stored:
                    logits = part.logits(count, lent, own)[:, first - part.first :][:, :width]
                else:
                    logits = own[: width * count].view(count, width)
                torch.mm(x, self.weight[first : first + width].t(), out=logits)
                made = self.shard(logits, first, False).forward({"logits": logits, "labels": self.labels})
                lse, share = torch.logaddexp(lse, made["lse"]), share + made["share"]
        return lse, share

    def differentiate(
        self, part: Part, logits: torch.Tensor, given: dict[str, torch.Tensor], dx: torch.Tensor, dweight: torch.Tensor
    ) -> None:
        """Add the part's to dx and write its rows of dweight, where these are not empty; logits become their gradient."""
        end = part.first + part.width
        weight = self.weight[part.first : end]
        if not part.stored:
            torch.mm(self.x, weight.t(), out=logits)
        dlogits = self.shard(logits, part.first, True).backward({"logits": logits, **given})["dlogits"]
        if dweight.dim() > 1:
            self.differentiate_weight(dlogits, dweight[part.first : end])
        if dx.dim() > 1:
            add_product(dx, dlogits, weight)

    def differentiate_weight(self, dlogits: torch.Tensor, dweight: torch.Tensor) -> None:
        """Write the gradient of the classes' weights."""
        if transposes(self.weight):
            for made, given in zip(dweight.split(self.width), dlogits.split(self.width, 1), strict=True):
                made.copy_((self.x.t() @ given).t())
        else:
            torch.mm(dlogits.t(), self.x, out=dweight)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, in float32."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def scaled(gradient: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """gradient *= dloss, in place; where that is 1, as at the end of a model, it costs nothing."""
    logits, labels = gradient.detach().requires_grad_(), gradient.new_empty(len(gradient), dtype=torch.int32)
    options = dict(reduction="sum", eager_gradient=True, inplace=True)
    with torch.enable_grad():
        call = prepare("cross_entropy", {"logits": logits, "labels": labels}, options, None)
    return call.backward({"gradient": gradient, "dloss": dloss})["dlogits"]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, options: Any, backend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(x, weight, labels, options, backend)
        loss, *ctx.gradients = head.run(mean, *ctx.needs_input_grad[:2])
        ctx.call = head.shard(x.new_empty(len(labels), head.width), 0, True)
        hidden = NOTHING.detach()  # for `first_derivatives`: it leads to x and weight
        ctx.save_for_backward(hidden)
        return loss, hidden

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if is_dual_level():
            refuse_tangents("linear_cross_entropy", "torch", [("its gradient", grads[0])])
        if is_mapped(grads):
            reason = "the gradients were made by the forward and are handed out once"
            raise NotSupported("a batch of gradients of linear_cross_entropy", {"torch": [reason]})
        if ctx.gradients is None:
            reason = "the gradients were made by the forward and have been handed out"
            raise NotSupported("a second backward of linear_cross_entropy", {"torch": [reason]})
        made, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            given = tuple(scaled(g, grads[0]) if n else None for g, n in zip(made, ctx.needs_input_grad, strict=False))
        made = first_derivatives(ctx.call.problem, ctx.call.plan.backend, given, ctx.saved_tensors, grads)
        return *made, None, None, None, None


# -- torch.compile ---------------------------------------------------------------------------------------------------------


def run_head(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, smoothing: float, z_loss: float,
    logit_scale: float, ignore_index: int, logits_bytes: int, wants_x: bool, wants_weight: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`_Head.run`, as an operator."""
    return _Head(x, weight, labels, (smoothing, z_loss, logit_scale, ignore_index, logits_bytes), backend or None).run(
        mean, wants_x, wants_weight
    )


def fake_head(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, smoothing: float, z_loss: float,
    logit_scale: float, ignore_index: int, logits_bytes: int, wants_x: bool, wants_weight: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    loss = x.new_empty((), dtype=torch.float32)
    dx = x.new_empty(x.shape if wants_x else 0)
    return loss, dx, x.new_empty(weight.shape if wants_weight else 0)


class _Recorded(torch.autograd.Function):
    """The operator, whose outputs hold its gradients."""

    @staticmethod
    def forward(ctx: Any, wanted: tuple[bool, bool], *given: Any) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            loss, dx, dweight = HEAD(*given)
        hidden = loss.new_empty(0)
        ctx.save_for_backward(dx, dweight, hidden)
        ctx.wanted, ctx.rest = wanted, (None,) * (len(given) - 2)
        ctx.mark_non_differentiable(dx, dweight)
        return loss, dx, dweight, hidden

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        made = tuple(g * grads[0] if wanted else None for g, wanted in zip(saved, ctx.wanted, strict=False))
        return None, *first_derivatives("linear_cross_entropy", "autograd", made, saved, grads), *ctx.rest


def record(*given: Any) -> Any:
    """The operator's outputs, the loss differentiable."""
    return _Recorded.apply(given[9:11], *given)[:3]  # pyright: ignore[reportIndexIssue]


HEAD = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, bool mean, float smoothing, float z_loss, float logit_scale, "
    "SymInt ignore_index, SymInt logits_bytes, bool wants_x, bool wants_weight, str backend) -> (Tensor, Tensor, Tensor)",
    run_head, fake_head, record,
)  # fmt: skip


@register_flop_formula(HEAD.overloadpacket, get_raw=True)
def head_flops(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> int:
    """FLOPs of the logits and of the wanted gradients, without what is computed again."""
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * (1 + sum(rest[7:9]))
