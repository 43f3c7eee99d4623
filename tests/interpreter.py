"""Triton's interpreter as tests want it: quick, and silent about what overflows."""

from __future__ import annotations

import numpy as np

from flashtile.triton_glue import language as _triton
from tests.quicken import TRITON, quicken


def hasten() -> None:
    """Patch the interpreter of this process, whose arithmetic flashtile itself mends."""
    if str(_triton.VERSION).startswith(TRITON):  # others' are left as slow as they are
        quicken()
    np.seterr(all="ignore")  # overflow to inf and 0 * inf are the business of the tests, not of numpy's warnings
