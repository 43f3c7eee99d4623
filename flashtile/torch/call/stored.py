"""Tensors of 8 bits, in a cache or beside queries, and their scales: what a stored number is to be multiplied by."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain, told
from flashtile.problem.stored import Scaling, Stored
from flashtile.torch.execute.plain import is_compiling, is_traced

STORED = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
Maybe = torch.Tensor | None
Scales = tuple[Maybe, Maybe]  # of keys, of values
NO_SCALES: Scales = (None, None)
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # of scales


def stored_of(pool: torch.Tensor, scales: Scales) -> Stored | None:
    """What a pool holds, with scales as `check_scale` returns them; None where that is numbers of the queries' dtype."""
    if pool.dtype not in STORED:
        return None
    return Stored(STORED[pool.dtype], scaling_of(scales[0]), scaling_of(scales[1]))


def scaling_of(scale: Maybe) -> Scaling:
    """How a scale says it."""
    return "" if scale is None else "token" if scale.dim() == 3 else "head"


def bytes_of(pool: torch.Tensor) -> torch.Tensor:
    """The pool as kernels read it."""
    return pool.view(torch.uint8) if pool.dtype in STORED and pool.dtype is not torch.int8 else pool


def is_shared(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether values are the first columns of the keys, in the same memory."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    if k_cache.device.type == "meta":  # where nothing has an address
        one = k_cache.untyped_storage() is v_cache.untyped_storage()
        same = same and one and k_cache.storage_offset() == v_cache.storage_offset()
    return same and v_cache.shape[3] <= k_cache.shape[3] and v_cache.shape[:3] == k_cache.shape[:3]


def number_of(stored: torch.Tensor, scale: Maybe, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 8 bits, (..., heads_kv, head_dim), times their scales, (..., heads_kv), in dtype: rounded once."""
    wide = stored.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (wide if scale is None else wide * scale[..., None]).to(dtype)


def check_tensor(name: str, tensor: Any) -> None:
    """Raise InvalidProblem for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")


def check_kind(name: str, tensor: Any) -> None:
    """Raise InvalidProblem for what is no dense tensor."""
    check_tensor(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidProblem(f"{name} has layout {tensor.layout}; it must be a strided, dense tensor.")


def is_negated(tensor: torch.Tensor) -> bool:
    """Whether memory, which kernels read, holds the numbers before a negation. A compiled call resolves it."""
    return not is_compiling() and tensor.is_neg()


def check_resolved(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidProblem for a negated view."""
    if is_negated(tensor):
        raise InvalidProblem(f"{name} is a negated view; it must be a tensor of its own, as resolve_neg() gives.")


def check_kinds(**tensors: Any) -> None:
    """Raise InvalidProblem where one of these is no dense tensor."""
    for name, tensor in tensors.items():
        check_kind(name, tensor)


def check_scale(
    name: str, scale: Any, pool: torch.Tensor, batch: int, what: str = "the cache",
    axes: str = "the cache's (pages, page_size, heads_kv)",
) -> Maybe:  # fmt: skip
    """The scale as float32 (batch, heads_kv), or (pages, page_size, heads_kv); None where there is none.

    InvalidProblem for what is no scale, and, on the CPU, where looking costs nothing, for one of 0, NaN or infinity.
    """
    if scale is None:
        return None
    if pool.dtype not in STORED:
        kinds = "caches" if what == "the cache" else "tensors"
        raise InvalidProblem(
            f"{name} is given and {what} is {pool.dtype}; scales belong to {kinds} of float8_e4m3fn, float8_e5m2 or int8. "
            f"Leave {name} out."
        )
    heads = pool.shape[2]
    if not isinstance(scale, torch.Tensor):
        number = plain(scale)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InvalidProblem(f"{name} is a {type(scale).__name__}; it must be a float32 tensor, a number or None.")
        if not SMALLEST <= number <= LARGEST:
            positive = "positive and finite" if not 0 < number < math.inf else "positive and finite in float32"
            raise InvalidProblem(f"{name} is {told(number)}; it must be {positive}.")
        return torch.full((), number, dtype=torch.float32, device=pool.device).expand(batch, heads)
    check_kind(name, scale)
    check_resolved(name, scale)
    if scale.dtype is not torch.float32:
        raise InvalidProblem(f"{name} is {scale.dtype}; it must be float32: {name}.float().")
    if scale.device != pool.device:
        raise InvalidProblem(f"{name} is on {scale.device} and {what} is on {pool.device}; they must be on one device.")
    shape, token = tuple(scale.shape), tuple(pool.shape[:3])
    if shape == token:
        return scale
    if shape not in ((), (1,), (heads,), (batch, heads)):
        raise InvalidProblem(
            f"{name} has shape {shape}; it must be () for a scale of all, ({heads},) for one of each head, ({batch}, {heads}) "
            f"of each item's head, or {token} of each token's, which are {axes}."
        )
    if scale.device.type == "cpu" and not is_traced(scale):
        wrong = ~((scale > 0) & scale.isfinite())
        if bool(wrong.any()):
            raise InvalidProblem(f"{name} holds {float(scale[wrong][0])}; it must be positive and finite.")
    return scale.expand(batch, heads)


def check_scales(k_scale: Any, v_scale: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: int) -> Scales:
    """Both of a cache, as `check_scale` returns them; NO_SCALES itself where there is none."""
    if k_scale is None and v_scale is None:
        return NO_SCALES
    return check_scale("k_scale", k_scale, k_cache, batch), check_scale("v_scale", v_scale, v_cache, batch)
