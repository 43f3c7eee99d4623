"""Compares what Hopper's registers keep, in the emulator, with `problem/dropout.py`; prints the tiles in which they differ.

python -m tests.hopper.emulated_dropout
"""

# ruff: noqa: E402 (kernels are imported once the emulator stands under them)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gluon_emulator import language
from tests.hopper.emulator import install

install()

from flashtile.kernels.device.dropout import load_seed
from flashtile.kernels.sm90.device import dropout
from flashtile.problem.dropout import keep, threshold

SEED, HEADS = torch.tensor([-(2**62) + 12345, 2**40 + 99]), 3


def seed_of(p: float) -> Any:
    """What a kernel's argument becomes."""
    args = language.Pointer(SEED.view(torch.int32)), language.to_tensor(threshold(p) - 2**31), language.to_tensor(1 / (1 - p))
    return load_seed((args,), SimpleNamespace(modifiers=SimpleNamespace(dropout=True, count=0), wide=False))


def differs(p: float, columns: int, by_key: bool) -> bool:
    """Whether 64 x columns scores far from the beginning are kept otherwise."""
    row, column = 192, 320
    seed = seed_of(p)
    batch_head = language.to_tensor(1 * HEADS + 2)
    drawn = dropout.draw(seed, batch_head, language.to_tensor(row), language.to_tensor(column), columns, by_key)
    ones = language.full([64, columns], 1.0, torch.float32)
    found = [dropout.kept(ones, drawn, seed, by_predicates) for by_predicates in (False, True)]
    found.append(dropout.unpacked(dropout.packed(ones, drawn, seed, torch.bfloat16), torch.bfloat16))
    lines, places = torch.arange(row, row + 64)[:, None], torch.arange(column, column + columns)[None, :]
    at = (places, lines) if by_key else (lines, places)
    expected = keep(p, torch.tensor(1), torch.tensor(2), *at, HEADS, SEED)
    return any(not torch.equal(x > 0, expected) for x in found)


for p in (0.001, 0.1, 0.5, 0.7, 0.999):
    for columns in (32, 64, 128):
        for by_key in (False, True):
            if differs(p, columns, by_key):
                print(f"{p=} {columns=} {by_key=}")
