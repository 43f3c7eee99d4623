"""The band on the device."""

from __future__ import annotations

from flashtile._triton import jit, shared, tl
from flashtile.spec import mask

key_range = shared(mask.key_range)


@jit
def visible(row, key, sizes, band, T: tl.constexpr):
    """Which scores exist: inside both lengths and inside the band. sizes = (batch, seqlen_q, seqlen_k, ...)."""
    keep = (key < sizes[2]) & (row < sizes[1])
    position = row + (sizes[2] - sizes[1])
    if T.left:
        keep = keep & (key >= position - band[0])
    if T.right:
        keep = keep & (key <= position + band[1])
    return keep
