"""Cross-entropy in plain PyTorch, for the CPU."""

from __future__ import annotations

from typing import Any

from flashtile.kernels.ops.cross_entropy_problem import CrossEntropy


class _Rows:
    """What loss and gradient have in common.

    x: the logits that the softmax sees, `slope` their derivative by what they are made of, None where that is 1. index: columns
    of the labels; here: where they are among these; counts: which rows do; known: whose label is a class. of_label, of_all,
    of_lse: what the label's logit, any class's, and lse count in a row's loss, one number or one a row or class.
    """

    def __init__(self, p: CrossEntropy, t: dict[str, Any]):
        labels = t["labels"].long()
        column = labels - p.first_class
        self.known, self.counts = (labels >= 0) & (labels < p.every), labels != p.ignore_index
        self.here = (column >= 0) & (column < p.columns) & self.counts
        self.index = column.where(self.here, 0)[:, None]
        self.x, self.slope = (t["logits"].double() if p.wide else t["logits"].float()) * p.logit_scale, None
        if p.softcap is not None:
            bent = (self.x / p.softcap).tanh()
            self.x, self.slope = p.softcap * bent, 1.0 - bent * bent
        self.of_label, self.of_all, self.of_lse = 1.0 - p.smoothing, p.smoothing / p.every, 1.0
        sums = [self.counts.sum()]
        if p.has("weight"):
            weight = t["weight"].to(self.x.dtype)
            own = weight[labels.where(self.known & self.counts, 0)].where(self.known & self.counts, 0.0)
            sums = [own.sum(), *sums, weight.sum()]
            self.of_label = self.of_label * own
            self.of_lse = self.of_label + self.of_all * weight.sum()
            self.of_all = self.of_all * weight[p.first_class : p.first_class + p.columns]
        self.count = self.x.new_empty(0) if p.shard else _stacked(sums, self.x)
        self.z_loss = p.z_loss
        if p.has("weight") and p.reduction == "mean":  # what it adds is divided by the rows that count, not by their weights
            self.z_loss = p.z_loss * self.count[0] / self.count[1]


def _stacked(sums: list[Any], like: Any) -> Any:
    import torch

    return torch.stack([s.to(like.dtype) for s in sums])


def _share(p: CrossEntropy, r: _Rows) -> Any:
    share = -r.of_label * r.x.gather(1, r.index)[:, 0].where(r.here, 0.0)
    if p.smoothing:
        share = share - (r.of_all * r.x).sum(1)
    return share.where(r.known, float("nan")).where(r.counts, 0.0)


def host_forward(p: CrossEntropy, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    r = _Rows(p, t)
    top = r.x.amax(1)
    top = top.masked_fill(top.isinf(), 0.0)
    rest = (r.x - top[:, None]).exp().sum(1).log()
    lse = top + rest
    made = {"lse": lse, "share": _share(p, r), "count": r.count}
    # Of a row that is sure of its label lse would say little beyond the label's logit.
    loss = (r.of_lse * rest + (r.of_lse * top + made["share"]) + r.z_loss * lse * lse).where(r.counts, 0.0)
    total = loss.sum()
    made["loss"] = {"none": loss, "sum": total, "mean": total / r.count[0] if p.reduction == "mean" else total}[p.reduction]
    if p.eager_gradient:
        made["gradient"] = _gradient(p, r, lse, lse.new_ones(()), None)
    return {name: made[name] for name in outputs}


def _gradient(p: CrossEntropy, r: _Rows, lse: Any, first: Any, dlse: Any) -> Any:
    weight = first.to(r.x.dtype).expand(p.rows)
    if p.reduction == "mean":
        weight = weight / r.count[0]
    weight = weight.where(r.known, float("nan")).where(r.counts, 0.0)
    if p.shard:
        lse = lse.where(lse != -float("inf"), 0.0)
        along = lse.new_zeros(p.rows) if dlse is None else dlse
    else:
        along = (weight * (r.of_lse + 2.0 * r.z_loss * lse)).where(r.counts, 0.0)
    grad = along[:, None] * (r.x - lse[:, None]).exp() - weight[:, None] * r.of_all
    grad.scatter_add_(1, r.index, (-r.of_label * weight).where(r.here, 0.0)[:, None])
    if r.slope is not None:
        grad = grad * r.slope
    return (grad * p.logit_scale).where(((along != 0.0) | (weight != 0.0))[:, None], 0.0)


def host_backward(p: CrossEntropy, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    if p.eager_gradient:
        return {"dlogits": t["gradient"] * t["dloss"]}
    return {"dlogits": _gradient(p, _Rows(p, t), t["lse"], t["dshare" if p.shard else "dloss"], t.get("dlse"))}
