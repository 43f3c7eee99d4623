"""flashinfer's wrapper of absorbed latent attention over pages."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import options, refuse
from flashtile.compat.flashinfer_pages import ints, table_of
from flashtile.compat.flashinfer_states import lse_of, put
from flashtile.compat.latent import joined
from flashtile.errors import InvalidProblem, renamed
from flashtile.problem.number import plain, told
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.cache.tensors import check_starts
from flashtile.torch.call.stored import check_kind

__all__ = ["BatchMLAPagedAttentionWrapper"]
CALLED = {"page_table": "kv_indices", "seqused_k": "kv_len_arr", "cu_seqlens_q": "qo_indptr", "k_cache": "ckv_cache"}


class BatchMLAPagedAttentionWrapper:
    """`plan`, then `run`: queries of 512 and 64 columns over caches of latents and of rotated keys.

    Both caches must be views of one tensor (pages, page_size, 576), its first columns and the rest: kernels read a row once.
    """

    def __init__(
        self, float_workspace_buffer: Any = None, use_cuda_graph: bool = False, qo_indptr: Any = None, kv_indptr: Any = None,
        kv_indices: Any = None, kv_len_arr: Any = None, backend: str = "auto",
    ):  # fmt: skip
        refuse("BatchMLAPagedAttentionWrapper", {
            "use_cuda_graph is True; call flashtile.attention_cached, whose table and lengths a graph reads":
                bool(use_cuda_graph),
        })  # fmt: skip
        self._planned: tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]] | None = None

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: Any = None, kv_data_type: Any = None, use_profiler: bool = False,
    ) -> None:  # fmt: skip
        """Read the lists of pages; waits for the device. Request i has the queries qo_indptr[i] to qo_indptr[i + 1], pages
        kv_indices[kv_indptr[i]] to kv_indptr[i + 1], and kv_len_arr[i] keys.
        """
        sizes = dict(num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size)
        for name, size in sizes.items():
            if isinstance(plain(size), bool) or not isinstance(plain(size), int) or plain(size) < 1:
                raise InvalidProblem(f"{name} is {told(size)}; it must be a positive int.")
        device = kv_indices.device
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        starts, begins, indices, lengths = (ints(name, t, device) for name, t in zip(names, given, strict=True))
        requests = lengths.shape[0]
        for name, tensor, wrong in (
            ("qo_indptr", starts, starts.shape[0] != requests + 1), ("kv_indptr", begins, begins.shape[0] <= requests)
        ):  # fmt: skip
            if wrong:
                raise InvalidProblem(f"{name} has {tensor.shape[0]} elements and kv_len_arr {requests}; it must have one more.")
        begins = begins[: requests + 1]  # as flashinfer reads it, whose own tests give a longer one
        check_starts("kv_indptr", begins.cpu(), indices.shape[0])
        table, count = table_of(begins, indices, None)
        short = lengths > count * page_size
        if bool(short.any()):
            request = int(short.nonzero()[0, 0])
            raise InvalidProblem(
                f"kv_len_arr[{request}] is {int(lengths[request])} and the request has {int(count[request])} pages of "
                f"{page_size} rows; they must hold its keys."
            )
        how = dict(causal=bool(causal), scale=sm_scale, options=options())
        self._planned = (starts, table, lengths, {**sizes, "how": how})

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, out: Any = None,
        lse: Any = None, return_lse: bool = False, profiler_buffer: Any = None, kv_len: Any = None, page_table: Any = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:  # fmt: skip
        """out (tokens, heads, head_dim_ckv), or (out, lse (tokens, heads)), lse of base 2 or of e.

        q_nope, q_pe: (tokens, heads, columns); caches: (pages, page_size, columns). kv_len, page_table: for other backends.
        """
        if self._planned is None:
            raise InvalidProblem("run is called before plan; plan must come first.")
        starts, table, lengths, planned = self._planned
        latent, turned = planned["head_dim_ckv"], planned["head_dim_kpe"]
        wanted = {
            "q_nope": (q_nope, (q_nope.shape[0], planned["num_heads"], latent)),
            "q_pe": (q_pe, (q_nope.shape[0], planned["num_heads"], turned)),
            "ckv_cache": (ckv_cache, (ckv_cache.shape[0], planned["page_size"], latent)),
            "kpe_cache": (kpe_cache, (ckv_cache.shape[0], planned["page_size"], turned)),
        }
        for name, (tensor, shape) in wanted.items():
            check_kind(name, tensor)
            if tuple(tensor.shape) != shape:
                raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}, as plan was told.")
        keys = joined("BatchMLAPagedAttentionWrapper", ("ckv_cache", "kpe_cache"), ckv_cache, kpe_cache)[:, :, None]
        try:
            made, sums = attention_cached(
                torch.cat([q_nope, q_pe], -1), keys, keys[..., :latent], table, seqused_k=lengths, cu_seqlens_q=starts,
                return_lse=True, **planned["how"],
            )  # fmt: skip
        except InvalidProblem as error:
            raise renamed(error, CALLED) from None
        made = put("out", out, made)
        return (made, put("lse", lse, lse_of(sums, "ln" if return_lse_base_on_e else "log2"))) if return_lse else made
