"""ONNX: `torch.onnx.export(..., dynamo=True, opset_version=23, custom_translation_table=translations())`.

A call becomes ONNX's `Attention` where every onnxruntime that has it (1.23 and newer) means the same by it. Elsewhere it is
written out as products and a softmax in float32, which onnxruntime 1.20 runs, too: in other opsets than 23 to 25, where a
softcap stands beside hidden keys or a bias (until 1.26 they were capped with the scores), where a bias differs between grouped
heads (until 1.26 others' were added, or it did not run), and in bfloat16 (which Attention has on no CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

from flashtile.errors import NotSupported
from flashtile.problem.mask import FULL, Band
from flashtile.torch.routes.functional import ATTENTION
from flashtile.torch.routes.request import SIDES, Request, read

FLOAT32 = 1  # ONNX's number of it
PARTS = {"revision", "options", "lse", "packing", "scale", "score", *SIDES}  # of a request, which are said below
SCORES = ([], ["softcap"], ["bias"], ["softcap", "bias"])  # in this order ONNX applies them
OPSETS = range(23, 26)  # Attention's first, and the last to which onnxscript converts


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export`, of any `opset_version`. Needs onnxscript, as that does.

    Exported are forwards of dense batches, packed or not, with any band, a `Softcap` and, after it, a `Bias`; out is 0 where
    a query sees no key. `Options` say how flashtile computes, and are left out. Export fails, with a NotSupported among its
    causes, of sinks, dropout, unequal lengths, predicates, other modifiers and calls that return lse.
    """
    return {ATTENTION: _attention}


def _attention(
    q: Any, k: Any, v: Any, others: list[Any], wanted: int, text: str, floats: list[Any], ints: list[Any]
) -> tuple[Any]:  # fmt: skip
    """(out,) as nodes of the graph; lse and residual are not read."""
    op: Any = import_module("onnxscript").opset18
    request = read(text)
    packing = request.parts.get("packing")
    heads_q, heads_kv = _heads(packing, [t for t in (q, k, v) if t is not None], ints)
    _refuse(request, [*floats, *ints, heads_q, heads_kv])
    square = k is None or q.shape[1] == k.shape[1]
    parts = _unpack(op, packing, [t for t in (q, k, v) if t is not None], ints)
    query, key, value = (op.Transpose(t, perm=[0, 2, 1, 3]) for t in parts)
    numbers, counts = iter(floats), iter(ints[2 * (packing == "heads") :])
    scale = next(numbers) if "scale" in request.parts else 1.0 / math.sqrt(q.shape[-1])
    cap = next(numbers) if request.score and request.score[0][0] == "softcap" else None
    band = Band(*(next(counts) if side in request.parts else None for side in SIDES))
    bias = others[0] if others else None
    visible = None if band == FULL else _visible(op, query, key, band)
    differs = bias is not None and (cap is not None or (bias.shape[1] != 1 and heads_q != heads_kv))
    if differs or (cap is not None and visible is not None) or _opset() not in OPSETS or q.dtype.name == "BFLOAT16":
        out = _written(op, query, key, value, (heads_q, heads_kv), scale, cap, bias, visible)
        return (op.Transpose(op.CastLike(out, q), perm=[0, 2, 1, 3]),)
    how: dict[str, Any] = {"softmax_precision": FLOAT32, "scale": scale} | ({} if cap is None else {"softcap": cap})
    mask, sees = visible, None  # of each query whether it sees a key
    if bias is not None:
        # runtimes broadcast a mask over batch and heads alone
        sizes = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        mask = op.Expand(op.CastLike(bias, q), sizes)
        mask = mask if visible is None else op.Where(visible, mask, op.CastLike(-math.inf, q))
        sees = _any(op, op.Cast(mask, to=FLOAT32), -math.inf)
    elif square and band == Band(right=0):
        how["is_causal"], mask = 1, None
    elif visible is not None and not (square and _sees_itself(band)):
        sees = _any(op, op.Cast(visible, to=FLOAT32), 0.0)
    out, *_ = import_module("onnxscript").opset23.Attention(query, key, value, *([] if mask is None else [mask]), **how)
    if sees is not None:  # 0, which ONNX came late to say
        out = op.Where(sees, out, op.CastLike(0.0, q))
    return (op.Transpose(out, perm=[0, 2, 1, 3]),)


def _written(
    op: Any, query: Any, key: Any, value: Any, heads: tuple[int, int], scale: float, cap: float | None, bias: Any, visible: Any
) -> Any:  # fmt: skip
    """The same of (batch, heads, seqlen, head_dim) by products and a softmax, float32."""
    query, key, value = (op.Cast(t, to=FLOAT32) for t in (query, key, value))

    def of(which: int, x: Any) -> Any:  # queries of one group's heads stand one after another before their one head of keys
        return x if heads[0] == heads[1] else op.Reshape(x, [0, heads[which], -1, 0])

    scores = of(0, op.MatMul(of(1, op.Mul(query, scale)), op.Transpose(key, perm=[0, 1, 3, 2])))
    if cap is not None:
        scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    if bias is not None:
        scores = op.Add(scores, op.Cast(bias, to=FLOAT32))
    if visible is not None:
        scores = op.Where(visible, scores, -math.inf)
    out = of(0, op.MatMul(of(1, op.Softmax(scores, axis=-1)), value))
    return op.Where(_any(op, scores, -math.inf), out, 0.0)


def _any(op: Any, values: Any, least: float) -> Any:
    """Whether one along the last axis is more than the least."""
    return op.Greater(op.ReduceSum(op.Cast(op.Greater(values, least), to=FLOAT32), [-1]), 0.0)


def _opset() -> int | None:
    """That of the model which is written; None where the exporter does not say it."""
    recorder = import_module("onnxscript").evaluator.default()
    return getattr(getattr(recorder, "opset", None), "version", None)


def _sees_itself(band: Band) -> bool:
    return (band.left is None or band.left >= 0) and (band.right is None or band.right >= 0)


def _heads(packing: str | None, packs: list[Any], ints: list[int]) -> tuple[Any, Any]:
    """Heads of queries, and of keys."""
    if packing == "heads":
        return ints[0], ints[1]
    return packs[0].shape[-2], packs[-1].shape[-2]


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


def _refuse(request: Request, numbers: list[Any]) -> None:
    """Raise NotSupported for what is not said here."""
    reasons = [f"Attention has no {part}" for part in request.parts if part not in PARTS]
    kinds = [name for name, *_ in request.score]
    if kinds not in SCORES:
        reasons.append(f"Attention has no {' before '.join(kinds)}; it has softcap, and after it a bias")
    if request.parts["lse"] == "1":
        reasons.append("Attention returns no lse")
    if not all(isinstance(n, (int, float)) for n in numbers):
        reasons.append("scale, softcap, window and heads must be numbers; one of them depends on a size")
    if reasons:
        raise NotSupported("this attention in ONNX", {"onnx": reasons})
