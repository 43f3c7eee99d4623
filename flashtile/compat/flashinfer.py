"""flashinfer 0.7.4: its functions and wrappers, `plan` and then `run`, by flashtile alone.

Its rules: lse is a logarithm of base 2, (tokens, heads); queries stand at the last keys; `window_left` is inclusive, -1 for
none; lengths are those after an append. Pages, bits and errors are ours: a plan may be made on the host, a run waits for
nobody. Of its batch a request's bits know the longest request alone, by which decoding splits keys; with `fixed_split_size`,
`disable_split_kv` or a graph's table not even that. Workspaces and backends are not used.
"""

from __future__ import annotations

from copy import copy
from functools import partialmethod
from typing import Any

import torch

from flashtile.compat.asked import refuse
from flashtile.compat.flashinfer_asked import How, check_dtype, check_numbers, is_given, refuse_run, window_left_of
from flashtile.compat.flashinfer_pages import (
    CALLED,
    Tables,
    append_paged_kv_cache,
    check_layout,
    dtype_of,
    get_batch_indices_positions,
    get_seq_lens,
    ints,
    keys_of,
    pools_of,
    whole,
)
from flashtile.compat.flashinfer_states import answer, merge_state, merge_state_in_place, merge_states, merged, takes
from flashtile.errors import InvalidProblem, renamed
from flashtile.features.masks.stored import Stored
from flashtile.torch.api.attention import attention
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.call.stored import STORED, check_kind, check_kinds

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper", "append_paged_kv_cache",
    "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_state_in_place", "merge_states",
    "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
]  # fmt: skip

# -- one request ----------------------------------------------------------------------------------------------------------


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """out (heads, head_dim), or (out, lse (heads,)). q: (heads, head_dim); k, v: (keys, heads, head_dim), or HND."""
    check_kinds(q=q, k=k, v=v)
    if q.dim() != 2:
        raise InvalidProblem(f"q has shape {tuple(q.shape)}; it must be (heads, head_dim).")
    made = _single(
        "single_decode_with_kv_cache", q[None], k, v, kv_layout, pos_encoding_mode,
        (True, window_left, sm_scale, logits_soft_cap), (rope_scale, rope_theta), (q_scale, k_scale, v_scale), None, return_lse,
    )  # fmt: skip
    return (made[0][0], made[1][0]) if return_lse else made[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: Any = None, scale_k: Any = None, scale_v: Any = None,
    o_dtype: Any = None, custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False, kv_cache_sf: Any = None,
    k_scale: float | None = None, v_scale: float | None = None,
) -> Any:  # fmt: skip
    """out (queries, heads, head_dim), or (out, lse (queries, heads)). k, v: (keys, heads, head_dim), or HND.

    custom_mask: bool (queries, keys), True where a query sees a key, in the place of causal; packed_custom_mask: its bits,
    the lowest of each uint8 first.
    """
    name = "single_prefill_with_kv_cache"
    check_kinds(q=q, k=k, v=v)
    for called, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 3:
            raise InvalidProblem(f"{called} has shape {tuple(tensor.shape)}; it must have three axes.")
    refuse_run(name, {}, {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v, "kv_cache_sf": kv_cache_sf})
    refuse(name, {f"o_dtype is {o_dtype}; out has q's dtype": o_dtype not in (None, q.dtype)})
    keys = k.shape[0 if check_layout(kv_layout) == "NHD" else 1]
    if packed_custom_mask is not None:
        check_kind("packed_custom_mask", packed_custom_mask)
        if packed_custom_mask.dtype is not torch.uint8 or packed_custom_mask.shape != (-(-q.shape[0] * keys // 8),):
            raise InvalidProblem(
                f"packed_custom_mask is {packed_custom_mask.dtype} of shape {tuple(packed_custom_mask.shape)}; it must be "
                f"uint8 of {-(-q.shape[0] * keys // 8)}, eight of the {q.shape[0]} x {keys} bits in each."
            )
        bits = packed_custom_mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=q.device) & 1
        custom_mask = bits.flatten()[: q.shape[0] * keys].view(q.shape[0], keys).bool()
    elif custom_mask is not None:
        check_kind("custom_mask", custom_mask)
        if custom_mask.numel() != q.shape[0] * keys:
            raise InvalidProblem(f"custom_mask has shape {tuple(custom_mask.shape)}; it must be ({q.shape[0]}, {keys}).")
    how = (bool(causal) and custom_mask is None, window_left, sm_scale, logits_soft_cap)
    return _single(
        name, q, k, v, kv_layout, pos_encoding_mode, how, (rope_scale, rope_theta), (None, k_scale, v_scale), custom_mask,
        return_lse,
    )  # fmt: skip


def _single(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, pos_encoding_mode: str,
    how: tuple[bool, int, Any, Any], rope: tuple[Any, Any], scales: tuple[Any, Any, Any], mask: Any, return_lse: bool,
) -> Any:  # fmt: skip
    refuse_run(name, dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)), {})
    asked = How(name, *how, pos_encoding_mode, {"rope_scale": rope[0], "rope_theta": rope[1]})
    if check_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    seen = None if mask is None else Stored(mask.reshape(1, 1, q.shape[0], k.shape[0]).bool())
    given = asked.arguments(q.shape[-1], scales[:2])
    out, lse = attention(q[None], k[None], v[None], mask=seen, return_lse=True, **given)
    return answer(out[0], lse[0], (None, None), scales[2], return_lse, ("log2", "NH"))


