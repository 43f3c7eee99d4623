"""flashinfer's pages: a list of page numbers for all requests, where each one's begin, and how full its last page is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashtile.errors import InvalidProblem, renamed
from flashtile.problem.cache import LONGEST_PART, SPLIT_STEP
from flashtile.problem.number import plain, told
from flashtile.torch.cache.append import append_to_cache
from flashtile.torch.cache.operator import repeated
from flashtile.torch.cache.tensors import check_starts, int32
from flashtile.torch.call.stored import check_kinds
from flashtile.torch.execute.plain import is_traced

LAYOUTS = ("NHD", "HND")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What our arguments are called there.
CALLED = {
    "page_table": "indices", "seqused_k": "last_page_len", "cu_seqlens_q": "qo_indptr", "k_cache": "paged_kv_cache",
    "split": "fixed_split_size in keys",
}  # fmt: skip


def check_layout(kv_layout: Any) -> str:
    if kv_layout not in LAYOUTS:
        raise InvalidProblem(f"kv_layout is {kv_layout!r}; it must be NHD or HND.")
    return kv_layout


def pools_of(paged_kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v), (pages, page_size, heads, head_dim) each, as views: of a pair, or of one tensor (pages, 2, ...)."""
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
            raise InvalidProblem(
                f"paged_kv_cache has shape {tuple(paged_kv_cache.shape)}; it must be (pages, 2, page_size, heads, head_dim), "
                "or a pair of tensors."
            )
        paged_kv_cache = (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise InvalidProblem(f"paged_kv_cache is a {type(paged_kv_cache).__name__}; it must be a tensor or a pair of them.")
    k, v = paged_kv_cache
    for name, pool in (("k", k), ("v", v)):
        if not isinstance(pool, torch.Tensor) or pool.dim() != 4:
            raise InvalidProblem(f"paged_kv_cache's {name} is no tensor of four axes; it must be one, as kv_layout says.")
    return (k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v)


@dataclass
class Tables:
    """What kernels read of the pages: table int32 (requests, columns), -1 behind a request's last page; used int32."""

    table: torch.Tensor
    used: torch.Tensor

    @classmethod
    def of(cls, indptr: Any, indices: Any, last: Any, page_size: int, columns: int | None, device: torch.device) -> Tables:
        """On the device. columns: a bound of pages; None for the longest request's, which the host waits for."""
        given = indptr
        indptr, indices, last = (ints(n, t, device) for n, t in (("indptr", indptr), ("indices", indices), ("last", last)))
        if given.device.type == "cpu" and given.shape[0]:
            check_starts("indptr", given, indices.shape[0])
        requests = indptr.shape[0] - 1
        if requests < 0 or last.shape[0] != requests:
            raise InvalidProblem(
                f"indptr has {requests + 1} elements and last_page_len {last.shape[0]}; it must have one more."
            )
        table, count = table_of(indptr, indices, columns)
        return cls(table, torch.where(count > 0, (count - 1) * page_size + last, 0))

    def copy_(self, other: Tables) -> Tables:
        """These tensors, with the other's numbers: what a captured graph reads."""
        if other.table.shape != self.table.shape:
            raise InvalidProblem(
                f"plan has {other.table.shape[0]} requests of up to {other.table.shape[1]} pages and the captured graph "
                f"{tuple(self.table.shape)}; a wrapper with use_cuda_graph=True keeps its batch size."
            )
        self.table.copy_(other.table)
        self.used.copy_(other.used)
        return self


def table_of(indptr: torch.Tensor, indices: torch.Tensor, columns: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(table int32 (requests, columns), -1 behind a request's last page; how many pages each request has).

    Of a list of pages and where each request's begin. columns: None for the longest request's, which the host waits for.
    """
    count = indptr[1:] - indptr[:-1]
    if columns is None:
        columns = max(int(count.max()), 1) if count.shape[0] else 1
    column = torch.arange(columns, dtype=torch.int32, device=indptr.device)
    place = (indptr[:-1, None] + column).clamp(0, max(indices.shape[0] - 1, 0)).long()
    pages = indices[place] if indices.shape[0] else torch.full_like(place, -1, dtype=torch.int32)
    return pages.where(column < count[:, None], -1), count


def ints(name: str, tensor: Any, device: torch.device | None = None) -> torch.Tensor:
    """int32 of one axis; with a device there, copied, for a plan: callers write over theirs between plans."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidProblem(f"{name} is no int32 tensor of one axis; it must be one.")
    if device is None:
        return tensor.to(torch.int32)
    return tensor.to(device, torch.int32, non_blocking=True, copy=True)


def whole(name: str, given: Any, least: int = 1) -> int:
    """A number of something; InvalidProblem for what is none."""
    number = plain(given)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidProblem(f"{name} is {told(given)}; it must be an int of at least {least}.")
    return number


def keys_of(name: str, pages: Any, page_size: int) -> int | None:
    """Keys of a part of so many pages, rounded up to what `attention_cached` splits by, or the most that it takes, which no
    request has; None for None and -1.
    """
    count = plain(pages)
    if count is None or count == -1:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidProblem(f"{name} is {told(pages)}; it must be an int of at least 1, the pages of a part, or None.")
    return min(-(-count * page_size // SPLIT_STEP) * SPLIT_STEP, LONGEST_PART)


def dtype_of(name: str, asked: Any) -> torch.dtype | None:
    """A dtype that a plan says, by name or as torch's."""
    made = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if asked is not None and not isinstance(made, torch.dtype):
        raise InvalidProblem(f"{name} is {asked!r}; it must be a torch.dtype or the name of one.")
    return made


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 (requests,): the keys of each."""
    starts, last = ints("kv_indptr", kv_indptr), ints("kv_last_page_len", kv_last_page_len)
    count = starts[1:] - starts[:-1]
    return torch.where(count > 0, (count - 1) * whole("page_size", page_size) + last, 0)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, position) of each of nnz new tokens, int32; seq_lens count them; -1 for tokens behind the last request's.

    batch_indices, positions: tensors to write them to.
    """
    starts, seq_lens = ints("append_indptr", append_indptr), ints("seq_lens", seq_lens)
    if starts.shape[0] < 2:  # of no request: one that has no token
        starts, seq_lens = starts.new_zeros(2), seq_lens.new_zeros(1)
    last = starts.shape[0] - 2
    index = torch.arange(whole("nnz", nnz, 0), dtype=torch.int32, device=starts.device)
    item = torch.searchsorted(starts[1:].contiguous(), index, right=True).clamp(max=last)
    exists = index < starts[-1]
    position = seq_lens[item] - (starts[1:] - starts[:-1])[item] + index - starts[item]
    made = tuple(torch.where(exists, t, -1).int() for t in (item, position))
    return tuple(m if t is None else t.copy_(m) for m, t in zip(made, (batch_indices, positions), strict=True))  # pyright: ignore[reportReturnType]


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: Any, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write keys and values (tokens, heads, head_dim) into the pages of their requests, in place; nobody waits for the device.

    A cache of fp8 takes new ones of its own dtype, as flashinfer does, or of 16 and 32 bits, which are rounded.
    batch_indices, positions: of each token; one that is negative goes nowhere. The lists of pages have room for the tokens:
    where one has not, a token raises InvalidProblem on the CPU, and goes nowhere on a GPU. So do two tokens of one place, of
    which on a GPU either stays.
    """
    k, v = pools_of(paged_kv_cache, check_layout(kv_layout))
    check_kinds(append_key=append_key, append_value=append_value)
    item, position = int32("batch_indices", batch_indices, append_key), int32("positions", positions, append_key)
    indptr, indices = int32("kv_indptr", kv_indptr, append_key), int32("kv_indices", kv_indices, append_key)
    for name, tensor in (("batch_indices", item), ("positions", position)):
        if tensor.shape[0] != append_key.shape[0]:
            raise InvalidProblem(f"{name} has {tensor.shape[0]} elements and append_key {append_key.shape[0]} tokens.")
    size, requests = k.shape[1], indptr.shape[0] - 1
    if requests < 1:  # one without a page
        indptr = indptr.new_zeros(2)
    safe = item.clamp(0, max(requests - 1, 0)).long()
    place = indptr[safe] + position.clamp(min=0) // size
    exists = (item >= 0) & (position >= 0) & (item < requests) & (place < indptr[safe + 1])
    lost = (item >= 0) & (position >= 0) & ~exists
    looks = item.device.type == "cpu" and not is_traced(append_key, item, position, k)
    if looks and bool(lost.any()):
        raise InvalidProblem(
            f"positions holds {int(position[lost][0])} of request {int(item[lost][0])}, which kv_indptr has no page for; each "
            "request must have pages for its new keys."
        )
    indices = indices if indices.shape[0] else indices.new_zeros(1)  # which no token takes
    page = indices[place.clamp(0, indices.shape[0] - 1).long()].long()
    outside = exists & ((page < 0) | (page >= k.shape[0]))
    if looks and bool(outside.any()):
        raise InvalidProblem(f"kv_indices holds page {int(page[outside][0])}; it must be from 0 to {k.shape[0] - 1}.")
    slots = torch.where(exists & ~outside, page * size + position % size, -1)
    if looks and (two := repeated(slots)) is not None:
        one, other = (f"{int(position[t])} of request {int(item[t])}" for t in two)
        raise InvalidProblem(
            f"positions holds {one} and {other}, which are one place, page {int(page[two[0]])}, row "
            f"{int(position[two[0]]) % size}; each token must have its own: copy a page of kv_indices that requests share "
            "before they write into it."
        )
    if append_key.dtype in FLOAT8 and append_key.dtype is append_value.dtype is k.dtype:
        append_key, append_value = append_key.to(torch.bfloat16), append_value.to(torch.bfloat16)  # finite ones exactly
    try:
        append_to_cache(append_key, append_value, k, v, slots=slots)
    except InvalidProblem as error:
        raise renamed(error, CALLED | {"k": "append_key", "v": "append_value", "v_cache": "paged_kv_cache"}) from None
