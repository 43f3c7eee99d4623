"""What the tensors of a cache must be, whoever reads or writes it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.problem.cache import Pages, contiguous
from flashtile.torch.call.lengths import Given
from flashtile.torch.call.stored import STORED, Maybe, Scales, bytes_of, check_kind, check_resolved, is_negated, number_of
from flashtile.torch.execute.bound import DTYPES, check_device
from flashtile.torch.execute.plain import PLAIN, is_compiling, is_traced, transforms
from flashtile.torch.routes.derivatives import is_dual_level, refuse_tangents

LEAST, MOST = -(2**31), 2**31 - 1
CALLED = {"k": "k_cache", "v": "v_cache"}  # what errors of the dense problem call them


def check_pools(q: Any, k_cache: Any, v_cache: Any, packed: bool, name: str = "q") -> None:
    """Raise InvalidProblem unless these are dense tensors of the right ranks, of one dtype, or pools of 8 bits, and device."""
    for called, tensor in ((name, q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_kind(called, tensor)
        rank, meant = 4, "(pages, page_size, heads_kv, head_dim)"
        if called == name:
            rank, meant = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
        if tensor.dim() != rank:
            raise InvalidProblem(f"{called} has shape {tuple(tensor.shape)}; it must be {meant}.")
        check_device(called, tensor.device)
        stores = tensor.dtype in STORED and (called != name or q is k_cache)  # a PagedCache asks without a q
        if tensor.dtype not in DTYPES and not stores:
            bits = "" if called == name else ", or of 8 bits float8_e4m3fn, float8_e5m2 or int8"
            if bits and tensor.dtype is torch.uint8:
                bits += f": {called}.view(torch.float8_e4m3fn), if that is what its bytes hold"
            raise InvalidProblem(f"{called} is {tensor.dtype}; it must be float16, bfloat16, float32 or float64{bits}.")
        if tensor.dtype != q.dtype and not stores:
            raise InvalidProblem(f"{called} is {tensor.dtype} and {name} is {q.dtype}; they must have one dtype.")
        if tensor.device != q.device:
            raise InvalidProblem(f"{called} is on {tensor.device} and {name} is on {q.device}; they must be on one device.")
    if k_cache.dtype != v_cache.dtype:
        raise InvalidProblem(f"v_cache is {v_cache.dtype} and k_cache is {k_cache.dtype}; they must have one dtype.")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise InvalidProblem(
            f"v_cache has shape {tuple(v_cache.shape)} and k_cache {tuple(k_cache.shape)}; they must be equal but for head_dim."
        )
    if 0 in k_cache.shape:
        raise InvalidProblem(f"k_cache has shape {tuple(k_cache.shape)}; it must have pages, rows, heads and columns.")


def check_table(k_cache: torch.Tensor, page_table: Any, batch: int, first: bool) -> Pages:
    """The Pages of a cache; InvalidProblem for a table that is none."""
    count, size = k_cache.shape[:2]
    if page_table is None:
        return contiguous(count, size, batch, first)
    if not isinstance(page_table, torch.Tensor):
        raise InvalidProblem(f"page_table is a {type(page_table).__name__}; it must be a torch.Tensor or None.")
    check_kind("page_table", page_table)
    check_resolved("page_table", page_table)
    if page_table.dtype is not torch.int32:
        raise InvalidProblem(f"page_table is {page_table.dtype}; it must be int32: page_table.int().")
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise InvalidProblem(f"page_table has shape {tuple(page_table.shape)}; it must be (batch, columns), of batch {batch}.")
    if page_table.device != k_cache.device:
        raise InvalidProblem(
            f"page_table is on {page_table.device} and k_cache is on {k_cache.device}; they must be on one device."
        )
    return Pages(count, size, page_table.shape[1], True, first)


def check_out(out: Any, q: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise InvalidProblem for what cannot take the result of a call, and is not None."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise InvalidProblem(f"out is a {type(out).__name__}; it must be a torch.Tensor.")
    shape = (*q.shape[:-1], *v_cache.shape[-1:])
    if out.shape != shape or out.dtype is not q.dtype or out.device != q.device:
        raise InvalidProblem(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; it must be {q.dtype} of shape {shape} on "
            f"{q.device}."
        )
    check_mode("out", out)
    check_written("out", out)
    if out.requires_grad and torch.is_grad_enabled():
        refuse_out()


def refuse_out() -> NoReturn:
    """Raise NotSupported for an out beside gradients."""
    reason = "out is given, and gradients are wanted; leave it out, or call it under torch.no_grad()"
    raise NotSupported("attention_cached", {"flashtile": [reason]})


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidProblem for what is to be written, and has one place for several elements."""
    steps = tensor.stride()
    if 0 in steps and any(n > 1 and not step for n, step in zip(tensor.shape, steps, strict=True)):
        raise InvalidProblem(f"{name} is expanded, with strides {steps}; to be written it must be contiguous().")


