"""vLLM's attention backend on flashtile: batches whose every item is whole, without a prefix in the cache.

That is what pooling models ask (embeddings, classification, reranking), encoders and decoders. Nothing is written to the
cache, and whatever would read it is refused: where vLLM starts, as far as its settings say so, else where the batch comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.softcap import Softcap
from flashtile.torch.api.layouts import attention_varlen

vllm: Any = import_module("vllm.v1.attention.backend")
ENCODER_ONLY, DECODER = "encoder_only", "decoder"
WIDEST = 512  # head_dim of the kernels


class FlashtileBackend(vllm.AttentionBackend):
    """What vLLM asks of a backend, and is told before a model is loaded."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)

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

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of the cache that vLLM allocates for decoders; it is never touched."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

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
    def supports_kv_connector(cls) -> bool:
        return False


@dataclass
class Metadata(vllm.AttentionMetadata):
    """A batch of whole items. query_start_loc: int32 (items + 1,), where they start among the tokens that count."""

    query_start_loc: torch.Tensor
    tokens: int
    max_query_len: int
    causal: bool


class MetadataBuilder(vllm.AttentionMetadataBuilder):
    """Makes `Metadata`, or raises NotSupported for what has keys in the cache."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _refuse({
            "a runner that generates decodes from a paged cache; use runner='pooling'":
                vllm_config.model_config.runner_type != "pooling",
            "chunked prefill reads a prompt's first part from the cache; use enable_chunked_prefill=False":
                vllm_config.scheduler_config.enable_chunked_prefill,
            "prefix caching reads the cache; use enable_prefix_caching=False":
                vllm_config.cache_config.enable_prefix_caching,
        })  # fmt: skip

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Of a batch of vLLM's. Waits for the device where vLLM has no lengths on the host."""
        given = common_attn_metadata
        starts = given.query_start_loc_cpu[: given.num_reqs + 1]
        lengths = getattr(given, "seq_lens_cpu_upper_bound", None)  # exact where items are prefilled
        lengths = given.seq_lens.cpu() if lengths is None else lengths
        cached = int((lengths[: given.num_reqs] > starts[1:] - starts[:-1]).sum())
        _refuse({
            f"{cached} of {given.num_reqs} items have keys in the cache, from which there is no reading": cached > 0,
            "a prefix that items share lies in the cache": common_prefix_len > 0,
            "causality differs between items": not isinstance(given.causal, bool),
        })  # fmt: skip
        return Metadata(given.query_start_loc[: given.num_reqs + 1], given.num_actual_tokens, given.max_query_len, given.causal)


class FlashtileImpl(vllm.AttentionImpl):
    """One layer's attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):  # fmt: skip
        """alibi_slopes: one per head; sinks: (num_heads,). Raises NotSupported for other kinds of attention and shared keys."""
        _refuse({
            f"attn_type is {getattr(attn_type, 'value', attn_type)}; supported are decoder and encoder_only":
                attn_type not in (DECODER, ENCODER_ONLY),
            "keys are another layer's, in the cache": kv_sharing_target_layer_name is not None,
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

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Metadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """output, filled. query, output: (tokens, num_heads, head_size); key, value: (tokens, num_kv_heads, head_size).

        attn_metadata: None where vLLM measures its memory; output is 0 then, as it is of tokens that pad the batch.
        """
        _refuse({"a quantised output": output_scale is not None or output_block_scale is not None})
        if attn_metadata is None:
            return output.fill_(0)
        if self.slopes is not None:
            self.slopes = self.slopes.to(query.device)
        alibi = () if self.slopes is None else (Alibi(self.slopes),)
        longest = attn_metadata.max_query_len
        used = slice(attn_metadata.tokens)
        out = attention_varlen(
            query[used], key[used], value[used], attn_metadata.query_start_loc, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=attn_metadata.causal, window=self.window, score=(*self.softcap, *alibi), scale=self.scale, sink=self.sinks,
        )  # fmt: skip
        output[used].copy_(out)
        return output


def _refuse(reasons: dict[str, Any]) -> None:
    """Raise NotSupported with those reasons that hold."""
    holding = [reason for reason, holds in reasons.items() if holds]
    if holding:
        raise NotSupported("vLLM's attention backend CUSTOM", {"flashtile": holding})
