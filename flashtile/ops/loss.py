"""cross_entropy: the public function."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.kernels.ops.catalogue import check_backend
from flashtile.problem.op import Described
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.ops.call import check_options, described
from flashtile.torch.ops.run import check_tensor, rows, run

CALLED = {"smoothing": "label_smoothing"}  # what the functions call the op's options


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    eager_gradient: bool | None = None,
    inplace: bool = False,
    process_group: Any = None,
    backend: str | None = None,
) -> Any:
    """Cross-entropy of logits (..., classes), fp16, bf16 or fp32, with labels (...), int32 or int64; float32.

    loss = (1 - label_smoothing) (lse - x_label) + label_smoothing * mean(lse - x) + z_loss * lse^2,  x = logit_scale * logits

    weight: of each class, (classes,), fp16, bf16 or fp32, without a gradient: each class's lse - x above counts so much, as
        torch's; what z_loss adds knows no classes.
    reduction: "mean" over the rows whose label is not ignore_index, with weights divided by those of their labels (but what
        z_loss adds by their number), "sum", or "none", which gives (...). Ignored rows have loss and gradient 0, whatever
        their logits; a label that is no class gives NaN.
    softcap: x = softcap * tanh(logit_scale * logits / softcap), as Gemma's head has it.
    return_lse: also return each row's log of the sum of exponentials (...), without a gradient.
    eager_gradient: make the gradient together with the loss, which reads the logits from memory once instead of twice and
        serves one backward; by default for a reduced loss, but not in fp16, whose gradients want the loss's scale first.
    inplace: the gradient is written over the logits, with eager_gradient by the forward already. Not under torch.compile,
        whose own planning of memory does that; there eager_gradient is False too.
    process_group: the ranks hold consecutive shards of classes, equally wide; labels are of all classes and the same on
        all ranks, and so is the loss.
    backend: "triton", "cpu", or None for the first that runs on the tensors' device; NotSupported says why one does not.

    Returns loss or (loss, lse). Raises InvalidProblem for a request without meaning.
    """
    check_tensor("logits", logits)
    check_tensor("labels", labels)
    if weight is not None:
        check_tensor("weight", weight)
        weight = weight.contiguous()
    if logits.dim() == 0 or labels.shape != logits.shape[:-1]:
        raise InvalidProblem(
            f"labels have shape {tuple(labels.shape)}; it must be that of logits {tuple(logits.shape)} but the last."
        )
    _check_switches(return_lse, eager_gradient, inplace, process_group)
    flat = labels if labels.dim() == 1 and labels.is_contiguous() else labels.reshape(-1).contiguous()
    options: dict[str, Any] = dict(smoothing=label_smoothing, logit_scale=logit_scale, ignore_index=ignore_index)
    if softcap is not None:
        options["softcap"] = softcap
    given = {"logits": rows(logits), "labels": flat, "weight": weight}
    if process_group is not None:
        loss, lse = _sharded(given, options, reduction, z_loss, process_group, backend)
    else:
        traced = is_traced(logits, labels)
        if eager_gradient is None:
            eager_gradient = reduction != "none" and logits.dtype != torch.float16
        eager_gradient = eager_gradient and not traced and torch.is_grad_enabled() and logits.requires_grad
        options |= dict(reduction=reduction, z_loss=z_loss, eager_gradient=eager_gradient, inplace=inplace and not traced)
        loss, lse = run("cross_entropy", given, options, backend, CALLED)[:2]
    if reduction == "none" and labels.dim() != 1:
        loss = loss.view(labels.shape)
    return (loss, lse.view(labels.shape)) if return_lse else loss


def check_loss(
    *, weight: Any = None, return_lse: Any = False, eager_gradient: Any = None, inplace: Any = False,
    process_group: Any = None, backend: Any = None, **of_problem: Any,
) -> None:  # fmt: skip
    """Raise InvalidProblem for options of `cross_entropy` without meaning, whatever the tensors are."""
    _check_switches(return_lse, eager_gradient, inplace, process_group)
    check_backend(backend)
    ours = {name: option for option, name in CALLED.items()}
    options = {ours.get(name, name): value for name, value in {"reduction": "mean", **of_problem}.items()}
    options["eager_gradient"] = bool(eager_gradient)
    given = {"logits": Described((1, 1), "fp32"), "labels": Described((1,), "int32")}
    if weight is not None:
        check_tensor("weight", weight)
        given |= {"logits": Described((1, max(weight.numel(), 1)), "fp32"), "weight": described(weight)}
    check_options("cross_entropy", given, options, CALLED)


def _check_switches(return_lse: Any, eager_gradient: Any, inplace: Any, process_group: Any) -> None:
    for name, value in (("return_lse", return_lse), ("inplace", inplace)):
        if not isinstance(value, bool):
            raise InvalidProblem(f"{name} is {value!r}; it must be True or False.")
    if not (eager_gradient is None or isinstance(eager_gradient, bool)):
        raise InvalidProblem(f"eager_gradient is {eager_gradient!r}; it must be True, False or None.")
    if process_group is not None and (eager_gradient or inplace):
        raise InvalidProblem("eager_gradient or inplace is given with a process_group; they must be left out.")


class Terms:
    """How the lse and share of all classes make the loss, and what the loss's gradient is to them.

    lse counts `of_lse` times, its square `of_square` times; a reduced loss is divided by `total`.
    """

    def __init__(
        self, labels: torch.Tensor, weight: torch.Tensor | None, classes: int, reduction: str, *, smoothing: float,
        z_loss: float, ignore_index: int,
    ):  # fmt: skip
        self.counts, self.reduction = labels != ignore_index, reduction
        self.of_lse: Any = 1.0
        self.of_square: Any = z_loss
        self.total: Any = self.counts.sum() if reduction == "mean" else 1.0
        if weight is not None:
            known, weight = self.counts & (labels >= 0) & (labels < classes), weight.float()
            own = torch.where(known, weight[torch.where(known, labels, 0)], 0.0)
            self.of_lse = (1.0 - smoothing) * own + smoothing / classes * weight.sum()
            if reduction == "mean":
                self.of_square, self.total = z_loss * own.sum() / self.total, own.sum()

    def loss(self, lse: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Of rows, or reduced."""
        made = torch.where(self.counts, self.of_lse * lse + share + self.of_square * lse * lse, 0.0)
        return made if self.reduction == "none" else made.sum() / self.total

    def slopes(self, lse: torch.Tensor, dloss: torch.Tensor | float = 1.0) -> dict[str, torch.Tensor]:
        """The gradients of share and lse."""
        dshare = self.counts.float() / self.total * dloss
        dlse = torch.where(self.counts, dshare * (self.of_lse + 2.0 * self.of_square * lse), 0.0)
        return {"dshare": dshare, "dlse": dlse}


