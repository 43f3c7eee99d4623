"""Stand-ins of flashinfer and FlashAttention-4 for `benchmarks/cached_peers.py`: attention of what they are told."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from benchmarks.cached_cells import formula


def rows(pool: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first keys of an item in pages."""
    return pool[pages.long()].flatten(0, 1)[:count]


class Paged:
    """A wrapper of flashinfer's: lists of pages one behind another; `first` is how many arguments stand before them."""

    first, names = 0, ("cores", "fa2")

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False, backend: str = "cores"):
        assert not workspace.any()
        assert layout == "NHD"
        assert backend in self.names
        assert use_tensor_cores == (backend == "fa2" and not self.first)

    def plan(self, *told: Any, window_left: int, q_data_type: Any, kv_data_type: Any, causal: bool = False) -> None:
        begin, self.pages, self.last = told[self.first : self.first + 3]
        self.begin, self.page, self.window = begin.tolist(), told[-1], window_left + 1
        self.causal = causal
        assert q_data_type == kv_data_type == torch.bfloat16

    def run(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        made = list[torch.Tensor]()
        assert self.causal == (self.window > 0 and len(q) > len(self.last))
        for item, part in enumerate(q.unflatten(0, (len(self.last), -1))):
            pages = self.pages[self.begin[item] : self.begin[item + 1]]
            count = (len(pages) - 1) * self.page + int(self.last[item])
            k, v = (rows(pool, pages, count) for pool in pools)
            assert k.shape[0] == count
            made.append(formula(part, k, v, self.window))
        return torch.cat(made).to(q.dtype)


class Prefill(Paged):
    first, names = 1, ("fa2", "fa3")


class Latent:
    def __init__(self, workspace: torch.Tensor, backend: str):
        assert backend in ("fa2", "fa3")
        assert not workspace.any()

    def plan(self, *, metadata: Any, page_size: int, sm_scale: float, head_dim_ckv: int, head_dim_kpe: int, **_: Any) -> None:
        (_, begin, self.pages, self.used), self.wide = metadata, head_dim_ckv
        self.begin, self.page = begin.tolist(), page_size
        assert abs(sm_scale * (head_dim_ckv + head_dim_kpe) ** 0.5 - 1) < 1e-6

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        made = list[torch.Tensor]()
        for item, part in enumerate(query.unflatten(0, (len(self.used), -1))):
            pages = self.pages[self.begin[item] : self.begin[item + 1]]
            k = rows(kv_cache[:, :, None], pages, int(self.used[item]))
            made.append(formula(part, k, k[..., : self.wide]))
        return torch.cat(made).to(query.dtype)


def by_table(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, used: torch.Tensor, window: int) -> torch.Tensor:
    made = list[torch.Tensor]()
    for item, count in enumerate(used.tolist()):
        keys, values = (pool[item][:count] if table is None else rows(pool, table[item], count) for pool in (k, v))
        made.append(formula(q[item], keys, values, window))
    return torch.stack(made).to(q.dtype)


def xqa(
    q: torch.Tensor, pools: Any, space: torch.Tensor, table: torch.Tensor, used: torch.Tensor, keys: int, *,
    bmm1_scale: float, window_left: int, kv_layout: str,
) -> torch.Tensor:  # fmt: skip
    assert used.dtype == torch.uint32
    assert int(used.view(torch.int32).max()) <= keys == table.shape[1] * pools[0].shape[1]
    assert abs(bmm1_scale * q.shape[-1] ** 0.5 - 1) < 1e-6
    assert kv_layout == "NHD"
    k, v = pools
    return by_table(q[:, None], k, v, table, used.view(torch.int32), window_left + 1)[:, 0]


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seqused_k: torch.Tensor, page_table: Any = None,
    window_size: tuple[int | None, int | None] = (None, None),
) -> torch.Tensor:  # fmt: skip
    left, right = window_size
    assert right == (None if left is None else 0)
    return by_table(q, k, v, page_table, seqused_k, 0 if left is None else left + 1)


def install(patch: Any) -> None:
    """For as long as pytest's monkeypatch stands."""
    modules = {
        "flashinfer": dict(BatchDecodeWithPagedKVCacheWrapper=Paged, BatchPrefillWithPagedKVCacheWrapper=Prefill),
        "flashinfer.decode": dict(xqa_batch_decode_with_kv_cache=xqa),
        "flashinfer.mla": dict(
            BatchMLAPagedAttentionWrapper=Latent, MLAPlanMetadata=type("M", (), {"csr": staticmethod(lambda *told: told)})
        ),
        "flash_attn": {}, "flash_attn.cute": dict(flash_attn_varlen_func=varlen),
    }  # fmt: skip
    for name, what in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(what)
        patch.setitem(sys.modules, name, module)
