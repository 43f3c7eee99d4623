"""attention: the public PyTorch function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from flashtile.errors import InvalidProblem, check_names
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dropout import Dropout
from flashtile.problem.lengths import ALIKE
from flashtile.problem.mask import Band, make_mask
from flashtile.problem.number import plain, plain_pair
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.predicate import Joined, check_ends
from flashtile.problem.score import Score, ScoreSpec, TensorSpec
from flashtile.torch.call.dropout import check_dropout, draw_seed
from flashtile.torch.call.holes import counts, holes
from flashtile.torch.call.inputs import check_arguments, check_modifier, check_sink, check_tensors, modifiers
from flashtile.torch.call.lengths import Given, given_lengths
from flashtile.torch.call.masks import call_mask, mask_of_call, predicates_of
from flashtile.torch.execute.bound import DTYPE_NAMES, DTYPES
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import is_traced
from flashtile.torch.execute.prepared import PreparedCall, Tensors, alignment
from flashtile.torch.execute.replay import addresses_of
from flashtile.torch.routes.derivatives import each_gradient, first_derivatives, is_dual_level, is_mapped, refuse_tangents
from flashtile.torch.routes.traced import attend_traced, autocast, is_plain

ARGUMENTS = (
    "q", "k", "v", "causal", "window", "mask", "score", "scale", "sink", "dropout", "seqused_q", "seqused_k", "return_lse",
    "options",
)  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Band | Joined | None = None,
    score: Sequence[Score] = (),
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    options: Options | None = None,
    **unknown: NoReturn,
) -> Any:
    """softmax(score(scale q k^T) + mask) v, exact, in O(seqlen) memory; differentiable in everything.

    q: (batch, seqlen_q, heads_q, head_dim); k: (batch, seqlen_k, heads_kv, head_dim);
    v: (batch, seqlen_k, heads_kv, head_dim_v); fp16, bf16 or fp32, any strides; heads_q a multiple of heads_kv.
    causal, window = (left, right), mask: which keys a query sees, together by `&`. Positions are aligned bottom-right:
        query i stands at i + seqlen_k - seqlen_q. Window distances are inclusive, None is unbounded. A mask is a `Band` or
        a predicate such as `Document(ids)`, or several joined by `&` and `|`.
    score: modifiers such as `Softcap(30.0)` or `Alibi(slopes)`, applied to the scaled scores in the order given.
    scale: factor of q k^T, 1 / sqrt(head_dim) by default.
    sink: (heads_q,), fp16, bf16 or fp32: a logit per head that joins every row's softmax as one more key, whose value is
        zero. lse includes it; a query that sees no key then has lse = sink.
    dropout: `Dropout(p)`; the probabilities that it keeps depend on its seed and on (batch, head, query, key) alone. lse is
        that of the scores before it.
    seqused_q, seqused_k: how many of each item's queries and keys count, int32 (batch,): the rest is padding, never
        looked at. Positions are aligned by what counts. Padded queries give out 0, lse -inf; gradients of padding are 0.
        Or which of them, bool (batch, seqlen): those that count are moved together first, at the price of a copy, and
        positions (causal, window, score, dropout) count them alone. `KeyPadding` hides keys where they stand instead.
    return_lse: also return the natural log of each row's softmax denominator, float32 (batch, heads_q, seqlen_q).
    options: backend, backward variant, determinism, fp32 precision (`Options`).

    Returns out (batch, seqlen_q, heads_q, head_dim_v), in q's dtype and memory order, or (out, lse). A query that sees
    no key gives out 0 and, without a sink, lse -inf. What no query of its item sees, and padding, may hold NaN or Inf: it
    reaches nothing. One at a key that some query sees reaches that query, and may reach others of its item and head from
    which the key is hidden: in v their out and gradients (0 times NaN is NaN), in k their gradients alone.

    Raises InvalidProblem for a request without meaning, NotSupported (with every backend's reason) for one that nothing
    here can run, such as forward-mode differentiation; both before any launch.

    FlashAttention (arXiv 2205.14135, 2307.08691).
    """
    if unknown:
        check_names("attention", unknown, ARGUMENTS)
    given = None
    if seqused_q is not None or seqused_k is not None:
        moved = holes((q, k, v), seqused_q, seqused_k, mask, score)
        if moved is not None:
            if not torch.compiler.is_compiling() and is_dual_level():
                refuse_tangents("attention", "torch", zip("qkv", (q, k, v), strict=True))
            result = attention(
                *moved.close(q, k, v), causal=causal, window=window, mask=mask, score=score, scale=scale, sink=sink,
                dropout=dropout, seqused_q=counts(seqused_q), seqused_k=counts(seqused_k), return_lse=return_lse,
                options=options,
            )  # fmt: skip
            return moved.open(*result) if return_lse else moved.open(result, None)[0]
        given = given_lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    if not is_plain(q, k, v):
        q, k, v = autocast(q, k, v)
        if isinstance(q, torch.Tensor) and q.is_nested and q.layout is torch.jagged:
            from flashtile.torch.api.nested import attend_jagged  # it calls attention_varlen, which stands above this module

            return attend_jagged(
                q, k, v, given, causal=causal, window=window, mask=mask, score=score, scale=scale, sink=sink,
                dropout=dropout, return_lse=return_lse, options=options,
            )  # fmt: skip
        if is_traced(q, k, v):
            return attend_traced(
                APART, (q, k, v), given, causal=causal, window=window, mask=mask, score=score, scale=scale, sink=sink,
                dropout=dropout, return_lse=return_lse, options=options,
            )  # fmt: skip
    call, others = prepare(q, k, v, causal, window, mask, score, scale, options, return_lse, given, sink=sink, dropout=dropout)
    return attend(call, others, q, k, v)


def attend(call: PreparedCall, others: tuple[torch.Tensor, ...], *packs: torch.Tensor, parts: Tensors | None = None) -> Any:
    """out, or (out, lse) where the problem returns it, of a prepared call, differentiable where a gradient is wanted.

    packs: q, k, v as `call.packing` has them; parts: the views of them, where the caller has them.
    """
    if torch.is_grad_enabled() and True in [t.requires_grad for t in (*packs, *others)]:
        call.require_backward()
        return _apply(call, parts, *map(_alive, packs), *map(_alive, others))
    made = call.hosted(*packs) if call.hosted else None
    out, lse, *_ = made or call.forward(packs, others, parts, call.problem.returns_lse)
    return (out, lse) if call.problem.returns_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PreparedCall, parts: Tensors | None, *given: torch.Tensor) -> Any:
        kept = call.hosted(*given) if call.hosted else None
        if kept is None:
            count = len(call.packing.packs)
            kept = call.forward(given[:count], given[count:], parts)
        ctx.save_for_backward(*given, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (kept[0], kept[1]) if call.problem.returns_lse else kept[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: PreparedCall = ctx.call
        needs = ctx.needs_input_grad[2:]
        hosted = call.hosted_backward.get(needs)
        dout, dlse = (*grads, None)[:2]
        saved, mapped = ctx.saved_tensors, is_mapped(grads)
        if hosted and dout is not None and dlse is None and not (mapped or torch.is_grad_enabled() or is_dual_level()):
            function, places = hosted
            made = function(*saved, dout)
            if made is not None:
                return None, None, *(made if places is None else [None if i is None else made[i] for i in places])
        if mapped:
            each = partial(each_gradient, call.problem, call.plan.backend)
            return None, None, *each(lambda dout, dlse: call.gradients(saved, dout, dlse, needs), (dout, dlse))
        if is_dual_level():
            refuse_tangents(call.problem, call.plan.backend, (("dout", dout), ("dlse", dlse)))
        if not torch.is_grad_enabled():
            return None, None, *call.gradients(saved, dout, dlse, needs)
        with torch.no_grad():  # create_graph
            given = call.gradients(saved, dout, dlse, needs)
        return None, None, *first_derivatives(call.problem, call.plan.backend, given, saved, grads)


# What `Function.apply` comes to outside of torch.func's transforms: calls within them have gone to the operator.
_apply: Any = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
_alive: Any = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue] (of what outlived a transform)


_CALLS: dict[Any, PreparedCall] = {}
_MOST_CALLS = 8192  # layouts remembered; past this the memory is started afresh


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    causal: Any = False, window: Any = None, mask: Any = None, score: Any = (), scale: Any = None, options: Any = None,
    return_lse: Any = False, given: Given | None = None, **softmax: Any,
) -> tuple[PreparedCall, tuple[torch.Tensor, ...]]:  # fmt: skip
    """The prepared call of these arguments, and the tensors besides q, k, v: captured ones and lengths.

    Everything is validated at first sight of a layout.
    """
    sink, dropout = softmax_options(**softmax)
    captured: tuple[torch.Tensor, ...] = ()
    if given is not None:
        mask = mask_of_call(mask, q, k, True)
    plain_mask, masking = mask, None
    try:
        if isinstance(mask, Joined):
            masking = call_mask(causal, window, mask, *_rows(q, given))
            plain_mask = masking.key
        key: Any = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, alignment(addresses_of((q, k, v))) if q.is_cuda else 0, causal, type(causal),
            plain_mask, scale, type(scale), options, return_lse, type(return_lse), q.is_neg() or k.is_neg() or v.is_neg(),
        )  # fmt: skip
        if window is not None:
            key += _exactly(window)
        listed = isinstance(score, (tuple, list))
        if not listed or score:
            captured, score_key = capture(score if listed else modifiers(score), *_rows(q, given))
            key += (score_key,)
        if sink is not None:
            captured += (sink,)
            key += ("sink", sink.shape, _layout(sink), sink.dtype, sink.device, _wants_grad(sink), sink.is_neg())
        if dropout is not None:
            key += ("dropout", dropout.p, type(dropout), dropout.seed is None or _seed_key(dropout.seed))
        if given is not None:
            key += given.key()
        call = _CALLS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not dense tensors, or not hashable: let validation say what is wrong
        key, call = None, None
    if call is None:
        given_ones = causal, window, scale, return_lse
        numbers = plain(causal), plain_pair(window), plain(scale), plain(return_lse)
        if any(a is not b for a, b in zip(numbers, given_ones, strict=True)):  # a tensor is another key as it changes
            causal, window, scale, return_lse = numbers
            return prepare(q, k, v, causal, window, mask, score, scale, options, return_lse, given, **softmax)
        problem, options = make_problem(
            q, k, v, causal, window, mask, score, scale, options, return_lse, given, sink=sink, dropout=dropout
        )
        score = modifiers(score)
        captured, _ = capture(score, *_rows(q, given))
        captured += () if sink is None else (sink,)
        if any(isinstance(number, torch.Tensor) for modifier in score for number in modifier.scalars()):
            key = None
        call = PreparedCall(problem, options, q.device)
        if key is not None:
            if len(_CALLS) >= _MOST_CALLS:
                _CALLS.clear()
            _CALLS[key] = call
    if dropout is not None and call.problem.dropout is not None:
        captured += (draw_seed(dropout, call.device),)
    if isinstance(mask, Joined):
        captured += (masking or call_mask(causal, window, mask, *_rows(q, given))).flat
    if given is not None:
        captured += tuple(given.tensors[name] for name in call.problem.lengths.tensors)
        if q.device.type == "cpu":
            given.check_values({"q": call.problem.span_q, "k": call.problem.span_k})
    if is_dual_level():
        refuse_tangents(call.problem, call.plan.backend, zip(("q", "k", "v", *call.names), (q, k, v, *captured), strict=True))
    return call, captured


def make_problem(
    q: Any, k: Any, v: Any, causal: Any, window: Any, mask: Any, score: Any, scale: Any, options: Any,
    return_lse: Any = False, given: Given | None = None, **softmax: Any,
) -> tuple[AttentionProblem, Options]:  # fmt: skip
    """Validate a call. Raises InvalidProblem naming the argument, its value, and what it must be."""
    sink, dropout = softmax_options(**softmax)
    options = DEFAULT if options is None else options
    score = modifiers(score)
    check_arguments(score, scale, options, return_lse)
    check_tensors(q, k, v, given)
    batch, seqlen_q, seqlen_k, lengths = q.shape[0], q.shape[1], k.shape[1], ALIKE
    if given is not None:
        given.check(q)
        batch, lengths = given.batch(q), given.lengths(seqlen_q, seqlen_k)
        seqlen_q, seqlen_k = (
            n if most is None else min(n, most) for n, most in ((seqlen_q, given.max_seqlen_q), (seqlen_k, given.max_seqlen_k))
        )
    where, blocks = (), None
    mask = mask_of_call(mask, q, k, lengths.ragged)
    if not isinstance(mask, Joined):
        band = make_mask(causal, window, mask)
    else:
        predicates = predicates_of(causal, window, mask, batch, q.shape[2])
        predicates.check(q.device)
        where, band, blocks = predicates.where, predicates.band, predicates.mask.spec
        check_ends(where, q.shape[1], k.shape[1], lengths)
    problem = AttentionProblem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=q.shape[2], heads_kv=k.shape[2],
        head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=DTYPES[q.dtype], mask=band,
        score=score_specs(score, q, batch), scale=scale, precision=options.precision,
        deterministic=bool(options.deterministic), returns_lse=return_lse, lengths=lengths, where=where, blocks=blocks,
        sink=sink_spec(sink, q), dropout=_chance(dropout, q),
    )  # fmt: skip
    return problem, options


def softmax_options(sink: Any = None, dropout: Any = None) -> tuple[Any, Any]:
    """(sink, dropout), the rest of what `attention` takes by name; Python refuses a name that is none of them."""
    return sink, dropout


def _rows(q: torch.Tensor, given: Given | None) -> tuple[int, int]:
    """(batch, heads_q): what the first axes of a captured tensor count."""
    return q.shape[0] if given is None else given.batch(q), q.shape[2]


def score_specs(score: Any, q: torch.Tensor, batch: int) -> tuple[ScoreSpec, ...]:
    specs: list[ScoreSpec] = []
    for modifier in score:
        tensors = modifier.tensors(batch, q.shape[2])
        check_modifier(modifier, modifier.scalars(), tensors, q)
        for tensor in tensors:
            _check_resolved(f"{modifier.name}'s tensor", tensor)
        described = tuple(TensorSpec(tuple(t.shape), DTYPE_NAMES[t.dtype], _wants_grad(t)) for t in tensors)
        specs.append(ScoreSpec(type(modifier), tuple(float(plain(s)) for s in modifier.scalars()), described))
    return tuple(specs)


def sink_spec(sink: Any, q: torch.Tensor) -> TensorSpec | None:
    if sink is None:
        return None
    check_sink(sink, q)
    _check_resolved("sink", sink)
    return TensorSpec(tuple(sink.shape), DTYPES[sink.dtype].value, _wants_grad(sink))


def _chance(dropout: Any, q: torch.Tensor) -> float | None:
    if dropout is None:
        return None
    check_dropout(dropout, q.device)
    return dropout.p


def _seed_key(seed: Any) -> Any:
    """What of a seed decides whether it is a good one."""
    return isinstance(seed, int) or (seed.shape, seed.dtype, seed.device)


def _check_resolved(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_neg():  # an operator resolves it
        raise InvalidProblem(f"{name} is a negated view; it must be a tensor of its own.")


def capture(score: Sequence[Score], batch: int, heads_q: int) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Captured tensors of all modifiers, and what of them and of the scalars a prepared call depends on."""
    captured: list[torch.Tensor] = []
    key: list[Any] = []
    for modifier in score:
        tensors = modifier.tensors(batch, heads_q)
        captured += tensors
        described = ((t.shape, _layout(t), t.dtype, t.device, _wants_grad(t), t.is_neg()) for t in tensors)
        key.append((type(modifier), *_exactly(modifier.scalars()), *described))
    return tuple(captured), tuple(key)


def _exactly(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values with their types, as a key: True and 1.0 equal 1, but not every place takes them."""
    return type(values), *values, *map(type, values)


def _wants_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.stride(), tensor.data_ptr() & 15
