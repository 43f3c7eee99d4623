"""Element types, by the short names used in spellings, plans and tables."""

from __future__ import annotations

from enum import Enum


class DType(str, Enum):
    """Element type of a tensor."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def size_bytes(self) -> int:
        return 4 if self is DType.FP32 else 2

    def __str__(self) -> str:
        return self.value
