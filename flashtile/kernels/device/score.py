"""Applying a chain of score modifiers, forward and in reverse.

Kernels get the functions as flat constexpr tuples (Triton 3.6 cannot index a tuple inside a tuple):
`SCORE` = (forward 0, backward 0, forward 1, backward 1, ...) where T.modifiers.prescale, otherwise (add 0, add 1, ...) of
T.modifiers.adds modifiers and, where T.modifiers.curved, (function, derivative, width) of a last one; and `CAPTURED` = a pair
(contribution, index) for each captured tensor, equally many per modifier, (None, None) where no gradient is wanted.

Unless T.modifiers.prescale the softmax works on raw products: what modifiers add is added in units of the product, a row's
maximum may be taken before the curve, which rises, and all factors meet in the exponent's multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.exponential import LOG2E, exp
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import SIZES_BYTES, DType
from flashtile.problem.score import Position, ScoreSpec, TensorSpec
from flashtile.triton_glue.language import INTERPRETED, JitTuple, jit, tl


@dataclass(frozen=True)
class Form:
    """How a problem's modifiers are applied: one after another to scaled scores, or by what they add and a curve."""

    prescale: bool
    adds: int = 0
    curved: bool = False


def form_of(p: AttentionProblem, gradients: bool = False) -> Form:
    """For float32's grade scores are scaled first; where scales are not positive too, for the maximum is taken before them.

    gradients: a pass forms those of captured tensors, which takes scaled scores.
    """
    kinds = [spec.kind for spec in p.score]
    adds = next((i for i, kind in enumerate(kinds) if kind.add is None), len(kinds))
    curved = len(kinds) == adds + 1 and kinds[adds].curve is not None
    generic = len(kinds) > adds + curved or (gradients and any(spec.wants_grad for spec in p.score))
    if generic or p.float32_grade or p.scale_value <= 0:
        return Form(prescale=True)
    return Form(False, adds, curved)


def chain(p: AttentionProblem, device: Device, form: Form) -> JitTuple:
    """SCORE of a problem's modifiers, applied in this form."""
    if form.prescale:
        return JitTuple(function for spec in p.score for function in (spec.kind.forward, spec.kind.backward))
    functions = [spec.kind.add for spec in p.score[: form.adds]]
    if form.curved:
        curve = p.score[-1].kind.curve
        assert curve is not None
        coarse = p.dtype is not DType.FP32 and not p.returns_lse and device.kind == "cuda" and not INTERPRETED
        functions += [(coarse and curve.approximate) or curve.function, curve.derivative, curve.width]
    return JitTuple(functions)


def early(p: AttentionProblem, form: Form) -> int | None:
    """Which of the modifiers that add loads 16 bits for every key, of them rather one for every score; None if none does.

    What it loads may be on its way before its tile's turn. It waits in registers, hence one alone.
    """
    able = [
        i
        for i, spec in enumerate(p.score[: form.adds])
        if spec.kind.load is not None and not spec.scalars and [c.broadcast for c in spec.kind.captured] == [True]
        and SIZES_BYTES[spec.tensors[0].dtype] == 2 and spec.tensors[0].shape[3] != 1
    ]  # fmt: skip
    return min(able, key=lambda i: p.score[i].tensors[0].shape[2] == 1, default=None)


def captures(score: tuple[ScoreSpec, ...]) -> JitTuple:
    """CAPTURED of a problem's modifiers for the pass over queries; empty when it forms no captured tensor's gradient."""
    if not any(sums_in_queries(spec, j) for spec in score for j in range(len(spec.tensors))):
        return JitTuple()
    most = max(len(spec.tensors) for spec in score)
    flat = []
    for spec in score:
        pairs = [
            (captured.contribution, captured.index) if sums_in_queries(spec, j) else (None, None)
            for j, captured in enumerate(spec.kind.captured)
        ]
        flat += [function for pair in pairs + [(None, None)] * (most - len(pairs)) for function in pair]
    return JitTuple(flat)


def sums_per_head(p: AttentionProblem) -> bool:
    """Whether a sink, or some captured tensor, wants a gradient that is one sum per head."""
    captured = any(
        sums_in_queries(spec, j) and captured.index is None for spec in p.score for j, captured in enumerate(spec.kind.captured)
    )
    return captured or (p.sink is not None and p.sink.grad)


def adds_elements(score: tuple[ScoreSpec, ...]) -> bool:
    """Whether some captured tensor's gradient is added up in memory, element by element."""
    return any(
        sums_in_queries(spec, j) and captured.index is not None
        for spec in score
        for j, captured in enumerate(spec.kind.captured)
    )


