"""Finds products of which mma.sync would read terms that are not there, in a kernel's TTGIR.

A thread holds `kWidth` neighbouring terms of an operand's row, and four threads the row: a product needs 4 * kWidth terms.
Triton 3.6.0 to 3.7.1 make kWidth 8 where an operand depends on a load of 8 bits and on `tl.join`, however short the product:
of 16 terms half are then left out and the others counted twice (kernels/portable/tile.py: WHOLE_FRAGMENT).
"""

from __future__ import annotations

import re

_MMA = re.compile(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2,", re.MULTILINE)
_LEFT = re.compile(r"tt\.dot .*? : tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = (#\w+), kWidth = (\d+)\}>>")
THREADS = 4  # hold a row of an operand


def short_sums(ttgir: str) -> list[str]:
    """What is wrong, "16 terms of kWidth 8", once for each such product; empty where nothing is."""
    ours = set(_MMA.findall(ttgir))
    found = [(int(terms), int(width)) for _, terms, parent, width in _LEFT.findall(ttgir) if parent in ours]
    return [f"{terms} terms of kWidth {width}" for terms, width in dict.fromkeys(found) if terms < THREADS * width]
