"""Triton's interpreter as tests want it: quick, and silent about what overflows."""

from __future__ import annotations

import numpy as np

from tests.quicken import quicken


def hasten() -> None:
    """Patch the interpreter of this process, whose arithmetic flashtile itself mends."""
    quicken()
    np.seterr(all="ignore")  # overflow to inf and 0 * inf are the business of the tests, not of numpy's warnings