def sums_in_queries(spec: ScoreSpec, tensor: int) -> bool:
    """Whether the pass over queries forms this captured tensor's gradient: where it is wanted, unless it is broadcast and has
    elements for single queries or keys."""
    described = spec.tensors[tensor]
    return described.grad and (not spec.kind.captured[tensor].broadcast or described.shape[2:] == (1, 1))


def score_bytes(p: AttentionProblem) -> int:
    """Bytes that broadcast tensors, which have an element for every score, add to one."""
    return sum(SIZES_BYTES[described.dtype] for described in _of_scores(p))


def shares_items(p: AttentionProblem) -> bool:
    """Whether all items read one tensor that has an element for every score."""
    return not p.lengths.ragged and any(described.shape[0] == 1 for described in _of_scores(p))


def _of_scores(p: AttentionProblem) -> list[TensorSpec]:
    """The broadcast tensors with both query and key axis."""
    pairs = [pair for spec in p.score for pair in zip(spec.kind.captured, spec.tensors, strict=True)]
    return [described for captured, described in pairs if captured.broadcast and 1 not in described.shape[2:]]


def uneven_refusals(p: AttentionProblem) -> list[str]:
    """Reasons against broadcast tensors where items differ in length."""
    reasons: list[str] = []
    for spec in p.score if p.lengths.ragged else ():
        for captured, tensor in zip(spec.kind.captured, spec.tensors, strict=True):
            if captured.broadcast and p.lengths.varlen and tensor.shape[2:] != (1, 1):  # nobody knows the longest item here
                reasons.append(
                    f"items lie one after another and {spec.kind.name}'s tensor has an element for every query or key; "
                    "supported is one number per item and head; put the items into one row, under Document(ids)"
                )
    return reasons


@jit
def locate(batch, head, row, key, sizes, MASKED: tl.constexpr = True):
    """The Position of a tile, its indices clamped into the tensors so that a modifier may load by them.

    Unless MASKED all keys exist: loads along them keep their width.
    """
    row = tl.minimum(row, sizes.q - 1)
    q, k = row + sizes.k - sizes.q, tl.minimum(key, sizes.k - 1) if MASKED else key
    return Position(batch, head, row, q, k, k.to(tl.float32) - q.to(tl.float32))


