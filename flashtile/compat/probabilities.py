"""S_dmask: the probabilities that flash-attention 2 returns for tests, in plain PyTorch and quadratic memory."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from flashtile.compat.asked import Asked, window_of
from flashtile.problem.dropout import keep
from flashtile.problem.predicate import normal_form
from flashtile.reference.attention import holds, positions, visible


def dropout_signs(
    q: torch.Tensor, k: torch.Tensor, asked: Asked, rng_state: torch.Tensor, cu_seqlens: Any = None, longest: Any = None
) -> torch.Tensor:
    """exp(score - the row's largest), negative where dropout drops it; (batch, heads, seqlen_q, seqlen_k) rounded up to 128.

    q, k: (batch, seqlen, heads, head_dim), or with cu_seqlens, a pair of (batch + 1,), (total, heads, head_dim), and then
    `longest` is (max_seqlen_q, max_seqlen_k). 0 where nothing is visible. Waits for the device.
    """
    with torch.no_grad():
        if cu_seqlens is None:
            items = list(zip(q.unbind(0), k.unbind(0), strict=True))
            longest = (q.shape[1], k.shape[1])
        else:
            ends = [c.tolist() for c in cu_seqlens]
            spans = [[slice(a, b) for a, b in pairwise(e)] for e in ends]
            items = [(q[a], k[b]) for a, b in zip(*spans, strict=True)]
        rounded = tuple(-(-n // 128) * 128 for n in longest)
        made = q.new_zeros((len(items), q.shape[-2], *rounded))
        for i, (some_q, some_k) in enumerate(items):
            values = _item(some_q, some_k, asked, rng_state, (i, len(items)))
            made[i, :, : values.shape[1], : values.shape[2]] = values
        return made


def _item(q: torch.Tensor, k: torch.Tensor, asked: Asked, rng_state: torch.Tensor, item: tuple[int, int]) -> torch.Tensor:
    (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[:2]
    if not seqlen_k:
        return q.new_zeros((heads_q, seqlen_q, 0))
    scale = 1.0 / math.sqrt(head_dim) if asked.softmax_scale is None else asked.softmax_scale
    wide_q, wide_k = q.float().transpose(0, 1), k.float().transpose(0, 1).repeat_interleave(heads_q // heads_kv, 0)
    scores = (wide_q @ wide_k.mT * scale)[None]
    at = positions(1, heads_q, seqlen_q, seqlen_k, q.device)
    at = at._replace(batch=at.batch + item[0])
    for modifier in asked.score:
        scores = type(modifier).apply(scores, at, modifier.scalars(), modifier.tensors(item[1], heads_q))
    band, terms = normal_form(asked.causal, window_of(asked.window_size), asked.mask)
    seen = visible(band, seqlen_q, seqlen_k, q.device) & holds(terms, at, (item[1], heads_q))
    scores = scores.masked_fill(~seen, -math.inf)
    powers = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(~seen, 0.0)
    kept = keep(asked.dropout_p, at.batch, at.head, at.row, at.k, heads_q, rng_state)
    return torch.where(kept, powers, -powers)[0].to(q.dtype)
