"""attention: the public PyTorch function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.errors import NotSupported, check_names
from flashtile.problem.dropout import Dropout
from flashtile.problem.mask import Band, Joined
from flashtile.problem.options import Options
from flashtile.problem.score import Score
from flashtile.problem.statistics import Mass
from flashtile.torch.api.dtensor import attend_watched
from flashtile.torch.api.nested import attend_jagged, is_jagged
from flashtile.torch.api.statistics import attend_with
from flashtile.torch.api.stored import SCALES, attend_stored, is_stored, refuse_statistics
from flashtile.torch.call.arguments import EVERY, Arguments
from flashtile.torch.call.holes import counts, holes
from flashtile.torch.call.lengths import given_lengths
from flashtile.torch.call.sharded import refuse_shards
from flashtile.torch.call.stored import STORED
from flashtile.torch.execute.packing import APART
from flashtile.torch.execute.plain import autocasts
from flashtile.torch.routes.eager import attend, prepare_call
from flashtile.torch.routes.traced import autocast, is_plain, is_traced


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
    returns: Sequence[str | Mass] | str | Mass = (),
    **scales: torch.Tensor | float | None,
) -> Any:
    """softmax(score(scale q k^T) + mask) v, exact, in O(seqlen) memory; differentiable in everything.

    q: (batch, seqlen_q, heads_q, head_dim); k: (batch, seqlen_k, heads_kv, head_dim);
    v: (batch, seqlen_k, heads_kv, head_dim_v); fp16, bf16, fp32 or, on the CPU, fp64, any strides; heads_q a
        multiple of heads_kv.
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
    return_lse: also return the natural log of each row's softmax denominator, float32 (batch, heads_q, seqlen_q); float64
        beside float64.
    options: backend, backward variant, determinism, fp32 precision, fp8 products (`Options`).
    returns: statistics to return beside out: "lse", "max_logit", "entropy", and `Mass(last=64)`, each key's probability.
        `Statistics` says what they are. A mass takes a pass of its own; where kernels run, the forward keeps the others itself.
    scales: k and v may both be of 8 bits: float8_e4m3fn, float8_e5m2 or int8, beside a q of 16. k_scale, v_scale: what a stored
        number is multiplied by, float32 () for all, or a number; (heads_kv,); (batch, heads_kv); or of each token
        (batch, seqlen_k, heads_kv). None is 1. q_scale: likewise, of a q that is float8_e4m3fn, with
        Options(precision="fp8"). What is stored has no gradient; the others have those of 16-bit k and v.

    Returns out (batch, seqlen_q, heads_q, head_dim_v), in q's dtype and memory order, or (out, lse), or with `returns` (out,
    `Statistics`). Under autocast float32 q, k and v become autocast's dtype first, and so does out. A query that sees no key
    gives out 0 and, without a sink, lse -inf. What no query of its item sees, and padding, may hold NaN or Inf: it reaches
    nothing. One at a key that some query sees reaches that query, and may reach others of its item and head from which the
    key is hidden: in v their out and gradients (0 times NaN is NaN), in k their gradients alone.

    Raises InvalidProblem for a request without meaning, NotSupported (with every backend's reason) for one that nothing
    here can run; both before any launch. Tangents (forward mode) and second derivatives are computed too, in O(seqlen)
    memory.

    FlashAttention (arXiv 2205.14135, 2307.08691).
    """
    if scales:
        check_names("attention", scales, SCALES, EVERY)
    may_be_eight = (
        scales or options is not None or getattr(k, "dtype", None) in STORED
    )  # a call of a function in vain takes 1 %
    eight = is_stored(k, options, scales) if may_be_eight else False
    asked = causal, window, mask, score, scale, sink, dropout, return_lse, options, None  # `Arguments`, where they are needed
    if returns != ():
        refuse_statistics(eight)
        q, k, v = autocast(q, k, v) if autocasts() else (q, k, v)
        lengths: dict[str, Any] = {"seqused_q": seqused_q, "seqused_k": seqused_k}
        for name, tensor in lengths.items():
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bool:
                raise NotSupported(f"statistics with {name} of bool", {"torch": ["give lengths, or hide keys by KeyPadding"]})
        attend_alone = lambda arguments: attention(q, k, v, **arguments.named(**lengths))  # noqa: E731
        return attend_with(
            returns, attend_alone, (q, k, v), given_lengths(seqused_q=seqused_q, seqused_k=seqused_k), Arguments(*asked)
        )
    given = None
    if eight:
        return attend_stored((q, k, v), given_lengths(seqused_q=seqused_q, seqused_k=seqused_k), Arguments(*asked), scales)
    if seqused_q is not None or seqused_k is not None:
        moved = holes((q, k, v), seqused_q, seqused_k, mask, score)
        if moved is not None:
            lengths = {"seqused_q": counts(seqused_q), "seqused_k": counts(seqused_k)}
            result = attention(*moved.close(q, k, v), **Arguments(*asked).named(**lengths))
            return moved.open(*result) if return_lse else moved.open(result, None)[0]
        given = given_lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    if not is_plain(q, k, v):
        q, k, v = autocast(q, k, v)
        if is_jagged(q):
            return attend_jagged(q, k, v, given, Arguments(*asked))
        if is_traced(q, k, v):
            return attend_watched(APART, (q, k, v), given, Arguments(*asked))
        refuse_shards()
    call, others = prepare_call(q, k, v, asked, given)
    return attend(call, others, q, k, v)
