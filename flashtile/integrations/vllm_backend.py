"""vLLM's attention backend on flashtile, by the interface of vLLM 0.33: generation from its paged cache, and encoders.

Decoders write their keys into the cache by slots and read them by the block table: chunks of prompts stand beside requests
that decode, in one call, whatever of their pages others share. Lengths stay on the device. Encoders attend to whole items,
without a cache. What neither can do is refused: where vLLM starts, as far as its settings say so, else where a layer is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.softcap import Softcap
from flashtile.torch.api.layouts import attention_varlen
from flashtile.torch.cache.append import append_to_cache
from flashtile.torch.cache.attention import attention_cached

vllm: Any = import_module("vllm.v1.attention.backend")
ENCODER_ONLY, DECODER = "encoder_only", "decoder"
WIDEST = 512  # head_dim of the kernels
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # times a layer's scales
CACHES = ("auto", "float16", "bfloat16", "float32", *FP8)  # what a cache may hold


class FlashtileBackend(vllm.AttentionBackend):
    """What vLLM asks of a backend, and is told before a model is loaded."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = CACHES
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that this is registered as."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashtileImpl]:
        return FlashtileImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= WIDEST

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (DECODER, ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclass
class Metadata(vllm.AttentionMetadata):
    """A batch. query_start_loc: int32 (items + 1,), where they start among the tokens; seq_lens: int32 (items,), of their keys
    in the cache, this batch's counted; block_table: int32 (items, columns); slot_mapping: where each token's key goes.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tokens: int
    max_query_len: int
    causal: bool


class MetadataBuilder(vllm.AttentionMetadataBuilder):
    """Makes `Metadata` of views: graphs read what vLLM writes into its buffers, and nobody waits for the device."""

    _cudagraph_support = vllm.AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Of a batch of vLLM's. A prefix that items share is read by each of them."""
        given = common_attn_metadata
        _refuse({"causality differs between items": not isinstance(given.causal, bool)})
        return Metadata(
            given.query_start_loc[: given.num_reqs + 1], given.seq_lens[: given.num_reqs],
            given.block_table_tensor[: given.num_reqs], given.slot_mapping, given.num_actual_tokens, given.max_query_len,
            given.causal,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Of items of one key, which a capture is done with sooner; replays read other lengths."""
        made = self.build(0, common_attn_metadata)
        made.seq_lens.fill_(1)
        return made

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        """The same batch in another group's cache."""
        return replace(metadata, block_table=blk_table[: len(metadata.seq_lens)], slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Nothing: it is all views."""


class FlashtileImpl(vllm.AttentionImpl):
    """One layer's attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):  # fmt: skip
        """alibi_slopes: one per head; sinks: (num_heads,). Raises NotSupported for other kinds of attention and of caches."""
        _refuse({
            f"attn_type is {getattr(attn_type, 'value', attn_type)}; supported are decoder and encoder_only":
                attn_type not in (DECODER, ENCODER_ONLY),
            f"kv_cache_dtype is {kv_cache_dtype}; it must be one of {', '.join(CACHES)}": kv_cache_dtype not in CACHES,
        })  # fmt: skip
        if sinks is not None and sinks.shape != (num_heads,):
            raise InvalidProblem(f"sinks has shape {tuple(sinks.shape)}; it must be (num_heads,), which is ({num_heads},).")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.softcap = (Softcap(logits_soft_cap),) if logits_soft_cap else ()
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        reach = None if sliding_window is None else sliding_window - 1
        self.window = None if reach is None else (reach, reach if attn_type == ENCODER_ONLY else 0)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values (tokens, num_kv_heads, head_size) into their slots, block * block_size + row; -1 is nowhere."""
        if self.attn_type != ENCODER_ONLY:
            tokens = slot_mapping.shape[0]
            scales = self._scales(layer)
            append_to_cache(key[:tokens], value[:tokens], *self._pools(kv_cache), slots=slot_mapping, **scales)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Metadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """output, filled. query, output: (tokens, num_heads, head_size); key, value: (tokens, num_kv_heads, head_size).

        kv_cache: (blocks, num_kv_heads, block_size, 2 * head_size) of any strides, a token's key before its value; it holds
        this batch's keys already, in fp8 over layer._k_scale and layer._v_scale. attn_metadata: None where vLLM measures its
        memory; output is 0 then.
        """
        if output_scale is not None or output_block_scale is not None:
            _refuse({"a quantised output": True})
        if attn_metadata is None:
            return output.fill_(0)
        if self.slopes is not None:
            self.slopes = self.slopes.to(query.device)
        alibi = () if self.slopes is None else (Alibi(self.slopes),)
        how: dict[str, Any] = dict(
            causal=attn_metadata.causal, window=self.window, score=(*self.softcap, *alibi), scale=self.scale, sink=self.sinks
        )
        if self.attn_type == ENCODER_ONLY:
            used = slice(attn_metadata.tokens)
            most = dict(max_seqlen_q=attn_metadata.max_query_len, max_seqlen_k=attn_metadata.max_query_len)
            out = attention_varlen(query[used], key[used], value[used], attn_metadata.query_start_loc, **most, **how)
            output[: out.shape[0]].view(out.shape).copy_(out)
        else:
            how |= self._scales(layer)
            self._cached(_first(query, attn_metadata.tokens), kv_cache, attn_metadata, output, how)
        return output

    def _cached(
        self, query: torch.Tensor, kv_cache: torch.Tensor, batch: Metadata, output: torch.Tensor, how: dict[str, Any]
    ) -> None:
        """Fill output for as many tokens as count, or for as many as decode."""
        table, lengths, starts = batch.block_table, batch.seq_lens, batch.query_start_loc
        if batch.max_query_len != 1:
            out, pools = _first(output, query.shape[0]).view(query.shape), self._pools(kv_cache)
            attention_cached(query, *pools, table, seqused_k=lengths, cu_seqlens_q=starts, out=out, **how)
            return
        items = min(query.shape[0], lengths.shape[0])  # token i is item i's; those that pad a graph have no keys, or no token
        q, table, lengths = (_first(t, items) for t in (query, table, lengths))
        q = q.unsqueeze(1)
        out = _first(output, items).view(q.shape)
        attention_cached(q, *self._pools(kv_cache), table, seqused_k=lengths, out=out, **how)

    def _pools(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v), (blocks, block_size, num_kv_heads, head_size) each, as views."""
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            raise InvalidProblem(
                f"kv_cache has shape {tuple(kv_cache.shape)}; it must be (blocks, num_kv_heads, block_size, "
                f"{2 * self.head_size}), as vLLM 0.33 lays it."
            )
        if self.kv_cache_dtype in FP8:  # which vLLM has as bytes
            kv_cache = kv_cache.view(FP8[self.kv_cache_dtype])
        k, v = kv_cache.transpose(1, 2).chunk(2, -1)
        return k, v

    def _scales(self, layer: Any) -> dict[str, Any]:
        """What a cache of 8 bits is multiplied by: the layer's own."""
        if self.kv_cache_dtype not in FP8:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """So many first rows: itself where it has no others, for a view takes as long as half of a launch."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def _refuse(reasons: dict[str, Any]) -> None:
    """Raise NotSupported with those reasons that hold."""
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        raise NotSupported("vLLM's attention backend CUSTOM", {"flashtile": holding})
