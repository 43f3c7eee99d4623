"""Who stands beside us in cached.py's rotation: PyTorch's SDPA, and flashinfer and FlashAttention-4 where they are installed.

They take the pools of a cell. flashinfer, contiguous or in pages of 16 and 64: tensor cores (`fa2`), its kernel without them
(`cores`), its Hopper prefill with one query (`fa3`), and XQA (`xqa`); latents by its MLA wrapper's `fa2` and `fa3`. It plans
before the capture, with the lengths on the host, not padded for a graph whose lengths change: the best that it can do.
FlashAttention-4: contiguous, in pages of 16, and of 128, its key tile. On Hopper it splits no keys. `seqused_k` is told to all.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cached_cells import MODELS, Caches, Call

SDPA = {"sdpa/flash": "FLASH_ATTENTION", "sdpa/cudnn": "CUDNN_ATTENTION"}
GROUPS = ("sdpa", "flashinfer", "fa4")
WORKSPACE_BYTES = 256 << 20
FLASHINFER_PAGES = (0, 16, 64)
XQA_PAGES = (16, 64)
FA4_PAGES = (0, 16, 128)
ROTATED = 64  # of a latent key's columns


@dataclass(frozen=True)
class Peer:
    """What makes a call over every cache, and its table of pages; the context in which it is captured."""

    name: str
    make: Callable[[], tuple[Call, torch.Tensor | None]]
    page: int = 0
    context: Callable[[], Any] = nullcontext


def is_peer(name: str) -> bool:
    """Whether a row is of somebody else's attention."""
    return name.startswith(tuple(f"{group}/" for group in GROUPS))


def peers_of(caches: Caches, groups: tuple[str, ...]) -> Iterator[Peer]:
    """All that there are of these groups for a cell."""
    if "sdpa" in groups and not caches.cell.shared:
        for name in SDPA:
            yield Peer(name, lambda: (caches.sdpa(), None), context=lambda name=name: _allowed(name))
    if "flashinfer" in groups and importlib.util.find_spec("flashinfer"):
        yield from _Flashinfer(caches).peers()
    if "fa4" in groups and importlib.util.find_spec("flash_attn") and not caches.cell.shared:
        for page in (page for page in FA4_PAGES if caches.cell.keys % max(page, 1) == 0):
            yield Peer(f"fa4/{page or 'contiguous'}", lambda page=page: _fa4(caches, page), page)


