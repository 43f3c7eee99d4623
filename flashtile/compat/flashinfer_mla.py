"""flashinfer's wrapper of absorbed latent attention over pages."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.compat.asked import options
from flashtile.compat.flashinfer_pages import ints, table_of, whole
from flashtile.compat.flashinfer_states import lse_of, put
from flashtile.errors import InvalidProblem, renamed
from flashtile.torch.cache.attention import attention_cached
from flashtile.torch.cache.tensors import check_starts
from flashtile.torch.call.stored import check_kinds

__all__ = ["BatchMLAPagedAttentionWrapper"]
CALLED = {
    "page_table": "kv_indices", "seqused_k": "kv_len_arr", "cu_seqlens_q": "qo_indptr", "k_cache": "kpe_cache",
    "v_cache": "ckv_cache", "qv": "q_nope", "q": "q_pe",
}  # fmt: skip
UNTURNED = {**CALLED, "k_cache": "ckv_cache", "q": "q_nope"}  # where there are no rotated columns
LISTS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


class BatchMLAPagedAttentionWrapper:
    """`plan`, then `run`: queries of 512 and 64 columns over caches of latents and of rotated keys.

    The caches may be views of one tensor or of two. With use_cuda_graph plans write into the four tensors that the wrapper
    is given, and into a table, int32 (requests, pages of the cache): runs read these alone, in a captured graph, too.
    A graph keeps the causal and sm_scale of the plan that it was captured with.
    """

    def __init__(
        self, float_workspace_buffer: Any = None, use_cuda_graph: bool = False, qo_indptr: Any = None, kv_indptr: Any = None,
        kv_indices: Any = None, kv_len_arr: Any = None, backend: str = "auto",
    ):  # fmt: skip
        given: dict[str, Any] = dict(zip(LISTS, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True))
        for name, tensor in given.items() if use_cuda_graph else ():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.int32 or tensor.dim() != 1:
                raise InvalidProblem(f"{name} is no int32 tensor of one axis; with use_cuda_graph=True plans write into it.")
        self._kept: dict[str, torch.Tensor] | None = given if use_cuda_graph else None
        self._table: torch.Tensor | None = None
        self._planned: dict[str, Any] | None = None

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
            whole(name, size, int(name != "head_dim_kpe"))  # there may be no rotated columns
        device = kv_indices.device
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        starts, begins, indices, lengths = (ints(name, t, device) for name, t in zip(LISTS, given, strict=True))
        requests = lengths.shape[0]
        for name, tensor, wrong in (
            ("qo_indptr", starts, starts.shape[0] != requests + 1), ("kv_indptr", begins, begins.shape[0] <= requests)
        ):  # fmt: skip
            if wrong:
                raise InvalidProblem(f"{name} has {tensor.shape[0]} elements and kv_len_arr {requests}; it must have one more.")
        begins = begins[: requests + 1]  # as flashinfer reads it, whose own tests give a longer one
        check_starts("kv_indptr", begins.cpu(), indices.shape[0])
        starts_here = starts.cpu()
        check_starts("qo_indptr", starts_here, int(starts_here[-1]))
        count = begins.diff()
        short = lengths > count * page_size
        if bool(short.any()):
            request = int(short.nonzero()[0, 0])
            raise InvalidProblem(
                f"kv_len_arr[{request}] is {int(lengths[request])} and the request has {int(count[request])} pages of "
                f"{page_size} rows; they must hold its keys."
            )
        queries, longest = starts_here.diff().unique().tolist(), int(count.max()) if requests else 0
        planned = dict(
            each=queries[0] if len(queries) == 1 else None, longest=longest,
            how=dict(causal=bool(causal), scale=sm_scale, options=options()), **sizes,
            **dict(zip(LISTS, (starts, begins, indices, lengths), strict=True)),
        )  # fmt: skip
        if self._kept is None:
            self._table, _ = table_of(begins, indices, max(longest, 1))
        else:
            planned |= self._write(planned, self._kept)
        self._planned = planned

    def _write(self, planned: dict[str, Any], kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A plan's tensors in those that a graph reads."""
        before, table = self._planned, self._table
        if before is not None and planned["each"] != before["each"]:
            now, then = ("unlike numbers" if p["each"] is None else p["each"] for p in (planned, before))
            raise InvalidProblem(
                f"qo_indptr has queries a request: {now}, and the plan before {then}; with use_cuda_graph=True they are kept, "
                "as by its graph."
            )
        for name in LISTS:
            count, room = planned[name].shape[0], kept[name].shape[0]
            if count > room or (name == "kv_len_arr" and count != room):
                raise InvalidProblem(
                    f"{name} has {count} elements and the wrapper's {room}; with use_cuda_graph=True a plan is written "
                    "there, and the batch keeps its size."
                )
        if table is not None and planned["longest"] > table.shape[1]:
            raise InvalidProblem(
                f"kv_indptr gives a request {planned['longest']} pages, and the table of the captured graph has places for "
                f"{table.shape[1]}, as many as the cache had; make another wrapper."
            )
        made = {name: kept[name][: planned[name].shape[0]].copy_(planned[name]) for name in LISTS}
        made["kv_indices"] = kept["kv_indices"]
        if table is not None:
            table.copy_(table_of(made["kv_indptr"], made["kv_indices"], table.shape[1])[0])
        return made

    def _table_for(self, planned: dict[str, Any], pages: int) -> torch.Tensor:
        """The table of pages; a graph's has places for all that a cache has."""
        if self._table is None:
            columns = max(planned["longest"], min(pages, planned["kv_indices"].shape[0]), 1)
            self._table, _ = table_of(planned["kv_indptr"], planned["kv_indices"], columns)
        return self._table

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
        planned = self._planned
        check_kinds(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        latent, turned = planned["head_dim_ckv"], planned["head_dim_kpe"]
        wanted = {
            "q_nope": (q_nope, (q_nope.shape[0], planned["num_heads"], latent)),
            "q_pe": (q_pe, (q_nope.shape[0], planned["num_heads"], turned)),
            "ckv_cache": (ckv_cache, (ckv_cache.shape[0], planned["page_size"], latent)),
            "kpe_cache": (kpe_cache, (ckv_cache.shape[0], planned["page_size"], turned)),
        }
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise InvalidProblem(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}, as plan was told.")
        if not len(ckv_cache) and not planned["longest"]:  # no request has a key
            ckv_cache, kpe_cache = (t.new_zeros((1, *t.shape[1:])) for t in (ckv_cache, kpe_cache))
        each, requests = planned["each"], planned["kv_len_arr"].shape[0]
        alike = each and q_nope.shape[0] == requests * each  # as many queries of every request: what Hopper's kernels take
        q, qv = (t.unflatten(0, (requests, each)) if alike else t for t in (q_pe, q_nope))
        v_cache, k_cache = ckv_cache[:, :, None], kpe_cache[:, :, None]
        if not turned:
            q, qv, k_cache = qv, None, v_cache
        try:
            made, sums = attention_cached(
                q, k_cache, v_cache, self._table_for(planned, ckv_cache.shape[0]), seqused_k=planned["kv_len_arr"], qv=qv,
                cu_seqlens_q=None if alike else planned["qo_indptr"], return_lse=True, **planned["how"],
            )  # fmt: skip
        except InvalidProblem as error:
            raise renamed(error, CALLED if turned else UNTURNED) from None
        if alike:
            made, sums = made.flatten(0, 1), sums.transpose(0, 1).flatten(1)
        made = put("out", out, made)
        if not return_lse and lse is None:
            return made
        sums = put("lse", lse, lse_of(sums, "ln" if return_lse_base_on_e else "log2"))  # a given one is written in any case
        return (made, sums) if return_lse else made
