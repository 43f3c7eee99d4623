"""What flashtile's backend meets of vLLM, in the signatures of its 0.33: vLLM itself is made for CUDA, and too large."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[Any] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


class AttentionMetadata:
    pass


M = TypeVar("M")


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: bool = False
    supports_draft_decode_metadata_update: bool = False

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> M: ...


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: M, output: torch.Tensor, output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self) -> str:
        path = _registered.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def get_class(self) -> Any:
        module, _, name = self.get_path().rpartition(".")
        return getattr(import_module(module), name)

    def is_overridden(self) -> bool:
        return self in _registered


_registered: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None, is_mamba: bool = False) -> Any:
    assert class_path is not None
    assert not is_mamba
    _registered[backend] = class_path
    return lambda cls: cls


def install(patch: pytest.MonkeyPatch) -> None:
    """Put these where `import vllm` finds them, with nothing registered."""
    _registered.clear()
    modules = {
        "backend": (
            AttentionType, AttentionBackend, AttentionMetadata, CommonAttentionMetadata, AttentionMetadataBuilder,
            AttentionImpl, AttentionCGSupport,
        ),
        "backends": (),
        "backends.registry": (AttentionBackendEnum, register_backend),
    }  # fmt: skip
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        patch.setitem(sys.modules, name, ModuleType(name))
    for name, members in modules.items():
        module = ModuleType(f"vllm.v1.attention.{name}")
        module.__dict__.update({member.__name__: member for member in members})
        patch.setitem(sys.modules, module.__name__, module)
    patch.delitem(sys.modules, "flashtile.integrations.vllm_backend", raising=False)
