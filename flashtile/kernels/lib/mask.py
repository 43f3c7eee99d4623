"""The band on the device."""

from __future__ import annotations

from flashtile._triton import jit, shared, tl
from flashtile.spec import mask

key_range = shared(mask.key_range)


@jit
def visible(row, key, sizes, band, T: tl.constexpr):
    """Which scores exist: inside both lengths and inside band = (left, right)."""
    keep = (key < sizes.k) & (row < sizes.q)
    position = row + (sizes.k - sizes.q)
    if T.left:
        keep = keep & (key >= position - band[0])
    if T.right:
        keep = keep & (key <= position + band[1])
    return keep
