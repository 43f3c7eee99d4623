"""ONNX: `torch.onnx.export(..., dynamo=True, opset_version=23, custom_translation_table=translations())`.

Calls become ONNX's `Attention` (opset 23 and newer). It has scale, softcap and, counted from the first key, causality; any
other band goes along as a boolean mask, which the graph makes from its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

from flashtile.errors import NotSupported
from flashtile.spec.mask import FULL, Band
from flashtile.torch.operator import ATTENTION
from flashtile.torch.request import SIDES, Request, read

FLOAT32, BOOL = 1, 9  # ONNX's numbers of these dtypes
PARTS = {"revision", "options", "lse", "packing", "scale", "score", *SIDES}  # of a request, which are said below
SCORES = ([], ["softcap"], ["bias"], ["softcap", "bias"])  # in this order ONNX applies them


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export`. Needs onnxscript, as torch's exporter does.

    Exported are forwards of dense batches, packed or not, with any band, a `Softcap` and, after it, a `Bias` of q's dtype.
    `Options` say how flashtile computes, and are left out. Export fails, with a NotSupported among its causes, of sinks,
    dropout, unequal lengths, predicates, other modifiers and calls that return lse: ONNX's Attention has none of these.
    """
    return {ATTENTION: _attention}


def _attention(
    q: Any, k: Any, v: Any, others: list[Any], wanted: int, text: str, floats: list[Any], ints: list[Any]
) -> tuple[Any]:  # fmt: skip
    """(out,) as nodes of the graph; lse and residual are not read."""
    op: Any = import_module("onnxscript").opset23
    request = read(text)
    _refuse(request, others, q, [*floats, *ints])
    square = k is None or q.shape[1] == k.shape[1]
    parts = _unpack(op, request.parts.get("packing"), [t for t in (q, k, v) if t is not None], ints)
    query, key, value = (op.Transpose(t, perm=[0, 2, 1, 3]) for t in parts)
    numbers, counts = iter(floats), iter(ints[2 * (request.parts.get("packing") == "heads") :])
    how: dict[str, Any] = {"softmax_precision": FLOAT32}
    if "scale" in request.parts:
        how["scale"] = next(numbers)
    if request.score and request.score[0][0] == "softcap":
        how["softcap"] = next(numbers)
    band = Band(*(next(counts) if side in request.parts else None for side in SIDES))
    mask, visible = others[0] if others else None, None
    if mask is not None and 1 in mask.shape[2:]:  # runtimes broadcast a mask over batch and heads alone
        mask = op.Expand(mask, op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0))
    if square and band == Band(right=0):
        how["is_causal"] = 1
    elif band != FULL:
        visible = _visible(op, query, key, band)
        mask = visible if mask is None else op.Where(visible, mask, op.CastLike(float("-inf"), q))
    out, *_ = op.Attention(query, key, value, *([] if mask is None else [mask]), **how)
    if visible is not None and not (square and _sees_itself(band)):  # a query without keys: 0, which ONNX came late to say
        seen = op.Cast(op.ReduceMax(op.Cast(visible, to=FLOAT32), [1]), to=BOOL)
        out = op.Where(seen, out, op.CastLike(0.0, q))
    return (op.Transpose(out, perm=[0, 2, 1, 3]),)


def _sees_itself(band: Band) -> bool:
    return (band.left is None or band.left >= 0) and (band.right is None or band.right >= 0)


def _unpack(op: Any, packing: str | None, packs: list[Any], ints: list[int]) -> list[Any]:
    """q, k, v, each (batch, seqlen, heads, head_dim)."""
    if packing == "heads":
        heads_q, heads_kv = ints[:2]
        ends = [0, heads_q, heads_q + heads_kv, heads_q + 2 * heads_kv]
        return [op.Slice(packs[0], [a], [b], [2]) for a, b in pairwise(ends)]
    if packing is None:
        return packs
    return [*packs[:-1], *(op.Gather(packs[-1], i, axis=2) for i in range(4 - len(packs)))]


def _visible(op: Any, query: Any, key: Any, band: Band) -> Any:
    """bool (seqlen_q, seqlen_k): i - left <= j <= i + right, positions aligned bottom-right."""
    seqlen_q, seqlen_k = (op.Squeeze(op.Shape(t, start=2, end=3)) for t in (query, key))
    i = op.Add(op.Unsqueeze(op.Range(0, seqlen_q, 1), [1]), op.Sub(seqlen_k, seqlen_q))
    ahead = op.Sub(op.Range(0, seqlen_k, 1), i)
    sides: list[Any] = []
    if band.left is not None:
        sides.append(op.GreaterOrEqual(ahead, -band.left))
    if band.right is not None:
        sides.append(op.LessOrEqual(ahead, band.right))
    return sides[0] if len(sides) == 1 else op.And(*sides)


def _refuse(request: Request, others: list[Any], q: Any, numbers: list[Any]) -> None:
    """Raise NotSupported for what ONNX's Attention cannot say."""
    reasons = [f"Attention has no {part}" for part in request.parts if part not in PARTS]
    kinds = [name for name, *_ in request.score]
    if kinds not in SCORES:
        reasons.append(f"Attention has no {' before '.join(kinds)}; it has softcap, and after it a bias")
    elif "bias" in kinds and others[0].dtype != q.dtype:
        reasons.append(f"bias is {others[0].dtype}; it must have the dtype of q, {q.dtype}")
    if request.parts["lse"] == "1":
        reasons.append("Attention returns no lse")
    if not all(isinstance(n, (int, float)) for n in numbers):
        reasons.append("scale, softcap and window must be numbers; one of them depends on a size")
    if reasons:
        raise NotSupported("this attention in ONNX", {"onnx": reasons})