def _allowed(name: str) -> Any:
    """The context in which SDPA has one kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, SDPA[name]))  # pyright: ignore[reportUnknownVariableType]


def _fa4(caches: Caches, page: int) -> tuple[Call, torch.Tensor | None]:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    cell, number = caches.cell, range(caches.copies)
    how: dict[str, Any] = {"seqused_k": caches.used}
    if cell.window:
        how["window_size"] = (cell.window - 1, 0)
    table = caches.table(page) if page else None
    k, v = ((t.view(-1, page, *t.shape[2:]) if page else t) for t in (caches.k, caches.v))

    def attend(i: int) -> torch.Tensor:
        if table is None:
            made: Any = flash_attn_varlen_func(caches.q[i], k[caches.part(i)], v[caches.part(i)], **how)
        else:
            made = flash_attn_varlen_func(caches.q[i], k, v, page_table=table[i], **how)
        return made[0] if isinstance(made, tuple) else made  # pyright: ignore[reportUnknownVariableType]

    return lambda: tuple(attend(i) for i in number), table


class _Flashinfer:
    """Its calls over a cell's caches, whose pools are cut into as many parts: all have one plan, and one table of pages."""

    def __init__(self, caches: Caches):
        self.caches, self.cell = caches, caches.cell
        self.heads, self.heads_kv, self.dim, self.dim_v = MODELS[caches.cell.model]

    def peers(self) -> Iterator[Peer]:
        for page in FLASHINFER_PAGES:
            for name, begin in self.kernels(page).items():
                size = page or self.cell.keys
                yield Peer(
                    f"flashinfer/{page or 'contiguous'}/{name}",
                    lambda page=page, size=size, begin=begin: self.calls(size, bool(page), begin), size,
                )  # fmt: skip

    def kernels(self, page: int) -> dict[str, Callable[..., Any]]:
        """By its name, what plans over pages of so many keys and returns a function of q and both pools of a cache."""
        if self.cell.shared:
            return {backend: lambda *told, backend=backend: self.latent(backend, *told) for backend in ("fa2", "fa3")}
        made: dict[str, Callable[..., Any]] = {"fa3": lambda *told: self.prefill("fa3", *told)}
        if self.cell.queries > 1:  # where its decoding is causal, every query here sees every key
            return {"fa2": lambda *told: self.prefill("fa2", *told), **made}
        made |= {"fa2": lambda *told: self.decode(True, *told), "cores": lambda *told: self.decode(False, *told)}
        return made | ({"xqa": self.xqa} if page in XQA_PAGES else {})

    def calls(self, page: int, shuffled: bool, begin: Callable[..., Any]) -> tuple[Call, torch.Tensor]:
        """(a call over every cache, the pages of all of them)"""
        caches, cell = self.caches, self.cell
        columns = cell.keys // page
        each = cell.batch * columns
        order = torch.randperm(each, device=caches.device, generator=caches.generator) if shuffled else None
        table = (torch.arange(each, device=caches.device) if order is None else order).int().view(cell.batch, columns)
        run = begin(page, table)
        k, v = (t.view(caches.copies, each, page, *t.shape[2:]) for t in (caches.k, self.values()))

        def every() -> tuple[torch.Tensor, ...]:
            made = (run(caches.q[i].flatten(0, 1), k[i], v[i]) for i in range(caches.copies))
            return tuple(out.view(cell.batch, cell.queries, self.heads, self.dim_v) for out in made)

        return every, table + torch.arange(caches.copies, device=caches.device).view(-1, 1, 1) * each

    def values(self) -> torch.Tensor:
        return self.caches.k if self.cell.shared else self.caches.v

    def rows(self, page: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each item's pages begin, the pages, and how many keys the last one has."""
        counts = torch.tensor(self.cell.counts)
        used = (counts + page - 1) // page
        begin = torch.zeros(len(counts) + 1, dtype=torch.int32)
        begin[1:] = used.cumsum(0)
        kept = torch.arange(table.shape[1]) < used[:, None]
        return begin, table[kept.to(table.device)], (counts - (used - 1) * page).int()

    @property
    def q_rows(self) -> torch.Tensor:
        return torch.arange(self.cell.batch + 1, dtype=torch.int32) * self.cell.queries

    @property
    def workspace(self) -> torch.Tensor:
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.caches.device)

    @property
    def how(self) -> dict[str, Any]:
        return {"window_left": self.cell.window - 1, "q_data_type": self.caches.q.dtype, "kv_data_type": self.caches.k.dtype}

    def decode(self, tensor_cores: bool, page: int, table: torch.Tensor) -> Callable[..., torch.Tensor]:
        import flashinfer  # pyright: ignore[reportMissingImports]

        told: dict[str, Any] = {"backend": "fa2"} if tensor_cores else {}
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=tensor_cores, **told
        )
        wrapper.plan(*self.rows(page, table), self.heads, self.heads_kv, self.dim, page, **self.how)
        return lambda q, k, v: wrapper.run(q, (k, v))

    def prefill(self, backend: str, page: int, table: torch.Tensor) -> Callable[..., torch.Tensor]:
        import flashinfer  # pyright: ignore[reportMissingImports]

        causal = self.cell.window > 0 and self.cell.queries > 1  # a window ends at each query's own key
        wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=backend)
        wrapper.plan(self.q_rows, *self.rows(page, table), self.heads, self.heads_kv, self.dim, page, causal=causal, **self.how)
        return lambda q, k, v: wrapper.run(q, (k, v))

    def xqa(self, page: int, table: torch.Tensor) -> Callable[..., torch.Tensor]:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache  # pyright: ignore

        space, used = self.workspace, self.caches.used.view(torch.uint32)
        scale, window, keys = 1 / math.sqrt(self.dim), self.cell.window - 1, self.cell.keys

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            told: Any = {"bmm1_scale": scale, "window_left": window, "kv_layout": "NHD"}
            return xqa_batch_decode_with_kv_cache(q, (k, v), space, table, used, keys, **told)  # pyright: ignore

        return run

    def latent(self, backend: str, page: int, table: torch.Tensor) -> Callable[..., torch.Tensor]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata  # pyright: ignore

        begin, pages, _ = self.rows(page, table)
        wrapper: Any = BatchMLAPagedAttentionWrapper(self.workspace, backend=backend)
        metadata: Any = MLAPlanMetadata.csr(self.q_rows, begin, pages, self.caches.used)  # pyright: ignore
        wrapper.plan(
            metadata=metadata, num_heads=self.heads, head_dim_ckv=self.dim - ROTATED, head_dim_kpe=ROTATED, page_size=page,
            causal=False, sm_scale=1 / math.sqrt(self.dim), q_data_type=self.caches.q.dtype,
            kv_data_type=self.caches.k.dtype,
        )  # fmt: skip
        return lambda q, k, _: wrapper.run(query=q, kv_cache=k.squeeze(2))
