"""What the ops' plain PyTorch shares: dtypes by name, and the bits of `kernels/lib/random.py`.

Philox4x32-7: Salmon, Moraes, Dror, Shaw, SC 2011.
"""

from __future__ import annotations

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ROUNDS = 7
WORD = 0xFFFFFFFF


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) words of the product of 32-bit words, in int64 without overflow."""
    low, high = (b & 0xFFFF) * a, (b >> 16) * a  # each below 2^48
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
    rounds: int = ROUNDS,
) -> tuple[torch.Tensor, ...]:
    """Four words (int64, below 2^32) of each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(0xD2511F53, c0)
        high2, low2 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def keep_elements(seed: torch.Tensor, rows: int, columns: int, dropout_p: float, branch: int = 0) -> torch.Tensor:
    """Which elements of a (rows, columns) tensor a dropout keeps; seed is int64 (1,)."""
    device = seed.device
    group = torch.arange(-(-columns // 4), device=device)[None, :].expand(rows, -1)
    row = torch.arange(rows, device=device)[:, None].expand_as(group)
    zero = torch.zeros_like(group)
    words = philox((group, row, zero + branch, zero), (seed & WORD, (seed >> 32) & WORD))
    return torch.stack(words, -1).flatten(1)[:, :columns] >= round(dropout_p * 2**32)
