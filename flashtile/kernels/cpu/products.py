"""In which dtype the matrix products with probabilities are formed, and the memory that tiles share."""

from __future__ import annotations

import math
from functools import cache

import torch

from flashtile.kernels.cpu.region import region_of, tiling_of
from flashtile.kernels.device.score import sums_per_head
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

# Fewer rows than this (of a group together) do not repay the casts. It also bounds a tile's width, and so `headroom`.
NARROW_ROWS = 128
# Where a sum's length is not a multiple of this, torch's 16-bit product reads on into the next row of the left factor and
# multiplies it by zeros: a NaN there ends up in both rows (AMX, torch 2.13.0; 50 and 127 do it).
NARROW_LENGTH = 32


# Terms of a float32 sum that are added up by themselves. Where an error counts, in the score of a key that holds much of a
# row's weight, partial sums grow evenly, and so does their rounding: parts of 16 make it 2.4 (head_dim 64) to 3.8 times (256)
# less, at 1.35 times the product's time. Products with probabilities have a large term or two, after which every partial sum is
# large: parts of 64 bring the median of the largest errors from 0.7 of plain PyTorch's to 0.6, those of 32 to 0.5; these take
# 1.5 times the product's time over keys, and 1.45 over rows. One core of a Xeon with AVX-512, torch 2.13.0, 2026-11-21. On an
# AMD EPYC plain PyTorch is more exact: dq of 4,096 keys is 1.8 times as far off in parts of 64, below 1.5 in those of 32.
PART_OF_HEAD_DIM = 16
PART_OF_KEYS = 32
PART_OF_ROWS = 32
# Up to here float64 takes no longer than parts do, or little: without AVX-512 64 takes 0.15 s instead of 0.14, both passes of
# 2,048 tokens, and dk is off by 1.0 times plain PyTorch's largest error instead of 1.53 (an AMD EPYC, 2026-11-23).
SHORT_HEAD_DIM = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 64

# Keys of a row of fp32 inputs that float64 computes. Of a few roundings the largest decides, and it may well be 1.5 times as
# large as plain PyTorch's: even that, with the keys in another order, breaks the accuracy rule in one tensor of thirty.
FEW_KEYS = 128

# Scores of an fp32 item that float64 computes where a gradient is one sum per head: of a few numbers, luck decides which of two
# equally exact ways is 1.5 times as far off (one in 20 random problems of up to 420 x 420 broke the accuracy rule; now none).
# Above that it would cost more than the 3 times of SDPA that a modifier may take.
SCORES_OF_SUMS = 2**20


def strict(p: AttentionProblem) -> bool:
    """Whether float32 sums are to be stricter than those of torch's flash attention: as "ieee" asks for, and of the few
    keys of a call that returns lse, which that kernel rounds as much as the others' many.
    """
    return p.dtype is DType.FP32 and (p.precision == "ieee" or (p.returns_lse and region_of(p).keys <= FEW_KEYS))


def lse_dtype(p: AttentionProblem) -> torch.dtype:
    """The dtype of lse."""
    return torch.float64 if p.dtype is DType.FP64 else torch.float32


def score_dtype(p: AttentionProblem) -> torch.dtype:
    """The dtype of scores and sums."""
    if p.dtype is DType.FP64:
        return torch.float64
    if p.dtype is not DType.FP32:
        return torch.float32
    region = region_of(p)
    few = region.keys <= FEW_KEYS or (sums_per_head(p) and region.rows * region.keys <= SCORES_OF_SUMS)
    return torch.float64 if few else torch.float32


def dtypes_of_rows(p: AttentionProblem, first: int, stop: int) -> tuple[torch.dtype, torch.dtype]:
    """`score_dtype` and `product_dtype` of the local rows [first, stop), which may see few keys of many."""
    if p.dtype is DType.FP32 and region_of(p).most_keys(first, stop - 1) <= FEW_KEYS:
        return torch.float64, torch.float64
    return score_dtype(p), product_dtype(p)


def product_dtype(p: AttentionProblem) -> torch.dtype:
    """The inputs' own dtype where the CPU multiplies it faster than float32 and the tiles are high enough, else `score_dtype`.

    q k^T is float32 always: torch gives products of 16-bit numbers in 16 bits only, and lse needs more.
    """
    region = region_of(p)
    captured = any(tensor.grad for spec in p.score for tensor in spec.tensors)
    if (
        region.rows == 0
        or captured  # a gradient of single scores, or of sums that cancel: dp's 16 bits would show
        or p.exact_delta  # formed of dp before it is rounded
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


# From so many keys on PyTorch's forward takes less time in float32, widened, than in 16 bits which are not multiplied faster:
# 1 x 1024, 8 heads of 64, causal, fp16 176 ms, bf16 107, float32 90 to 105 (one core of an EPYC without AVX-512, torch 2.13.0).
MANY_KEYS = 256


def widens(p: AttentionProblem) -> bool:
    """Whether PyTorch computes a 16-bit problem's forward in float32, so that its out, not rounded yet, serves the backward."""
    return p.dtype is not DType.FP32 and region_of(p).keys >= MANY_KEYS and not multiplies(p.dtype)


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
    """Memory that every tile of a call reuses: the faults of fresh pages cost as much as a pass over the tile.

    `exact`: float32 products are summed in parts, or in float64. `sharp`: those over head_dim in float64, and rounded once.
    """

    def __init__(self, exact: bool = False) -> None:
        self.made: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.exact, self.sharp = exact, False

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised and dense; what had this name and dtype before is overwritten."""
        size, flat = math.prod(shape), self.made.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self.made[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return flat[:size].view(shape)

    def product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b, of batches of matrices that are summed over head_dim, in their dtype."""
        if a.dtype is torch.float32 and (self.sharp or (self.exact and a.shape[2] <= SHORT_HEAD_DIM)):
            return self.cast(name, self._product(name, a.double(), b.double(), SHORT_HEAD_DIM), torch.float32)
        return self._product(name, a, b, PART_OF_HEAD_DIM)

    def add_product(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, part: int) -> None:
        """total += a @ b, of batches of matrices in one dtype; an exact float32 one adds up `part` terms at a time, and those
        of a single column by `sum`: a product adds them up one by one, parts or not (dq of head_dim 1 and 300 keys is off by
        1.3 times plain PyTorch's error, in median, and by 0.6).
        """
        if a.dtype.itemsize == 2 and a.shape[2] % NARROW_LENGTH:
            a, b = a.to(total.dtype), b.to(total.dtype)
        if self.exact and b.shape[2] == 1:
            total += torch.mul(a, b.mT, out=self.empty("added", tuple(a.shape), a.dtype)).sum(2, keepdim=True)
        elif a.dtype is total.dtype and not (self.exact and a.shape[2] > part):
            total.baddbmm_(a, b)
        else:
            total += self._product("added", a, b, part)

    def _product(self, name: str, a: torch.Tensor, b: torch.Tensor, part: int) -> torch.Tensor:
        """a @ b; an exact float32 one adds up `part` terms of each sum at a time."""
        made = self.empty(name, (a.shape[0], a.shape[1], b.shape[2]), a.dtype)
        if not self.exact or a.dtype is not torch.float32 or a.shape[2] <= part:
            return torch.bmm(a, b, out=made)
        first, *others = zip(a.split(part, 2), b.split(part, 1), strict=True)
        torch.bmm(*first, out=made)
        for left, right in others:
            made.baddbmm_(left, right)
        return made

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in another dtype; itself where it has that already."""
        return tensor if tensor.dtype is dtype else self.empty(name, tuple(tensor.shape), dtype).copy_(tensor)
