"""flashinfer's older wrappers over one prefix that all requests share: dense keys, read once, merged with each one's pages."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from flashtile.compat.flashinfer_states import merge_state

__all__ = ["BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper"]


class _SharedPrefix:
    """What both share. Workspaces are taken and not used."""

    pages: type[BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper]

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"):
        self._pages: Any = self.pages(float_workspace_buffer, kv_layout)  # whose plans differ
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, *buffers: Any) -> None:
        """Nothing: there are none."""

    def end_forward(self) -> None:
        """Nothing: plans are kept."""

    def _merged(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, **how: Any) -> torch.Tensor:
        shared = single_prefill_with_kv_cache(q, k, v, kv_layout=self._kv_layout, return_lse=True, **how)
        return merge_state(*shared, *self._pages.run(q, cache, return_lse=True))[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """One query a request."""

    pages = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self, unique_kv_indptr: torch.Tensor, unique_kv_indices: torch.Tensor, unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, data_type: Any = "float16",
    ) -> None:  # fmt: skip
        """As the paged wrapper's plan has them: the pages that a request alone has."""
        self._pages.plan(unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
                         page_size, data_type=data_type)  # fmt: skip

    def forward(self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Any) -> torch.Tensor:
        """out (requests, heads, head_dim). k_shared, v_shared: (keys, heads, head_dim), or HND."""
        return self._merged(q, k_shared, v_shared, unique_kv_cache)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Any number of queries a request, which stand at the last of its own keys."""

    pages = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
                      paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
                      page_size: int) -> None:  # fmt: skip
        """As the paged wrapper's plan has them: the pages that a request alone has."""
        self._lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                       head_dim, page_size)  # fmt: skip

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Any, causal: bool = False,
        use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """out (tokens, heads, head_dim); causal concerns a request's own keys alone, all of the prefix is seen."""
        self._pages.plan(*self._lists, causal=causal, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
                         q_data_type=q.dtype)  # fmt: skip
        return self._merged(q, k_shared, v_shared, unique_kv_cache, sm_scale=sm_scale)
