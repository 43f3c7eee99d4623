"""flash-attention's attention over a key/value cache: version 2's `flash_attn_with_kvcache`, and what version 3's shares.

Their rules: lengths are those before the append; queries stand at the last keys; with rotary they are turned by their own
positions under causal or a window, else all of them by that of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.compat.asked import Asked, blind_rows_positive, refuse
from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.ops.position import rotary
from flashtile.problem.attention import MAX_HEAD_DIM
from flashtile.problem.number import plain, told
from flashtile.torch.cache.append import append_to_cache, check_pair
from flashtile.torch.cache.attention import attention_cached, check_call
from flashtile.torch.cache.known import lengthened
from flashtile.torch.cache.latent import check_latents
from flashtile.torch.cache.operator import slots_of
from flashtile.torch.cache.tensors import check_pools, int32
from flashtile.torch.call.stored import STORED, check_kind, check_kinds
from flashtile.torch.execute.plain import is_traced

Maybe = torch.Tensor | None


@dataclass
class Cache:
    """A cache as their arguments say it; table: the name of their table of pages."""

    k: torch.Tensor
    v: torch.Tensor
    table: Maybe
    called: str  # the table
    seqlens: Any
    batch_idx: Maybe
    leftpad: Maybe

    def names(self) -> dict[str, str]:
        """Theirs, by ours."""
        made = self.called if self.table is not None else "cache_batch_idx" if self.batch_idx is not None else "k_cache"
        return {"page_table": made, "seqused_k": "cache_seqlens", "first_k": "cache_leftpad", "cu_seqlens": "cu_seqlens_k_new"}

    def lengths(self, batch: int, device: torch.device) -> torch.Tensor:
        """cache_seqlens of every item."""
        columns = 1 if self.table is None else (1, *self.table.shape)[-1]  # whose axes are counted later
        capacity, seqlens = self.k.shape[1] * columns, self.seqlens
        if isinstance(seqlens, torch.Tensor):
            return int32("cache_seqlens", seqlens, self.k, batch)
        seqlens = capacity if seqlens is None else plain(seqlens)
        if isinstance(seqlens, bool) or not isinstance(seqlens, int) or not 0 <= seqlens <= capacity:
            raise InvalidProblem(
                f"cache_seqlens is {told(seqlens)}; it must be an int from 0 to {capacity}, an int32 tensor (batch,), or None."
            )
        return torch.full((batch,), seqlens, dtype=torch.int32, device=device)

    def pages(self, batch: int) -> Maybe:
        """The table of pages that our functions read."""
        if self.table is not None:
            check_kind(self.called, self.table)
        if self.batch_idx is None:
            if self.table is None and self.k.shape[0] < batch:
                raise InvalidProblem(f"k_cache has {self.k.shape[0]} items and the batch {batch}; it must have as many.")
            if self.table is not None or self.k.shape[0] == batch:
                return self.table
            return torch.arange(batch, dtype=torch.int32, device=self.k.device)[:, None]
        rows = int32("cache_batch_idx", self.batch_idx, self.k, batch)
        most = (self.k if self.table is None else self.table).shape[0]
        if rows.device.type == "cpu" and not is_traced(rows) and bool(((rows < 0) | (rows >= most)).any()):
            raise InvalidProblem(
                f"cache_batch_idx holds {int(rows[(rows < 0) | (rows >= most)][0])}; it must be from 0 to {most - 1}."
            )
        return rows[:, None] if self.table is None else self.table[rows.clamp(0, most - 1).long()]


@dataclass
class Fresh:
    """New keys and values, and the tables that rotate them and the queries."""

    k: Maybe
    v: Maybe
    cos: Maybe
    sin: Maybe
    interleaved: bool
    cu_seqlens: Maybe = None
    seqlens: Maybe = None  # in whose place positions count from cache_seqlens

    def check(self, seqlens: Any) -> None:
        """Raise InvalidProblem for half of what belongs together."""
        if (self.k is None) != (self.v is None):
            raise InvalidProblem("one of k and v is None; both or neither must be given.")
        if self.k is not None and seqlens is None:
            raise InvalidProblem("k is given and cache_seqlens is None; it must say behind how many rows k is written.")
        if self.cos is not None and self.k is None:
            raise InvalidProblem("rotary_cos is given without k; it must be rotated beside k, or by flashtile.ops.rotary.")
        if (self.cos is None) != (self.sin is None):
            raise InvalidProblem("one of rotary_cos and rotary_sin is None; both or neither must be given.")

    def goes_along(self, q: torch.Tensor, cache: Cache, moves: bool) -> bool:
        """Whether `attention_cached` can write them itself: of as many items as q, rotated as it is, without gradients."""
        k, v = self.k, self.v
        if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)) or self.cu_seqlens is not None:
            return False
        if any(t.dim() != 4 for t in (k, cache.k, cache.v)) or k.dtype is not q.dtype:
            return False
        if k.shape[0] != q.shape[0] or self.seqlens is not None:
            return False
        if self.cos is not None and (k.shape[1] != q.shape[1] or not (moves or q.shape[1] == 1)):
            return False
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, cache.k, cache.v))
        return not learns and max(cache.k.shape[3], cache.v.shape[3]) <= MAX_HEAD_DIM

    def widened(self) -> Fresh:
        """Numbers of 8 bits as bfloat16, exactly: they are rotated so, and stored in 8 bits again."""
        wide = {name: getattr(self, name) for name in ("k", "v", "cos", "sin")}
        return replace(self, **{name: t.to(torch.bfloat16) for name, t in wide.items() if t is not None})

    def turned(self, tensor: torch.Tensor, starts: torch.Tensor, cu: Maybe, moves: bool) -> torch.Tensor:
        """The tensor rotated, item i's tokens by starts[i] and on, or where they do not move by starts[i]."""
        assert self.cos is not None
        assert self.sin is not None
        step = torch.arange(tensor.shape[-3] if cu is None else tensor.shape[0], dtype=torch.int32, device=tensor.device)
        if cu is None:
            positions = starts[:, None] + step * int(moves)
            return rotary(tensor, None, self.cos, self.sin, interleaved=self.interleaved, positions=positions)
        item = torch.searchsorted(cu[1:].contiguous(), step, right=True).clamp(max=max(starts.shape[0] - 1, 0))
        positions = torch.where(step < cu[-1], starts[item] + (step - cu[item]) * int(moves), 0)[None]
        return rotary(tensor[None], None, self.cos, self.sin, interleaved=self.interleaved, positions=positions)[0]


