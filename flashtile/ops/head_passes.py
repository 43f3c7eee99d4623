"""The passes of linear_cross_entropy over the classes, some of them at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashtile.errors import InvalidProblem
from flashtile.kernels.ops.dense import transposes
from flashtile.ops.loss import CALLED, Terms
from flashtile.torch.ops.call import Call
from flashtile.torch.ops.run import prepare

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


class Asked(NamedTuple):
    """What a call asks for besides tensors, in the order in which the operators have it."""

    reduction: str
    smoothing: float
    z_loss: float
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_bytes: int | None
    backend: str


class Given(NamedTuple):
    """The tensors of a call: x (rows, hidden), labels (rows,), weight (classes, hidden), bias and class_weight (classes,)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    class_weight: torch.Tensor | None

    def wanted(self) -> list[bool]:
        """Whether x, weight and bias want a gradient. Raises InvalidProblem where one is wanted that there is none of."""
        if self.class_weight is not None and self.class_weight.requires_grad and torch.is_grad_enabled():
            raise InvalidProblem("class_weight requires a gradient, which it does not have; detach it.")
        return [torch.is_grad_enabled() and t is not None and t.requires_grad for t in self[:3]]


class Head:
    """One call: its products and, by the ops of a shard of classes, what is made of their logits."""

    def __init__(self, given: Given, asked: Asked):
        self.x, self.weight = given.x.detach(), given.weight.detach()
        self.bias = None if given.bias is None else given.bias.detach()
        self.labels, self.class_weight, self.asked = given.labels, given.class_weight, asked
        self.options: dict[str, Any] = dict(smoothing=asked.smoothing, logit_scale=asked.logit_scale, shard=True)
        self.options |= dict(softcap=asked.softcap, ignore_index=asked.ignore_index, classes=len(self.weight))
        self.logits_bytes = CHUNK_BYTES if asked.logits_bytes is None else asked.logits_bytes
        self.width = self.wide(min(CHUNK_BYTES, self.logits_bytes))

    def wide(self, size_bytes: int) -> int:
        """Classes, whose logits of all rows take so many bytes; at least a step, at most all."""
        width = size_bytes // (max(len(self.x), 1) * self.x.element_size())
        return min(max(width // STEP * STEP, STEP), len(self.weight))

    def shard(self, logits: torch.Tensor, first: int, differentiated: bool) -> Call:
        """The op on the logits of the classes from `first` on."""
        options = {**self.options, "first_class": first, "inplace": differentiated}
        with torch.set_grad_enabled(differentiated):
            given = {"logits": logits.detach().requires_grad_(differentiated), **self.beside()}
            return prepare("cross_entropy", given, options, self.asked.backend or None, {**CALLED, "weight": "class_weight"})

    def beside(self) -> dict[str, torch.Tensor]:
        """What the op reads besides logits."""
        return {"labels": self.labels, **({} if self.class_weight is None else {"weight": self.class_weight.detach()})}

    def terms(self) -> Terms:
        """How the loss is made of lse and share. To be asked once the op has seen that all fits together."""
        return Terms(
            self.labels, self.class_weight, len(self.weight), self.asked.reduction, smoothing=self.asked.smoothing,
            z_loss=self.asked.z_loss, ignore_index=self.asked.ignore_index,
        )  # fmt: skip

    def multiply(self, first: int, logits: torch.Tensor) -> None:
        """Write the logits of the classes from `first` on."""
        some = slice(first, first + logits.shape[1])
        if self.bias is None:
            torch.mm(self.x, self.weight[some].t(), out=logits)
        else:
            torch.addmm(self.bias[some], self.x, self.weight[some].t(), out=logits)

    def run(self, wanted: list[bool]) -> tuple[torch.Tensor, ...]:
        """(loss, lse, dx, dweight, dbias), of which the last three are empty where they are not wanted."""
        grads, count = self.gradients(wanted), len(self.x)
        wide = self.wide(self.logits_bytes) if any(wanted) else self.width
        parts = lay_out(count, self.x.shape[1], len(self.weight), wide, self.width, wanted[1])
        size = max([self.width * count, *(part.place + part.width * count for part in parts if not part.lends)])
        lent, own = grads[1].view(-1), self.x.new_empty(size)
        lse, share = self.fold(parts, lent, own)
        terms = self.terms()
        loss = terms.loss(lse, share)
        if any(wanted):
            given = {**self.beside(), "lse": lse, **terms.slopes(lse)}
            for part in parts:
                self.differentiate(part, part.logits(count, lent, own), given, grads)
        del own  # dx in 16 bits takes its place
        return loss, lse, grads[0].to(self.x.dtype), grads[1], grads[2]

    def pull(self, lse: torch.Tensor, dloss: torch.Tensor, wanted: list[bool]) -> tuple[torch.Tensor, ...]:
        """(dx, dweight, dbias) from the gradient of the loss, of logits that are made again; empty where not wanted."""
        grads, count = self.gradients(wanted), len(self.x)
        wide = self.wide(self.logits_bytes)
        own = self.x.new_empty(wide * count)
        given = {**self.beside(), "lse": lse, **self.terms().slopes(lse, dloss)}
        for first in range(0, len(self.weight), wide):
            part = Part(first, min(wide, len(self.weight) - first), 0, False, False)
            self.differentiate(part, part.logits(count, own, own), given, grads)
        del own  # dx in 16 bits takes its place
        return grads[0].to(self.x.dtype), grads[1], grads[2]

    def gradients(self, wanted: list[bool]) -> list[torch.Tensor]:
        """Memory for those of x, in float32, weight and bias."""
        dx = self.x.new_zeros(self.x.shape, dtype=torch.float32) if wanted[0] else self.x.new_empty(0)
        shapes = (self.weight.shape, self.weight.shape[:1])
        return [dx, *(self.x.new_empty(s if w else 0) for s, w in zip(shapes, wanted[1:], strict=True))]

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
                self.multiply(first, logits)
                made = self.shard(logits, first, False).forward({"logits": logits, **self.beside()})
                lse, share = torch.logaddexp(lse, made["lse"]), share + made["share"]
        return lse, share

    def differentiate(
        self, part: Part, logits: torch.Tensor, given: dict[str, torch.Tensor], grads: list[torch.Tensor]
    ) -> None:
        """Add the part's to dx and write its part of dweight and dbias, of those that are not empty.

        logits become their gradient.
        """
        dx, dweight, dbias = grads
        some = slice(part.first, part.first + part.width)
        if not part.stored:
            self.multiply(part.first, logits)
        dlogits = self.shard(logits, part.first, True).backward({"logits": logits, **given})["dlogits"]
        if len(dbias):
            dbias[some] = dlogits.sum(0, dtype=torch.float32)
        if dweight.dim() > 1:
            self.differentiate_weight(dlogits, dweight[some])
        if dx.dim() > 1:
            add_product(dx, dlogits, self.weight[some])

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
    """gradient *= dloss, that of a matrix in place; where that is 1, as at the end of a model, it costs nothing."""
    if gradient.dim() == 1:
        return gradient * dloss
    logits, labels = gradient.detach().requires_grad_(), gradient.new_empty(len(gradient), dtype=torch.int32)
    options = dict(reduction="sum", eager_gradient=True, inplace=True)
    with torch.enable_grad():
        call = prepare("cross_entropy", {"logits": logits, "labels": labels}, options, None)
    return call.backward({"gradient": gradient, "dloss": dloss})["dlogits"]