def check_mode(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidProblem for a tensor of inference mode that PyTorch is to write outside of it: autograd does not know it."""
    if not is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidProblem(
            f"{name} is an inference tensor, made under torch.inference_mode(); to be written outside it must be a clone()."
        )


def check_modes(k: torch.Tensor, **written: torch.Tensor) -> None:
    """The same for what an append of k writes: launches on a GPU may, for nobody reads of a cache what autograd knows."""
    for name, tensor in written.items() if k.device.type == "cpu" else ():
        check_mode(name, tensor)


def refuse_transforms(what: str, tensors: dict[str, Any]) -> None:
    """Raise NotSupported within torch.func's grad, vmap and the like, and for tangents."""
    if transforms():
        reason = "it has no rule for torch.func's transforms; call it outside of them"
        raise NotSupported(f"{what} within torch.func", {"torch": [reason]})
    if is_dual_level():
        refuse_tangents(what, "autograd", tensors.items())


def int32(name: str, tensor: Any, like: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """A tensor of lengths as kernels read it; InvalidProblem for what is none, or has not `size` elements, one an item."""
    plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not is_negated(tensor)
    if plain and tensor.dtype is torch.int32 and tensor.dim() == 1 and tensor.is_contiguous():
        if tensor.device == like.device and (size is None or tensor.shape[0] == size):
            return tensor  # as it mostly is
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be an int32 tensor.")
    check_kind(name, tensor)
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidProblem(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be int32 of one axis.")
    if tensor.device != like.device:
        raise InvalidProblem(f"{name} is on {tensor.device} and q is on {like.device}; they must be on one device.")
    if size is not None and tensor.shape[0] != size:
        raise InvalidProblem(f"{name} has {tensor.shape[0]} elements and the batch {size} items; it must have {size}.")
    if tensor.dtype is torch.int64:
        if tensor.device.type == "cpu" and not is_traced(tensor) and bool((tensor.clamp(LEAST, MOST) != tensor).any()):
            wide = tensor[tensor.clamp(LEAST, MOST) != tensor]
            raise InvalidProblem(f"{name} holds {int(wide[0])}; it must be int32, from {LEAST} to {MOST}.")
        tensor = tensor.clamp(LEAST, MOST)  # where nobody looks, what is too large stays too large
    tensor = tensor.to(torch.int32).contiguous()
    return tensor.resolve_neg() if is_negated(tensor) else tensor


def check_lengths(
    pages: Pages, used: torch.Tensor, first: torch.Tensor | None, page_table: torch.Tensor | None, called: str = "seqused_k"
) -> None:
    """Raise InvalidProblem for numbers without meaning, asked on the CPU alone, where looking costs nothing."""
    firsts = [0] * len(used) if first is None else first.tolist()
    for i, (begin, end) in enumerate(zip(firsts, used.tolist(), strict=True)):
        if not 0 <= end <= pages.capacity:
            raise InvalidProblem(
                f"{called}[{i}] is {end}; it must be from 0 to {pages.capacity}, the rows of its {pages.columns} pages "
                f"of {pages.page_size}."
            )
        if begin < 0 or (begin > end and end > 0):
            raise InvalidProblem(f"first_k[{i}] is {begin}; it must be from 0 to {called}[{i}], which is {end}.")
        if page_table is not None and begin < end:
            entries = page_table[i, begin // pages.page_size : -(-end // pages.page_size)]
            if bool(((entries < 0) | (entries >= pages.pages)).any()):
                raise InvalidProblem(
                    f"page_table[{i}] names page {int(entries[(entries < 0) | (entries >= pages.pages)][0])} among those "
                    f"of its {end} rows; it must be from 0 to {pages.pages - 1}."
                )


def check_starts(name: str, cu: torch.Tensor, tokens: int) -> None:
    """Raise InvalidProblem for starts of packed items that are none, asked on the CPU alone."""
    try:
        Given({"cu_seqlens_q": cu}).check_values({"q": tokens})
    except InvalidProblem as error:
        raise renamed(error, {"cu_seqlens_q": name}) from None


def gather(
    pools: tuple[torch.Tensor, ...], pages: Pages, page_table: torch.Tensor | None, used: torch.Tensor,
    first: torch.Tensor | None, scales: Scales = (None, None), dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Of every pool (batch, capacity, heads_kv, head_dim), copied: an item's keys side by side, from row 0; zeros behind them.

    Entries of the table that belong to no key are not followed. Pools of 8 bits become `dtype`, times their scales.
    """
    row = torch.arange(pages.capacity, device=used.device)[None] + (0 if first is None else first[:, None])
    exists = row < used[:, None].clamp(max=pages.capacity)
    row = row.expand(exists.shape).where(exists, 0).long()
    item = torch.arange(used.shape[0], device=used.device)[:, None].expand(exists.shape)
    page = item if page_table is None else page_table[item, row // pages.page_size].long()
    page, row = page.where(exists, 0).clamp(0, pages.pages - 1), row % pages.page_size

    def rows_of(pool: torch.Tensor, scale: Maybe) -> torch.Tensor:
        if pool.dtype not in STORED:
            return pool[page, row]
        some = scale if scale is None else scale[page, row] if scale.dim() == 3 else scale[:, None].expand(*page.shape, -1)
        return number_of(bytes_of(pool)[page, row].view(pool.dtype), some, dtype or torch.float32)

    missing = ~exists[:, :, None, None]
    return tuple(rows_of(pool, scale).masked_fill(missing, 0.0) for pool, scale in zip(pools, scales, strict=True))