def _sharded(
    given: dict[str, Any], options: dict[str, Any], reduction: Any, z_loss: Any, group: Any, backend: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of all shards; on every rank the same, differentiable in its own logits."""
    import torch.distributed as dist

    check_loss(reduction=reduction, z_loss=z_loss)
    width = given["logits"].shape[1]
    shard = dict(shard=True, first_class=dist.get_rank(group) * width, classes=dist.get_world_size(group) * width)
    share, lse = run("cross_entropy", given, {**options, **shard}, backend, CALLED)[:2]
    share, lse = _Sum.apply(share, group), _LogSumExp.apply(lse, group)
    terms = Terms(
        given["labels"], given["weight"], shard["classes"], reduction,
        smoothing=options["smoothing"], z_loss=z_loss, ignore_index=options["ignore_index"],
    )  # fmt: skip
    return terms.loss(lse, share), lse.detach()


class _Sum(torch.autograd.Function):
    """The sum over ranks, which all ranks go on with alike: each rank's gradient is its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        import torch.distributed as dist

        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _LogSumExp(torch.autograd.Function):
    """log(sum over ranks of exp(x)); a rank whose x is -inf adds nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        import torch.distributed as dist

        top = x.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        pivot = top.where(top != -torch.inf, 0.0)
        total = (x - pivot).exp()
        dist.all_reduce(total, group=group)
        out = pivot + total.log()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, out = ctx.saved_tensors
        return torch.where(x == -torch.inf, 0.0, grads[0] * (x - out).exp()), None
