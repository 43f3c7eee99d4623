"""PagedCache: the tensors of a cache as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.cache import CachedProblem
from flashtile.torch.cache.append import append_to_cache
from flashtile.torch.cache.attention import attention_cached, problem_of
from flashtile.torch.cache.tensors import check_lengths, check_pools, check_table, gather, int32
from flashtile.torch.call.stored import Scales, check_scales, is_shared
from flashtile.torch.execute.bound import DTYPES
from flashtile.torch.execute.plain import is_compiling, is_traced


@dataclass(frozen=True, eq=False)
class PagedCache:
    """A key/value cache: pools, a table of pages, lengths. Who owns which page is the caller's business.

    k, v: (pages, page_size, heads_kv, head_dim); page_table: int32 (batch, columns), None for item i in page i;
    seqused: int32 (batch,), rows of each item; first_k: int32 (batch,) or None, and k_scale, v_scale, of a cache of 8 bits, as
    `attention_cached` has them. It can be copied, pickled and saved (torch.load wants
    `torch.serialization.safe_globals([flashtile.PagedCache])`).
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor | None
    seqused: torch.Tensor
    first_k: torch.Tensor | None = None
    k_scale: Any = None
    v_scale: Any = None

    def __post_init__(self) -> None:
        check_pools(self.k, self.k, self.v, False, "k")
        columns = getattr(self.page_table, "shape", ())
        batch = columns[0] if columns else self.k.shape[0]  # what is no table is told next
        check_table(self.k, self.page_table, batch, False)
        int32("seqused", self.seqused, self.k, batch)
        if self.first_k is not None:
            int32("first_k", self.first_k, self.k, batch)
        self._scales(batch)

    def __getstate__(self) -> dict[str, Any]:
        """What copies, pickles and files hold: a tensor that is another's memory is not held twice, and stays that."""
        state = dict(self.__dict__)
        if is_shared(self.k, self.v):
            state["v"] = self.v.shape[3]
        if self.k_scale is not None and self.v_scale is self.k_scale:
            state["v_scale"] = "k_scale"
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if isinstance(state["v"], int):
            state["v"] = state["k"][..., : state["v"]]
        if isinstance(state["v_scale"], str):
            state["v_scale"] = state["k_scale"]
        self.__dict__.update(state)

    def _scales(self, batch: int) -> Scales:
        return check_scales(self.k_scale, self.v_scale, self.k, self.v, batch)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, rotary: Any = None,
        backend: str | None = None,
    ) -> PagedCache:  # fmt: skip
        """The cache with k, v behind each item's rows: the pools are written in place, the lengths are new.

        rotary rotates k; its tables must have a row for each new key (`append_to_cache`).
        """
        append_to_cache(
            k, v, self.k, self.v, self.page_table, seqused_k=self.seqused, cu_seqlens=cu_seqlens, rotary=rotary,
            k_scale=self.k_scale, v_scale=self.v_scale, backend=backend,
        )  # fmt: skip
        added = k.shape[1] if cu_seqlens is None else (cu_seqlens[1:] - cu_seqlens[:-1]).to(self.seqused.dtype)
        if is_compiling():  # PyTorch 2.11 does not follow what is below
            return replace(self, seqused=self.seqused + added)
        made = object.__new__(type(self))  # `replace` would look at all tensors again, which takes as long as the append
        made.__dict__.update(self.__dict__, seqused=self.seqused + added)
        return made

    def attention(self, q: torch.Tensor, **arguments: Any) -> Any:
        """`attention_cached` of q over it; arguments: those that say nothing of the cache. append=(k, v) leaves `seqused`."""
        return attention_cached(
            q, self.k, self.v, self.page_table, seqused_k=self.seqused, first_k=self.first_k, k_scale=self.k_scale,
            v_scale=self.v_scale, **arguments,
        )  # fmt: skip

    def problem(self, q: torch.Tensor, **arguments: Any) -> CachedProblem:
        """The problem of `attention` with these arguments, those of appending and shared_prefix left out: `explain` has it."""
        return problem_of(
            q, self.k, self.v, self.page_table, seqused_k=self.seqused, first_k=self.first_k, k_scale=self.k_scale,
            v_scale=self.v_scale, **arguments,
        )  # fmt: skip

    def dense(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) copied side by side, (batch, columns * page_size, heads_kv, head_dim), an item's first key in row 0.

        Rows that are no keys are 0; entries of the table that belong to none are not followed. To attend to them say
        seqused_k=cache.seqused, or, where there is a first_k, cache.seqused - cache.first_k. Lengths and pages that point out
        of the pools raise InvalidProblem on the CPU; on a GPU they are clamped into them. A cache of 8 bits becomes `dtype`,
        float32 if None, times its scales.
        """
        if dtype is not None and dtype not in DTYPES:
            raise InvalidProblem(f"dtype is {dtype!r}; it must be torch.float16, bfloat16, float32, float64 or None.")
        batch = self.seqused.shape[0]
        pages = check_table(self.k, self.page_table, batch, self.first_k is not None)
        used = int32("seqused", self.seqused, self.k)
        first = None if self.first_k is None else int32("first_k", self.first_k, self.k)
        if self.k.device.type == "cpu" and not is_traced(self.k, used):
            check_lengths(pages, used, first, self.page_table, "seqused")
        k, v = gather((self.k, self.v), pages, self.page_table, used, first, self._scales(batch), dtype)
        return k, v