# -- batches --------------------------------------------------------------------------------------------------------------


class _Wrapper:
    """What the wrappers share. Workspaces are taken and not used; with use_cuda_graph plans write where the first one did."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **buffers: Any
    ):
        refuse(
            type(self).__name__,
            {"jit_args is given; kernels are compiled by what calls ask": is_given(buffers.pop("jit_args", None))},
        )
        check_kind("float_workspace_buffer", float_workspace_buffer)
        self.device, self.kv_layout = float_workspace_buffer.device, check_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._buffers, self._how, self._tables = buffers, None, None
        self._starts: list[torch.Tensor] = []

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, *buffers: Any) -> None:
        """Nothing: there are none."""

    def _planned(self) -> Any:
        if self._how is None:
            raise InvalidProblem(f"{type(self).__name__}.run is called before plan; plan says where the keys are.")
        return self._how

    def _plan_pages(self, indptr: Any, indices: Any, last: Any, page_size: int, bound: Any) -> None:
        """bound: the buffer of page numbers of a captured graph, whose length bounds a request's."""
        columns = None
        if self._use_cuda_graph:
            if bound is None:
                raise InvalidProblem(
                    "paged_kv_indices_buffer is None with use_cuda_graph=True; it bounds how many pages there are."
                )
            columns = max(bound.shape[0], 1)
        made = Tables.of(indptr, indices, last, whole("page_size", page_size), columns, self.device)
        self._tables = self._tables.copy_(made) if self._use_cuda_graph and self._tables is not None else made
        self._page_size = page_size

    def _starts_of(self, **given: Any) -> list[torch.Tensor]:
        """Where requests begin, on the device; InvalidProblem for others than a graph's."""
        made = [ints(name, tensor, self.device) for name, tensor in given.items()]
        for name, new, kept in zip(given, made, self._starts if self._use_cuda_graph else (), strict=False):
            if new.shape != kept.shape:
                raise InvalidProblem(
                    f"{name} has {new.shape[0]} elements and the captured graph's {kept.shape[0]}; a wrapper with "
                    "use_cuda_graph=True keeps its batch size."
                )
        return made

    def _keep_starts(self, made: list[torch.Tensor]) -> None:
        """A plan's, where a graph reads them."""
        keep = self._use_cuda_graph and self._starts
        self._starts = [old.copy_(new) for old, new in zip(self._starts, made, strict=True)] if keep else made

    def _attend(
        self, q: torch.Tensor, paged_kv_cache: Any, cu: Any, window_left: Any, scales: Any, sinks: Any, out: Any,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """(out, lse), None for one that nobody wants. scales: of q, k and v; those of k and v may be tensors where the cache is
        of 8 bits, for all or for each head. out: None, or where the result goes.
        """
        how, tables = self._planned(), self._tables
        assert tables is not None
        k, v = pools_of(paged_kv_cache, self.kv_layout)
        if k.shape[1] != self._page_size:
            raise InvalidProblem(
                f"paged_kv_cache has pages of {k.shape[1]} and plan's page_size is {self._page_size}; they must be equal."
            )
        check_dtype("q_data_type", self._dtypes[0], q, "q")
        check_dtype("kv_data_type", self._dtypes[1], k, "paged_kv_cache")
        check_numbers(k_scale=scales[1], v_scale=scales[2])
        stored = {f"{side}_scale": s for side, s in zip("kv", scales[1:], strict=True) if isinstance(s, torch.Tensor)}
        if k.dtype not in STORED:
            refuse_run("run", stored, {})
        numbers = scales[0], None if "k_scale" in stored else scales[1]
        stored = {name: s.flatten() if s.numel() == 1 else s for name, s in stored.items()}
        try:
            made = attention_cached(
                q, k, v, tables.table, seqused_k=tables.used, cu_seqlens_q=cu, sink=sinks, out=out, return_lse=wants_lse,
                split=0 if self._one_pass else self._split, **stored, **how.arguments(q.shape[-1], numbers, window_left),
            )  # fmt: skip
        except InvalidProblem as error:
            raise renamed(error, CALLED) from None
        return made if wants_lse else (made, None)

    def _dtypes_of(self, q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> tuple[Any, Any]:
        """Of queries and of keys."""
        asked = dict(q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type)
        q, kv, o = (dtype_of(name, one) for name, one in asked.items())
        refuse(type(self).__name__, {f"o_data_type is {o_data_type}; out has q's dtype": o not in (None, q)})
        return q, q if kv is None else kv

    def _plan_how(self, how: How, dtypes: tuple[Any, Any], disable_split_kv: bool, split: int | None = None) -> None:
        """The last step of a plan, which raises nothing: of one that fails nothing is kept. split: packed queries have none."""
        self._how, self._dtypes, self._one_pass, self._split = how, dtypes, bool(disable_split_kv), split


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a request, or `q_len_per_req` of them, over pages."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, indices=paged_kv_indices_buffer, jit_args=jit_args)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = None, kv_data_type: Any = None, o_data_type: Any = None,
        data_type: Any = None, sm_scale: float | None = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
        **others: Any,
    ) -> None:  # fmt: skip
        """indptr: int32 (requests + 1,), where each one's page numbers begin in indices; last_page_len: keys in its last.

        data_type is q_data_type and kv_data_type, where they are not given; without it queries are float16, and keys as they.
        others: fixed_split_size, pages of a part of the keys, rounded up to 128 keys; None or -1 splits by the longest request.
        """
        how = How("plan", True, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, others)
        q_data_type, kv_data_type = (data_type if one is None else one for one in (q_data_type, kv_data_type))
        q_data_type = "float16" if q_data_type is None else q_data_type
        dtypes = self._dtypes_of(q_data_type, kv_data_type, o_data_type)
        split = keys_of("fixed_split_size", others.get("fixed_split_size"), whole("page_size", page_size))
        each = whole("q_len_per_req", q_len_per_req)
        self._plan_pages(indptr, indices, last_page_len, page_size, self._buffers["indices"])
        self._plan_how(how, dtypes, disable_split_kv, split)
        self._per_request = each

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: Any, *, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
        out: Any = None, lse: Any = None, return_lse: bool = False, enable_pdl: Any = None, window_left: int | None = None,
        sinks: Any = None, q_len_per_req: int | None = None, skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:  # fmt: skip
        """out (tokens, heads, head_dim), or (out, lse (tokens, heads)). sinks: (heads,), logits that join the softmax."""
        refuse_run("run", dict(q_scale=q_scale), dict(
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor))  # fmt: skip
        self._planned()
        tables, each = self._tables, self._per_request if q_len_per_req is None else whole("q_len_per_req", q_len_per_req)
        assert tables is not None
        check_kind("q", q)
        if q.dim() != 3 or q.shape[0] != tables.used.shape[0] * each:
            raise InvalidProblem(f"q has shape {tuple(q.shape)}; it must be ({tables.used.shape[0] * each}, heads, head_dim).")
        scales, wants_lse = (q_scale, k_scale, v_scale), return_lse or lse is not None
        wide = q.unsqueeze(1) if each == 1 else q.unflatten(0, (-1, each))  # which takes four times as long
        into = out.view(wide.shape) if takes(out, q, v_scale, sinks) else None
        made, sums = self._attend(wide, paged_kv_cache, None, window_left, scales, sinks, into, wants_lse)
        made, sums = made.flatten(0, 1) if into is None else out, None if sums is None else sums.transpose(0, 1).flatten(1)
        return answer(made, sums, (out, lse), v_scale, return_lse, ("log2", "NH"))

    run_return_lse = partialmethod(run, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same for graphs: plans write where the first one did."""

    def __init__(
        self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor, indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False,
    ):  # fmt: skip
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Any number of queries a request, one request's after another's, over pages."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None, variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, indices=paged_kv_indices_buf, jit_args=jit_args)

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        head_dim_vo: int | None = None, custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None, *, disable_split_kv: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        """qo_indptr: int32 (requests + 1,), where each request's queries begin; the rest as of the decode wrapper's plan."""
        others |= dict(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale, rope_theta=rope_theta
        )  # fmt: skip
        how = How("plan", causal, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, others)
        dtypes, starts = self._dtypes_of(q_data_type, kv_data_type, o_data_type), self._starts_of(qo_indptr=qo_indptr)
        self._plan_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, self._buffers["indices"])
        self._keep_starts(starts)
        self._plan_how(how, dtypes, disable_split_kv)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: Any, *, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
        out: Any = None, lse: Any = None, return_lse: bool = False, lse_base: str = "log2", lse_layout: str = "NH",
        enable_pdl: Any = None, window_left: int | None = None, sinks: Any = None, kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None, use_fp16_softmax: Any = None, uses_spcompress: Any = None,
    ) -> Any:  # fmt: skip
        """out (tokens, heads, head_dim), or (out, lse); lse_layout NH is (tokens, heads), lse_base log2 or ln."""
        refuse_run("run", dict(q_scale=q_scale), dict(
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress or None))  # fmt: skip
        self._planned()
        wants_lse = return_lse or lse is not None
        into, scales = out if takes(out, q, v_scale, sinks) else None, (q_scale, k_scale, v_scale)
        made, sums = self._attend(q, paged_kv_cache, self._starts[0], window_left, scales, sinks, into, wants_lse)
        return answer(made, sums, (out, lse), v_scale, return_lse, (lse_base, lse_layout))

    run_return_lse = partialmethod(run, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Any number of queries a request over keys that lie one request's after another's."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None, kv_indptr_buf: Any = None, custom_mask_buf: Any = None, mask_indptr_buf: Any = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None, variant_owns_mask: bool = False,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args=jit_args)
        refuse(type(self).__name__, {"kv_layout is HND; packed keys are (tokens, heads, head_dim)": kv_layout == "HND"})

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        head_dim_vo: int | None = None, custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, o_data_type: Any = None, *, disable_split_kv: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        """qo_indptr, kv_indptr: int32 (requests + 1,), where each request's queries and keys begin."""
        others |= dict(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale, rope_theta=rope_theta
        )  # fmt: skip
        how = How("plan", causal, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, others)
        dtypes = self._dtypes_of(q_data_type, kv_data_type, o_data_type)
        self._keep_starts(self._starts_of(qo_indptr=qo_indptr, kv_indptr=kv_indptr))
        self._plan_how(how, dtypes, disable_split_kv)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, o_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False,
        lse_base: str = "log2", lse_layout: str = "NH", enable_pdl: Any = None, kv_cache_sf: Any = None,
    ) -> Any:  # fmt: skip
        """As the paged wrapper's; k, v: (tokens, heads, head_dim)."""
        numbers = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        refuse_run("run", numbers, dict(kv_cache_sf=kv_cache_sf, o_scale=o_scale))
        how = self._planned()
        check_dtype("q_data_type", self._dtypes[0], q, "q")
        check_dtype("kv_data_type", self._dtypes[1], k, "k")
        made, sums = attention_varlen(q, k, v, *self._starts, return_lse=True, **how.arguments(q.shape[-1], (q_scale, k_scale)))
        return answer(made, sums, (out, lse), v_scale, return_lse, (lse_base, lse_layout))

    run_return_lse = partialmethod(run, return_lse=True)


class MultiLevelCascadeAttentionWrapper:
    """Attention over prefixes that requests share, read once each, and what is their own: paged prefills, merged."""

    def __init__(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None, paged_kv_indptr_buf_arr: Any = None, paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
    ):  # fmt: skip
        indices = paged_kv_indices_buf_arr or [None] * whole("num_levels", num_levels)
        self.is_cuda_graph_enabled = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indices_buf=one)
            for one in indices
        ]

    def reset_workspace_buffer(self, *buffers: Any) -> None:
        """Nothing: there are none."""

    def plan(
        self, qo_indptr_arr: list[torch.Tensor], paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor], paged_kv_last_page_len: list[torch.Tensor], num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        """A list of each argument of the paged prefill's plan, one element a level; causal concerns the last level alone."""
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(one) != len(self._levels) for one in lists):
            raise InvalidProblem(
                f"plan's lists have {[len(one) for one in lists]} elements; each must have {len(self._levels)}."
            )
        refuse("MultiLevelCascadeAttentionWrapper.plan", {
            "window_left is given; a level does not know where its keys stand": window_left_of(how.get("window_left", -1)) >= 0,
        })  # fmt: skip
        # of a plan that fails none is kept, but for tables that CUDA graphs read, which each level writes over
        planned, last = [copy(level) for level in self._levels], len(self._levels) - 1
        for i, (level, queries, starts, indices, ends) in enumerate(zip(planned, *lists, strict=True)):
            level.plan(
                queries, starts, indices, ends, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal and i == last, **how,
            )  # fmt: skip
        self._levels = planned

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        """out (tokens, heads, head_dim)."""
        return merged(*zip(*(level.run(q, paged_kv_cache, return_lse=True) for level in self._levels), strict=True))[0]

    forward = run
