"""Cross-entropy in plain PyTorch, for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtile.kernels.companions.cross_entropy import CrossEntropy


def _rows(p: CrossEntropy, t: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(scaled logits, columns of the labels as an index, where they are among these, which rows count)."""
    labels = t["labels"].long()
    counts = labels != p.ignore_index
    column = labels - p.first_class
    here = (column >= 0) & (column < p.columns) & counts
    logits = t["logits"].double() if p.wide else t["logits"].float()
    return logits * p.logit_scale, column.where(here, 0)[:, None], here, counts


def _share(p: CrossEntropy, x: Any, index: Any, here: Any, counts: Any, labels: Any) -> Any:
    classes = p.columns if p.classes is None else p.classes
    share = -(1.0 - p.smoothing) * x.gather(1, index)[:, 0].where(here, 0.0)
    if p.smoothing:
        share = share - p.smoothing / classes * x.sum(1)
    share = share.where((labels >= 0) & (labels < classes), float("nan"))
    return share.where(counts, 0.0)


def host_forward(p: CrossEntropy, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    x, index, here, counts = _rows(p, t)
    top = x.amax(1)
    top = top.masked_fill(top.isinf(), 0.0)
    rest = (x - top[:, None]).exp().sum(1).log()
    lse = top + rest
    made = {"lse": lse, "share": _share(p, x, index, here, counts, t["labels"]), "count": counts.sum().float()[None]}
    # Of a row that is sure of its label lse would say little beyond the label's logit.
    loss = (rest + (top + made["share"]) + p.z_loss * lse * lse).where(counts, 0.0)
    total = loss.sum()
    made["loss"] = {"none": loss, "sum": total, "mean": total / made["count"][0]}[p.reduction]
    if p.eager_gradient:
        made["gradient"] = _gradient(p, t, lse, made["count"], lse.new_ones(()), None)
    return {name: made[name] for name in outputs}


def _gradient(p: CrossEntropy, t: dict[str, Any], lse: Any, count: Any, first: Any, dlse: Any) -> Any:
    x, index, here, counts = _rows(p, t)
    labels, classes = t["labels"], p.columns if p.classes is None else p.classes
    weight = first.to(x.dtype).expand(p.rows)
    if p.reduction == "mean":
        weight = weight / count
    weight = weight.where((labels >= 0) & (labels < classes), float("nan")).where(counts, 0.0)
    along = weight * (1.0 + 2.0 * p.z_loss * lse)
    if p.shard:
        lse = lse.where(lse != -float("inf"), 0.0)
        along = lse.new_zeros(p.rows) if dlse is None else dlse
    else:
        along = along.where(counts, 0.0)
    grad = along[:, None] * (x - lse[:, None]).exp() - (weight * p.smoothing / classes)[:, None]
    grad.scatter_add_(1, index, (-(1.0 - p.smoothing) * weight).where(here, 0.0)[:, None])
    return (grad * p.logit_scale).where(((along != 0.0) | (weight != 0.0))[:, None], 0.0)


def host_backward(p: CrossEntropy, t: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
    if p.eager_gradient:
        return {"dlogits": t["gradient"] * t["dloss"]}
    return {"dlogits": _gradient(p, t, t["lse"], t.get("count"), t["dshare" if p.shard else "dloss"], t.get("dlse"))}
