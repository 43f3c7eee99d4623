"""Element types, by the short names used in spellings, plans and tables."""

from __future__ import annotations

from enum import Enum

SIZES_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "int8": 1, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}  # of plans


class DType(str, Enum):
    """Element type of a tensor."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def size_bytes(self) -> int:
        return SIZES_BYTES[self.value]

    @property
    def is_narrow(self) -> bool:
        """Whether it has 16 bits."""
        return self in (DType.FP16, DType.BF16)

    def __str__(self) -> str:
        return self.value