class saying:  # noqa: N801
    """Errors say their names of arguments. A class, for a generator takes four times as long at every call."""

    def __init__(self, names: dict[str, str]):
        self.names = names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InvalidProblem):
            raise InvalidProblem(str(renamed(error, self.names)).replace("append's ", "")) from None


@dataclass
class Descales:
    """What stored numbers of 8 bits are to be multiplied by: float32 (batch, heads_kv), or what broadcasts to it."""

    q: Maybe = None
    k: Maybe = None
    v: Maybe = None

    def widened(self, q: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        """q, of 8 bits as bfloat16, exactly; what it is multiplied by, keys are instead."""
        if q.dtype not in STORED:
            if self.q is not None:
                raise InvalidProblem(f"q_descale is given and q is {q.dtype}; it belongs to queries of 8 bits.")
            return q
        if q.dtype != k_cache.dtype:
            raise InvalidProblem(f"q is {q.dtype} and k_cache {k_cache.dtype}; of 8 bits both must have one dtype.")
        if self.q is not None:
            self.k = self.q if self.k is None else self.k * self.q
        return q.to(torch.bfloat16)


def attend(
    q: torch.Tensor, cache: Cache, fresh: Fresh, asked: Asked, num_splits: Any, return_lse: Any, cu_q: Maybe = None,
    descales: Descales | None = None, qv: Maybe = None,
) -> Any:  # fmt: skip
    """out, or (out, lse), after the append. New rows of 8 bits are stored as they are, others over their descale.

    qv: queries that are multiplied with the values, beside q with the keys: absorbed latent attention.
    """
    fresh.check(cache.seqlens)
    descales = Descales() if descales is None else descales
    with saying({**cache.names(), "k_scale": "k_descale", "v_scale": "v_descale"}):
        check_kinds(q=q, **({} if fresh.k is None else {"k": fresh.k, "v": fresh.v}))
        stored: dict[str, Any] = dict(k_scale=descales.k, v_scale=descales.v)
        wide = q.dtype in STORED
        if wide:
            refuse("flash_attn_with_kvcache", {f"qv is given and q is {q.dtype}; give both in 16 bits": qv is not None})
            fresh = fresh.widened()
            stored = {}
        q = descales.widened(q, cache.k)
        whole = all(isinstance(t, torch.Tensor) and t.dim() >= 3 for t in (q, cache.k, cache.v))
        how = asked.arguments()
        moves = bool(asked.causal) or how["window"] is not None
        along = fresh.k is not None and whole and cu_q is None and qv is None and not wide and fresh.goes_along(q, cache, moves)
        if (fresh.k is not None and not along) or not whole:  # before anything is written; else `attention_cached` does
            if qv is None:
                check_pools(q, cache.k, cache.v, cu_q is not None)
            else:
                check_latents(q, qv, cache.k, cache.v, cu_q is not None)
        cu = None if cu_q is None else int32("cu_seqlens_q", cu_q, q)
        batch = q.shape[0] if cu is None else cu.shape[0] - 1
        table, seqlens = cache.pages(batch), cache.lengths(batch, q.device)
        del how["dropout"]
        how |= dict(cu_seqlens_q=cu, first_k=cache.leftpad, return_lse=bool(return_lse))
        how |= dict(k_scale=descales.k, v_scale=descales.v)
        how["split"] = 0 if num_splits == 1 else None  # of others it is the library's, which changes no bits with the batch
        if along:
            rotary = None if fresh.cos is None else (fresh.cos, fresh.sin, fresh.interleaved)
            how |= {"append": (fresh.k, fresh.v), "rotary": rotary}
        elif fresh.k is not None and fresh.v is not None:
            fresh_cu = None if fresh.cu_seqlens is None else int32("cu_seqlens_k_new", fresh.cu_seqlens, q, batch + 1)
            check_pair((fresh.k, fresh.v), cache.k, cache.v, fresh_cu is not None)
            k, turn = fresh.k, None
            if fresh.cos is not None:
                turn = None if fresh.seqlens is not None else (fresh.cos, fresh.sin, fresh.interleaved)
                starts = seqlens if fresh.seqlens is None else int32("rotary_seqlens", fresh.seqlens, q, batch)
                if fresh.seqlens is not None:
                    k = fresh.turned(k, starts, fresh_cu, True)
                q = fresh.turned(q, starts, cu, moves)
            if not is_traced(q, cache.k) and q.device.type == "cpu":
                slots_of(k, cache.k, table, seqlens, fresh_cu)
            after = lengthened(seqlens, k, fresh_cu)
            check_call(q, cache.k, cache.v, table, seqused_k=after, qv=qv, **how)  # nothing is written for who fails
            append_to_cache(k, fresh.v, cache.k, cache.v, table, seqused_k=seqlens, cu_seqlens=fresh_cu, rotary=turn, **stored)
            seqlens = after
        return attention_cached(q, cache.k, cache.v, table, seqused_k=seqlens, qv=qv, **how)


def attend_packed(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], starts: tuple[Any, Any], table: Any, asked: Asked, called: str,
    used: Maybe = None, sink: Maybe = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of packed queries over keys in pages: items have `used` keys, or else those of cu_seqlens_k."""
    if asked.dropout_p:
        reason = f"dropout_p is {asked.dropout_p}; attention over pages has no dropout"
        raise NotSupported("flash_attn_varlen_func", {"flashtile": [reason]})
    how = asked.arguments()
    del how["dropout"]
    with saying({"page_table": called, "seqused_k": "seqused_k" if used is not None else "cu_seqlens_k"}):
        if used is None:
            ends = int32("cu_seqlens_k", starts[1], tensors[0])
            used = ends[1:] - ends[:-1]
        return attention_cached(*tensors, table, seqused_k=used, cu_seqlens_q=starts[0], sink=sink, return_lse=True, **how)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse). k, v are written into the cache behind cache_seqlens rows, in place; the caller advances those.

    Pages of any size. num_splits: 1 for one pass; other numbers leave the split to `attention_cached`, whose bits they do not
    change. lse is +inf where a query sees no key.
    """
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise InvalidProblem("cache_batch_idx or cache_leftpad is given beside block_table; it must be None there.")
    cache = Cache(k_cache, v_cache, block_table, "block_table", cache_seqlens, cache_batch_idx, cache_leftpad)
    fresh = Fresh(k, v, rotary_cos, rotary_sin, rotary_interleaved)
    asked = Asked(softmax_scale, causal, window_size, softcap, alibi_slopes)
    made = attend(q, cache, fresh, asked, num_splits, return_softmax_lse)
    return (made[0], blind_rows_positive(made[1])) if return_softmax_lse else made
