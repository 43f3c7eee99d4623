"""Seeds of dropout, and what they keep, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.dropout import SEED_WORDS, Dropout, keep, no_dropout, placed
from flashtile.problem.number import plain, told


def dropout_mask(
    dropout: Dropout, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Boolean (batch, heads_q, seqlen_q, seqlen_k): which probabilities `attention` keeps with this dropout.

    On `device`, by default that of the seed. Raises InvalidProblem for a dropout without a seed, which draws at every call.
    """
    if not isinstance(dropout, Dropout):
        raise InvalidProblem(f"dropout is a {type(dropout).__name__}; it must be a flashtile.Dropout.")
    if dropout.seed is None:
        raise InvalidProblem("dropout has no seed; every call draws a new one. Give it an int or a tensor.")
    batch, heads_q, seqlen_q, seqlen_k = map(plain, (batch, heads_q, seqlen_q, seqlen_k))
    for name, size in (("batch", batch), ("heads_q", heads_q), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidProblem(f"{name} is {told(size)}; it must be an int, at least 0.")
    if isinstance(dropout.seed, torch.Tensor):
        check_seed(dropout.seed, dropout.seed.device)
    if device is None:
        device = dropout.seed.device if isinstance(dropout.seed, torch.Tensor) else torch.device("cpu")
    seed = draw_seed(dropout, torch.device(device))
    sizes = (batch, heads_q, seqlen_q, seqlen_k)
    b, h, i, j = (torch.arange(n, device=device).view(-1, *(1,) * (3 - axis)) for axis, n in enumerate(sizes))
    return kept(dropout.p, b, h, i, j, heads_q, seed)


def kept(p: float, batch: Any, head: Any, row: Any, key: Any, heads_q: int, words: torch.Tensor) -> torch.Tensor:
    """Boolean: whether the probabilities at these int64 positions of a call, which broadcast, are kept; of its seed's words."""
    seed = words[:SEED_WORDS].view(torch.int64)
    if len(words) == SEED_WORDS:
        return keep(p, batch, head, row, key, heads_q, seed)
    head, row, key = placed(words[SEED_WORDS:].long(), batch, head, row, key, heads_q)
    return keep(p, 0, head, row, key, heads_q, seed)


def draw_seed(dropout: Dropout, device: torch.device) -> torch.Tensor:
    """The words of (seed, offset) for one call, int32 (4,), and behind them those of its origin, if it has one: a copy, so that
    the backward finds what the forward used.
    """
    if dropout.origin is None:
        return _seed_words(dropout, device)
    words = [torch.full((1,), word, dtype=torch.int32, device=device) for word in dropout.origin.words]
    return torch.cat([_seed_words(dropout, device), *words])


def _seed_words(dropout: Dropout, device: torch.device) -> torch.Tensor:
    if dropout.seed is None:
        return random_words(device)
    if isinstance(dropout.seed, torch.Tensor):
        state = dropout.seed.to(device, copy=True).contiguous()
    else:
        # (seed, 0), by launches: a copy from the host would wait, and no graph records it. Nothing is written in place:
        # torch.func.linearize (PyTorch 2.13) leaves writes by index out of its map.
        state = torch.arange(1, -1, -1, dtype=torch.int64, device=device) * dropout.seed
    return state.view(torch.int32)


def random_words(device: torch.device) -> torch.Tensor:
    """The words of a new (seed, offset), int32 (4,), from PyTorch's generator of the device."""
    return torch.randint(-(2**31), 2**31, (4,), dtype=torch.int32, device=device)  # 2.11 views no int64 under vmap


def check_dropout(dropout: Any, device: torch.device) -> None:
    """Raise InvalidProblem unless it is a Dropout, of a seed for this device."""
    if not isinstance(dropout, Dropout):
        raise no_dropout(dropout)
    if not (dropout.seed is None or isinstance(dropout.seed, int)):
        check_seed(dropout.seed, device)


def check_seed(seed: Any, device: torch.device) -> None:
    """Raise InvalidProblem for a tensor that is not (seed, offset) on this device."""
    if not isinstance(seed, torch.Tensor) or seed.dtype is not torch.int64 or seed.shape != (2,):
        shape, dtype = tuple(seed.shape), getattr(seed, "dtype", type(seed).__name__)
        raise InvalidProblem(f"dropout seed has shape {shape} and is {dtype}; it must be an int64 tensor (2,): (seed, offset).")
    if seed.device != device:
        raise InvalidProblem(f"dropout seed is on {seed.device} and q is on {device}; they must be on one device.")
