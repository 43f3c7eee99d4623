"""linear_cross_entropy: the loss of a language model's head, without its logits."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.torch.companion import Call, check_tensor, prepare, rows
from flashtile.torch.derivative import first_derivatives

CHUNK_BYTES = 32 * 2**20  # of logits at a time, beside as much of their gradient: four waves of tiles for an H100


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
    backend: str | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits x weight^T with labels, a float32 scalar; the logits are never stored as a whole.

    x: (..., hidden), weight: (classes, hidden), one dtype of fp16, bf16 and fp32; labels: (...). reduction: "mean" or
    "sum"; the other options as in `cross_entropy`.

    Some classes at a time: a first pass makes lse, a second one the gradients, of which that of weight is summed over all
    rows at once, in float32, and rounded once. What the first pass can leave in the gradient's memory, half of the logits
    where there are twice as many rows as hidden, the second does not compute again. The gradients are made by the forward
    and serve one backward. Raises InvalidProblem for a request without meaning.
    """
    for name, tensor in (("x", x), ("weight", weight), ("labels", labels)):
        check_tensor(name, tensor, x if isinstance(x, torch.Tensor) else None)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or weight.dtype != x.dtype or not weight.numel():
        raise InvalidProblem(
            f"weight is {weight.dtype} {tuple(weight.shape)}; it must be (classes, hidden) for x, {x.dtype} {tuple(x.shape)}."
        )
    if labels.shape != x.shape[:-1]:
        raise InvalidProblem(f"labels have shape {tuple(labels.shape)}; it must be that of x {tuple(x.shape)} but the last.")
    if reduction not in ("mean", "sum"):
        raise InvalidProblem(f"reduction is {reduction!r}; it must be 'mean' or 'sum'.")
    options = (float(label_smoothing), float(z_loss), float(logit_scale), ignore_index)
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    given = (rows(x), weight, labels.reshape(-1).contiguous())
    if torch.compiler.is_compiling():
        return compiled(*given, reduction == "mean", *options, *wanted, backend or "")[0]
    if any(wanted):
        return _Differentiable.apply(*given, reduction == "mean", options, backend)  # pyright: ignore[reportReturnType]
    return _Head(*given, options, backend).run(reduction == "mean", False, False)[0]


class _Head:
    """One call: its products and, by the ops of a shard of classes, what is made of their logits."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Any, backend: str | None):
        self.x, self.weight, self.labels, self.backend = x.detach(), weight.detach(), labels, backend
        smoothing, self.z_loss, logit_scale, self.ignore_index = options
        self.options = dict(smoothing=smoothing, logit_scale=logit_scale, ignore_index=self.ignore_index, shard=True)
        width = CHUNK_BYTES // (max(len(x), 1) * x.element_size())
        self.width = min(max(width // 256 * 256, 256), len(weight))
        self.chunks = range(0, len(weight), self.width)

    def shard(self, logits: torch.Tensor, first: int, differentiated: bool) -> Call:
        """The op on the logits of the classes from `first` on."""
        options = {**self.options, "first_class": first, "classes": len(self.weight)}
        with torch.set_grad_enabled(differentiated):
            given = {"logits": logits.detach().requires_grad_(differentiated), "labels": self.labels}
            return prepare("cross_entropy", given, options, self.backend)

    def run(self, mean: bool, wants_x: bool, wants_weight: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, dx, dweight), the latter empty where they are not wanted."""
        x, count, empty = self.x, len(self.x), self.x.new_empty(0)
        dweight = x.new_empty(self.weight.shape) if wants_weight else empty
        memory, used = dweight.view(-1), 0
        chunk = x.new_empty(self.width * count)
        lse, share = x.new_full((count,), -torch.inf, dtype=torch.float32), x.new_zeros(count, dtype=torch.float32)
        stored: dict[int, torch.Tensor] = {}
        for first in self.chunks:
            part = self.weight[first : first + self.width]
            size = len(part) * count
            # The gradient of the same classes takes no more than these logits, so that it never overtakes the next ones.
            fits = count >= x.shape[1] and used + size <= memory.numel()
            into = memory[used : used + size] if fits else chunk[:size]
            logits = torch.mm(x, part.t(), out=into.view(count, len(part)))
            if fits:
                stored[first], used = logits, used + size
            made = self.shard(logits, first, False).forward({"logits": logits, "labels": self.labels})
            lse, share = torch.logaddexp(lse, made["lse"]), share + made["share"]
        counts = self.labels != self.ignore_index
        total = counts.sum() if mean else 1.0
        loss = torch.where(counts, lse + share + self.z_loss * lse * lse, 0.0).sum() / total
        if not (wants_x or wants_weight):
            return loss, empty, empty
        weights = counts.float() / total
        given = {"labels": self.labels, "lse": lse, "dshare": weights}
        given["dlse"] = torch.where(counts, weights * (1.0 + 2.0 * self.z_loss * lse), 0.0)
        dx = x.new_zeros(x.shape, dtype=torch.float32) if wants_x else empty
        for first in self.chunks:
            part = self.weight[first : first + self.width]
            logits = stored.get(first)
            if logits is None:
                logits = torch.mm(x, part.t(), out=chunk[: len(part) * count].view(count, len(part)))
            dlogits = self.shard(logits, first, True).backward({"logits": logits, **given})["dlogits"]
            if wants_weight:
                torch.mm(dlogits.t(), x, out=dweight[first : first + self.width])
            if wants_x:
                add_product(dx, dlogits, part)
        del chunk
        return loss, dx.to(x.dtype), dweight


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, in float32."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, options: Any, backend: Any
    ) -> torch.Tensor:
        head = _Head(x, weight, labels, options, backend)
        loss, *ctx.gradients = head.run(mean, *ctx.needs_input_grad[:2])
        ctx.call = head.shard(x.new_empty(len(labels), head.width), 0, True)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.gradients is None:
            reason = "the gradients were made by the forward and have been handed out"
            raise NotSupported("a second backward of linear_cross_entropy", {"torch": [reason]})
        made, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            given = tuple(g.mul_(grads[0]) if n else None for g, n in zip(made, ctx.needs_input_grad, strict=False))
        return *first_derivatives(ctx.call, given), None, None, None, None


@torch.library.custom_op("flashtile::linear_cross_entropy", mutates_args=())
def compiled(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, smoothing: float, z_loss: float,
    logit_scale: float, ignore_index: int, wants_x: bool, wants_weight: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`_Head.run`, as an operator."""
    return _Head(x, weight, labels, (smoothing, z_loss, logit_scale, ignore_index), backend or None).run(
        mean, wants_x, wants_weight
    )


@compiled.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool, smoothing: float, z_loss: float,
    logit_scale: float, ignore_index: int, wants_x: bool, wants_weight: bool, backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    loss = x.new_empty((), dtype=torch.float32)
    dx = x.new_empty(x.shape if wants_x else 0)
    return loss, dx, x.new_empty(weight.shape if wants_weight else 0)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[8:10]


def _differentiate(ctx: Any, *grads: torch.Tensor) -> Any:
    dx, dweight = (g * grads[0].to(g.dtype) if n else None for g, n in zip(ctx.saved_tensors, ctx.wanted, strict=True))
    return dx, dweight, *(None,) * 9


compiled.register_autograd(_differentiate, setup_context=_setup)