@jit
def logits(raw, at, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The product q k^T turned into modified scores; where not T.modifiers.prescale in units of the product, before any
    curve.
    """
    if T.modifiers.prescale:
        score = raw * scale
        for i in tl.static_range(len(SCORE) // 2):
            score = SCORE[2 * i](score, at, score_args[i])
        return score
    else:
        return added(raw, at, scale, score_args, T, SCORE)


@jit
def added(raw, at, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """raw plus what modifiers add, in units of the product."""
    ADDS: tl.constexpr = T.modifiers.adds
    score = raw
    for i in tl.static_range(ADDS):
        score = SCORE[i](score, at, score_args[i], 1.0 / scale)
    return score


@jit
def bent(score, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """What `logits` made, after the curve; `unit` of these make a score."""
    if T.modifiers.curved:
        return SCORE[T.modifiers.adds](score * (scale / SCORE[T.modifiers.adds + 2](score_args[T.modifiers.adds])))
    else:
        return score


@jit
def unit(scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The factor that turns `bent` logits into scores."""
    if T.modifiers.prescale:
        return 1.0
    elif T.modifiers.curved:
        return SCORE[T.modifiers.adds + 2](score_args[T.modifiers.adds])
    else:
        return scale


@jit
def stages(raw, at, scale, score_args, SCORE: tl.constexpr):
    """The scaled score and what each modifier made of it, as a tuple."""
    scores = (raw * scale,)
    for i in tl.static_range(len(SCORE) // 2):
        scores = scores + (SCORE[2 * i](scores[i], at, score_args[i]),)  # noqa: RUF005 (Triton knows no unpacking)
    return scores


@jit
def probability(score, row, T: tl.constexpr):
    """norm * exp(score - level) of scaled scores; row = (level, anything, norm), as for `probabilities`.

    Where T.offset level is lse, rounded, and norm what it lacks, in units of the base-2 exponential: the difference to a score
    nearby is exact, however large both are.
    """
    if T.exact:
        return exp(score - row[0], T) * row[2]
    elif T.offset:
        return tl.exp2((score - row[0]) * LOG2E - row[2])
    else:
        return tl.exp2(score * LOG2E - row[0])


@jit
def probabilities(raw, dp, row, at, keep, scale, score_args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):
    """(p, ds) of a tile: probabilities, and the gradient of the scaled product.

    dp is the gradient of p; row = (level, delta, norm) broadcasts along the keys, p = norm * exp(score - level), with
    level in units of the base-2 exponential, and norm 1, unless T.exact; keep says which scores exist.
    """
    if T.modifiers.prescale:
        scores = stages(raw, at, scale, score_args, SCORE)
        p = probability(scores[len(SCORE) // 2], row, T)
    else:
        y = bent(added(raw, at, scale, score_args, T, SCORE), scale, score_args, T, SCORE)
        p = tl.exp2(y * (unit(scale, score_args, T, SCORE) * LOG2E) - row[0])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    ds = p * (dp - row[1])
    if T.modifiers.prescale:
        for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
            ds = SCORE[len(SCORE) - 2 * r + 1](
                ds, scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r]
            )
    elif T.modifiers.curved:
        ds = ds * SCORE[T.modifiers.adds + 1](y)
    if MASKED:  # dp, or a modifier's derivative, may be NaN where nothing is to be seen
        ds = tl.where(keep, ds, 0.0)
    return p, ds


@jit
def capture(totals, raw, dp, row, at, keep, scene, INDEXED: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr,
            SCORE: tl.constexpr, CAPTURED: tl.constexpr):  # fmt: skip
    """Add what a tile sends to captured tensors: sums to `totals` (rows, slots) and, if INDEXED, elements to memory.

    scene.extra_args[i][j] = (slot, pointer): the place in `totals`, and where sums or elements are stored.
    """
    score_args, grad_args = scene.score_args, scene.extra_args
    scores = stages(raw, at, scene.scale, score_args, SCORE)
    p = probability(scores[len(SCORE) // 2], row, T)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    ds = p * (dp - row[1])
    for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
        score = scores[len(SCORE) // 2 - r]
        for j in tl.static_range(len(CAPTURED) // len(SCORE)):
            if CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j] is not None:
                totals = capture_one(
                    totals, ds, score, at, keep, score_args[len(SCORE) // 2 - r], grad_args[len(SCORE) // 2 - r][j],
                    CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j],
                    CAPTURED[(len(SCORE) // 2 - r) * (2 * len(CAPTURED) // len(SCORE)) + 2 * j + 1], INDEXED, MASKED, T,
                )  # fmt: skip
        ds = SCORE[len(SCORE) - 2 * r + 1](ds, score, scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r])
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
    return totals


@jit
def capture_one(totals, grad, score, at, keep, score_args, target,
                CONTRIBUTION: tl.constexpr, INDEX: tl.constexpr, INDEXED: tl.constexpr, MASKED: tl.constexpr,
                T: tl.constexpr):  # fmt: skip
    """The totals after one captured tensor; without INDEX its contributions are summed, with it they go to memory."""
    SLOTS: tl.constexpr = T.slots
    share = CONTRIBUTION(grad, score, at, score_args)
    if MASKED:
        share = tl.where(keep, share, 0.0)
    if INDEX is None:
        totals += tl.where(tl.arange(0, SLOTS)[None, :] == target[0], tl.sum(share, 1)[:, None], 0.0)
    elif INDEXED:
        element = tl.broadcast_to(INDEX(at, score_args), share.shape)
        tl.atomic_add(target[1] + element, share.to(target[1].dtype.element_ty), mask=keep, sem="relaxed")
    return totals


@jit
def contribution(raw, dp, row, at, keep, scale, score_args,
                 MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):  # fmt: skip
    """What each score sends to a captured tensor; CAPTURED = (its contribution, its modifier's place in the chain)."""
    WHICH: tl.constexpr = CAPTURED[1]
    scores = stages(raw, at, scale, score_args, SCORE)
    p = probability(scores[len(SCORE) // 2], row, T)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    ds = p * (dp - row[1])
    for r in tl.static_range(1, len(SCORE) // 2 - WHICH):  # r modifiers before the end
        ds = SCORE[len(SCORE) - 2 * r + 1](
            ds, scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1], at, score_args[len(SCORE) // 2 - r]
        )
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
    share = CAPTURED[0](ds, scores[WHICH], at, score_args[WHICH])
    return tl.where(keep, share, 0.0) if MASKED else share


@jit
def store_totals(totals, at, grad_args, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):
    """Write the per-head sums of this program to element `at` of their buffers."""
    SLOTS: tl.constexpr = T.slots
    for i in tl.static_range(len(SCORE) // 2):
        for j in tl.static_range(len(CAPTURED) // len(SCORE)):
            if CAPTURED[i * (2 * len(CAPTURED) // len(SCORE)) + 2 * j] is not None:
                if CAPTURED[i * (2 * len(CAPTURED) // len(SCORE)) + 2 * j + 1] is None:
                    total = tl.sum(tl.where(tl.arange(0, SLOTS) == grad_args[i][j][0], totals, 0.0))
                    tl.store(grad_args[i][j][1] + at, total)
