"""flash-attention's cross-entropies: `flash_attn.ops.triton.cross_entropy`, `flash_attn.losses`, and `xentropy_cuda_lib`."""

from __future__ import annotations

from typing import Any

import torch

from flashtile import ops
from flashtile.kernels.ops.cross_entropy_problem import check_reduction
from flashtile.torch.ops.run import prepare


def cross_entropy_loss(
    logits: torch.Tensor, labels: torch.Tensor, precomputed_lse: torch.Tensor | None = None, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100, inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(losses, z_losses) of rows; the former include the latter. precomputed_lse saves nothing: lse is made with the loss."""
    loss, lse = ops.cross_entropy(
        logits, labels, reduction="none", label_smoothing=label_smoothing, z_loss=lse_square_scale, logit_scale=logit_scale,
        ignore_index=ignore_index, return_lse=True, inplace=inplace_backward, process_group=process_group,
    )  # fmt: skip
    return loss, torch.where(labels != ignore_index, lse_square_scale * lse * lse, 0.0)


class CrossEntropyLoss(torch.nn.Module):
    """`flash_attn.losses.cross_entropy.CrossEntropyLoss`."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, process_group: Any = None, return_z_loss: bool = False,
    ):  # fmt: skip
        super().__init__()
        check_reduction(reduction)
        self.reduction, self.return_z_loss, self.ignore_index = reduction, return_z_loss, ignore_index
        self.options = dict(
            label_smoothing=label_smoothing, logit_scale=logit_scale, lse_square_scale=lse_square_scale,
            ignore_index=ignore_index, inplace_backward=inplace_backward, process_group=process_group,
        )  # fmt: skip

    def forward(self, input: torch.Tensor, target: torch.Tensor, precomputed_lse: torch.Tensor | None = None) -> Any:
        made = cross_entropy_loss(input, target, precomputed_lse, **self.options)  # pyright: ignore[reportArgumentType]
        count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
        if self.reduction != "none":
            made = (made[0].sum() / count, made[1].sum() / count)
        return made if self.return_z_loss else made[0]


class SoftmaxCrossEntropyLossFn:
    """`flash_attn.losses.cross_entropy.SoftmaxCrossEntropyLossFn` of version 1: the losses of rows."""

    @staticmethod
    def apply(
        logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, ignored_index: int = -100,
        inplace_backward: bool = False, process_group: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        options = dict(label_smoothing=smoothing, ignore_index=ignored_index, inplace=inplace_backward)
        return ops.cross_entropy(logits, labels, reduction="none", process_group=process_group, **options)  # pyright: ignore


def _shard(logits: torch.Tensor, smoothing: float, total_classes: int, **more: Any) -> dict[str, Any]:
    return dict(smoothing=smoothing, shard=True, classes=max(total_classes, logits.shape[1]), **more)


def forward(
    input: torch.Tensor, labels: torch.Tensor, smoothing: float, total_classes: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`xentropy_cuda_lib.forward`: (losses, lse) of rows, float32; 0 where the label is -100."""
    with torch.no_grad():
        call = prepare("cross_entropy", {"logits": input, "labels": labels}, _shard(input, smoothing, total_classes), None)
        made = call.forward({"logits": input, "labels": labels})
    return torch.where(labels != -100, made["lse"] + made["share"], 0.0), made["lse"]


def backward(
    grad_loss: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, labels: torch.Tensor, smoothing: float, inplace: bool,
    total_classes: int = -1,
) -> torch.Tensor:  # fmt: skip
    """`xentropy_cuda_lib.backward`: the gradient of logits, over them if `inplace`."""
    options = _shard(logits, smoothing, total_classes, inplace=inplace)
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        call = prepare("cross_entropy", {"logits": leaf, "labels": labels}, options, None)
    weight = torch.where(labels != -100, grad_loss.float(), 0.0)
    given = {"logits": logits, "labels": labels, "lse": lse, "dshare": weight, "dlse": weight}
    return call.backward(given)["dlogits"]
