"""In which dtype the matrix products with probabilities are formed, and the memory that tiles share."""

from __future__ import annotations

import math
from functools import cache

import torch

from flashtile.kernels.cpu.region import region_of, tiling_of
from flashtile.spec.attention import AttentionProblem
from flashtile.spec.dtype import DType

# Fewer rows than this (of a group together) do not repay the casts. It also bounds a tile's width, and so `headroom`.
NARROW_ROWS = 128
# Where a sum's length is not a multiple of this, torch's 16-bit product reads on into the next row of the left factor and
# multiplies it by zeros: a NaN there ends up in both rows (AMX, torch 2.13.0; 50 and 127 do it).
NARROW_LENGTH = 32


# Keys of a row of fp32 inputs that float64 computes. Of a few roundings the largest decides, and it may well be 1.5 times as
# large as plain PyTorch's: even that, with the keys in another order, breaks the accuracy rule in one tensor of thirty.
FEW_KEYS = 128


def score_dtype(p: AttentionProblem) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.float64 if p.dtype is DType.FP32 and region_of(p).keys <= FEW_KEYS else torch.float32


def product_dtype(p: AttentionProblem) -> torch.dtype:
    """The inputs' own dtype where the CPU multiplies it faster than float32 and the tiles are high enough, else `score_dtype`.

    q k^T is float32 always: torch gives products of 16-bit numbers in 16 bits only, and lse needs more.
    """
    region = region_of(p)
    captured = any(tensor.grad for spec in p.score for tensor in spec.tensors)
    if (
        region.rows == 0
        or captured  # a gradient of single scores, or of sums that cancel: dp's 16 bits would show
        or p.dropout is not None  # fewer terms, each larger: so would those of what is kept
        or p.head_dim_v % NARROW_LENGTH
        or tiling_of(p, region).rows * p.group < NARROW_ROWS
        or not multiplies(p.dtype)
    ):
        return score_dtype(p)
    return torch.bfloat16 if p.dtype is DType.BF16 else torch.float16


def mends(p: AttentionProblem) -> bool:
    """Whether a 16-bit forward that returns lse is torch's, its lse mended, rather than tiles or float32 (`lse.py`)."""
    region = region_of(p)
    return region.rows > 0 and tiling_of(p, region).rows * p.group >= NARROW_ROWS and multiplies(p.dtype)


@cache
def multiplies(dtype: DType) -> bool:
    """Whether this CPU has instructions that multiply a 16-bit dtype faster than float32."""
    known = getattr(torch.cpu, "get_capabilities", dict)()
    return bool({DType.BF16: known.get("avx512_bf16"), DType.FP16: known.get("avx512_fp16")}.get(dtype))


def headroom(dtype: torch.dtype, width: int) -> float:
    """Log of the factor by which probabilities are made smaller, so that no sum of `width` of them is above 1.

    They are relative to a row's largest, and fp16 products end at 65504: with values near that, their sum must not exceed 1.
    """
    return math.log(width) if dtype is torch.float16 else 0.0


class Scratch:
    """Memory that every tile of a call reuses: the faults of fresh pages cost as much as a pass over the tile."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised and dense; what had this name and dtype before is overwritten."""
        size, flat = math.prod(shape), self.made.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self.made[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return flat[:size].view(shape)

    def product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b, of batches of matrices, in their dtype."""
        return torch.bmm(a, b, out=self.empty(name, (a.shape[0], a.shape[1], b.shape[2]), a.dtype))

    def add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """total += a @ b, where a and b have one dtype."""
        if a.dtype is total.dtype or a.shape[2] % NARROW_LENGTH:
            total.baddbmm_(a.to(total.dtype), b.to(total.dtype))
        else:
            total += self.product("added", a, b)

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in another dtype; itself where it has that already."""
        return tensor if tensor.dtype is dtype else self.empty(name, tuple(tensor.shape), dtype).copy_(tensor)
