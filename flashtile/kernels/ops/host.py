"""What the ops' plain PyTorch shares: dtypes by name, and the bits of `kernels/device/random.py`."""

from __future__ import annotations

import torch

from flashtile.problem.dropout import WORD, philox, threshold

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def keep_elements(seed: torch.Tensor, rows: int, columns: int, dropout_p: float, branch: int = 0) -> torch.Tensor:
    """Which elements of a (rows, columns) tensor a dropout keeps; seed is int64 (1,)."""
    device = seed.device
    group = torch.arange(-(-columns // 4), device=device)[None, :].expand(rows, -1)
    row = torch.arange(rows, device=device)[:, None].expand_as(group)
    zero = torch.zeros_like(group)
    words = philox((group, row, zero + branch, zero), (seed & WORD, (seed >> 32) & WORD))
    return torch.stack(words, -1).flatten(1)[:, :columns] >= threshold(dropout_p)
