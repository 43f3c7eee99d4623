"""Scores of the backward: what is hidden, probabilities, the gradient of a product, and tiles of which parts may hold NaN."""

from flashtile.kernels.hopper.blank import blank_rows
from flashtile.kernels.hopper.gluon import fence_async_shared, gl, gluon
from flashtile.kernels.hopper.visit import seeing
from flashtile.kernels.lib.exponential import LOG2E


@gluon.jit
def blank_keys(memory, place, sizes, band, W: gl.constexpr, T: gl.constexpr):
    """Zero the keys that no query sees, before all of them are summed over for dq."""
    first, end = seeing(sizes.k, sizes.q, band[1], band[0], T.right, T.left)
    first_key = place.column if T.halves else place.column + W * 64
    if (first_key < first) | (first_key + 64 > end):
        blank_rows(memory.k.index(0 if T.halves else W).reshape([64, T.columns]), first - first_key, end - first_key)
        fence_async_shared()


@gluon.jit
def hide(x, first_query, first_key, sizes, band, T: gl.constexpr):
    """x (keys x queries) with zeros where `mask.visible` is false, at one comparison per score for each bound.

    Queries that do not exist have p = 0 anyway. A thread's columns are 8 j + k and an offset of its own, which joins the
    bounds: what is left to compare with are constants.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([64, COLUMNS // 8, 4, 2])
    L: gl.constexpr = parts.type.layout
    column = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    column = column * 8 + pair
    offset = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None] * 2
    key = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    aligned = stay(key - (sizes.k - sizes.q) - first_query)
    first = aligned * 0
    if T.right:
        first = aligned - band[1]
    if T.pads_keys:
        first = gl.where(key < sizes.k, first, 2147483647)
    keep = column >= first - offset
    if T.left:
        keep = keep & (column <= aligned + band[0] - offset)
    return gl.convert_layout(gl.where(keep, parts, 0.0).reshape([64, COLUMNS]), x.type.layout, assert_trivial=True)


@gluon.jit
def stay(x):
    """x, computed where this stands: otherwise the few tiles with a mask would make all others compare and select too."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def weigh(raw, level, first_query, first_key, masked, sizes, band, scale, T: gl.constexpr):
    """p of a tile of products (keys x queries). level is the queries', as `rows.attention_rows` gives it."""
    if T.folds:
        p = gl.exp2(raw * (scale * LOG2E))
    else:
        p = gl.exp2(raw * (scale * LOG2E) - level)
    if T.masks:
        if masked:
            p = hide(p, first_query, first_key, sizes, band, T)
    return p


@gluon.jit
def differentiate(p, dp, delta, first_query, first_key, masked, sizes, band, T: gl.constexpr):
    """The gradient of the scaled product."""
    if T.folds:
        ds = p * dp
    else:
        ds = p * (dp - delta)
    if T.masks:
        if masked:  # dp may be NaN where nothing is to be seen
            ds = hide(ds, first_query, first_key, sizes, band, T)
    return ds
