"""GELU's tanh form (arXiv 1606.08415), x (1 + tanh(u)) / 2 = x sigmoid(2 u): of the latter nothing cancels.

2 u = RISE (x + CUBIC x^3), whose derivative is RISE (1 + 3 CUBIC x^2).
"""

from __future__ import annotations

from flashtile.triton_glue.language import constexpr

RISE = constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = constexpr(0.044715)
