"""The norms' kernels: rows forward, rows backward with this program's share of the parameters' gradients, and their sum."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile._triton import jit, tl
from flashtile.kernels.lib.random import keep_elements


@dataclass(frozen=True)
class Tile:
    """Compile-time part of a call. `block` columns a step, `chunks` steps a row."""

    rows: int
    block: int
    hidden: int
    chunks: int
    stages: int  # of the loop over rows
    holds: bool  # weights stay in registers over that loop
    mean: bool
    mixes: bool
    scaled: bool
    drops: bool
    centered: bool
    stored: str


@jit
def element(ptr, strides, row, column):
    return ptr + row[:, None] * strides[0] + column.to(tl.int64)[None, :] * strides[1]


@jit
def parameter(ptr, column, inside, ADD: tl.constexpr):
    """A weight as a float32 row; with ADD the 1 that it is stored without."""
    value = tl.load(ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += 1.0
    return value[None, :]


@jit
def keep(seed_ptr, row, first, branch, threshold, T: tl.constexpr):
    return keep_elements(tl.load(seed_ptr), row, first, branch, threshold, T.rows, T.block)


@jit
def source_rows(subset_ptr, row, rows):
    """(rows to read or write, which of them are there), by a subset's 1-based indices."""
    index = tl.load(subset_ptr + row, mask=row < rows, other=0).to(tl.int64)
    return index - 1, index > 0


@jit
def rounded(x, T: tl.constexpr):
    """x as h holds it."""
    if T.stored == "bf16":
        return x.to(tl.bfloat16).to(tl.float32)
    if T.stored == "fp16":
        return x.to(tl.float16).to(tl.float32)
    return x


@jit
def mixed(inputs, strides, row, first, rows, scale, drop, T: tl.constexpr):
    """h of a tile, in float32; 0 outside."""
    x_ptr, residual_ptr, x1_ptr, rowscale_ptr, colscale_ptr, subset_ptr, seed_ptr = inputs
    column = first + tl.arange(0, T.block)
    inside = (row < rows)[:, None] & (column < T.hidden)[None, :]
    x_row, there = row, inside
    if subset_ptr is not None:
        x_row, exists = source_rows(subset_ptr, row, rows)
        there = exists[:, None] & inside
    x = tl.load(element(x_ptr, strides[0], x_row, column), mask=there, other=0.0).to(tl.float32)
    if T.mixes:
        if rowscale_ptr is not None:
            x *= tl.load(rowscale_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        if T.scaled:
            x *= scale
        if T.drops:
            x = tl.where(keep(seed_ptr, row, first, 0, drop[0], T), x * drop[1], 0.0)
        if colscale_ptr is not None:
            x *= parameter(colscale_ptr, column, column < T.hidden, False)
        if x1_ptr is not None:
            x1 = tl.load(element(x1_ptr, strides[2], row, column), mask=inside, other=0.0).to(tl.float32)
            if T.drops:
                x1 = tl.where(keep(seed_ptr, row, first, 1, drop[0], T), x1 * drop[1], 0.0)
            x += x1
        if residual_ptr is not None:
            x += tl.load(element(residual_ptr, strides[1], row, column), mask=inside, other=0.0).to(tl.float32)
        x = rounded(x, T)
    return x


@jit
def emit(h, mean, rstd, weights, outputs, row, first, rows, T: tl.constexpr):
    """Write a tile of out, out1 and h."""
    weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, subset_ptr = weights
    out_ptr, out1_ptr, h_ptr = outputs
    column = first + tl.arange(0, T.block)
    exists = column < T.hidden
    inside = (row < rows)[:, None] & exists[None, :]
    if h_ptr is not None:
        tl.store(h_ptr + row[:, None] * T.hidden + column[None, :], h.to(h_ptr.dtype.element_ty), mask=inside)
    if T.mean:
        h -= mean[:, None]
    h *= rstd[:, None]
    out_row, there = row, inside
    if subset_ptr is not None:
        out_row, wanted = source_rows(subset_ptr, row, rows)
        there = wanted[:, None] & inside
    at = out_row[:, None] * T.hidden + column[None, :]
    out = h
    if weight_ptr is not None:
        out = out * parameter(weight_ptr, column, exists, T.centered)
    if bias_ptr is not None:
        out += parameter(bias_ptr, column, exists, False)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)
    if out1_ptr is not None:
        out = h * parameter(weight1_ptr, column, exists, T.centered)
        if bias1_ptr is not None:
            out += parameter(bias1_ptr, column, exists, False)
        tl.store(out1_ptr + at, out.to(out1_ptr.dtype.element_ty), mask=there)


@jit
def moments(h, first, count, T: tl.constexpr):
    """(mean, sum of squares around it) of a tile's rows, of `count` columns; an RMSNorm's are around 0."""
    if T.mean:
        mean = tl.sum(h, 1) / count
        off = h - mean[:, None]
        if T.hidden % T.block:
            off = tl.where((first + tl.arange(0, T.block) < T.hidden)[None, :], off, 0.0)
        return mean, tl.sum(off * off, 1)
    return tl.zeros_like(tl.sum(h, 1)), tl.sum(h * h, 1)


@jit
def norm_forward(inputs, weights, outputs, kept, strides, rows, eps, scale, drop, T: tl.constexpr):
    """T.rows rows of out, out1, h, mean and rstd. Rows of several chunks are read twice, then from the end: L2 has that."""
    row = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    if T.chunks == 1:
        h = mixed(inputs, strides, row, 0, rows, scale, drop, T)
        mean, squares = moments(h, 0, T.hidden, T)
        rstd = 1.0 / tl.sqrt_rn(squares / T.hidden + eps)
        emit(h, mean, rstd, weights, outputs, row, 0, rows, T)
    else:
        ROWS: tl.constexpr = T.rows  # Triton 3.6 takes no attribute in a shape
        mean = tl.zeros([ROWS], tl.float32)
        squares, before = mean, mean
        for chunk in tl.range(0, T.chunks):  # partial moments are merged as in Chan, Golub and LeVeque (1979)
            h = mixed(inputs, strides, row, chunk * T.block, rows, scale, drop, T)
            count = tl.minimum(T.hidden - chunk * T.block, T.block).to(tl.float32)
            mean_here, squares_here = moments(h, chunk * T.block, count, T)
            gap = mean_here - mean
            mean += gap * (count / (before + count))
            squares += squares_here + gap * gap * (before * count / (before + count))
            before += count
        rstd = 1.0 / tl.sqrt_rn(squares / T.hidden + eps)
        for done in tl.range(0, T.chunks):
            first = (T.chunks - 1 - done) * T.block
            h = mixed(inputs, strides, row, first, rows, scale, drop, T)
            emit(h, mean, rstd, weights, outputs, row, first, rows, T)
    if kept[0] is not None:
        tl.store(kept[0] + row, mean, mask=row < rows)
    if kept[1] is not None:
        tl.store(kept[1] + row, rstd, mask=row < rows)


@jit
def load_weights(weights, first, T: tl.constexpr):
    """weight and weight1 of some columns; 0 where there is none."""
    column = first + tl.arange(0, T.block)
    weight = tl.zeros_like(column)[None, :].to(tl.float32)
    weight1 = weight
    if weights[0] is not None:
        weight = parameter(weights[0], column, column < T.hidden, T.centered)
    if weights[1] is not None:
        weight1 = parameter(weights[1], column, column < T.hidden, T.centered)
    return weight, weight1


@jit
def weighted(given, weights, held, strides, row, first, rows, T: tl.constexpr):
    """(normalised h, dout, dout1, gradient of the normalised h) of a tile, in float32; held: `load_weights`'."""
    h_ptr, dout_ptr, dout1_ptr, _dh, mean_ptr, rstd_ptr = given
    weight_ptr, _weight1_ptr, subset_ptr = weights
    column = first + tl.arange(0, T.block)
    exists = column < T.hidden
    inside = (row < rows)[:, None] & exists[None, :]
    out_row, there = row, inside
    if subset_ptr is not None:
        out_row, wanted = source_rows(subset_ptr, row, rows)
        there = wanted[:, None] & inside
    h = tl.load(element(h_ptr, strides[0], row, column), mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(element(dout_ptr, strides[1], out_row, column), mask=there, other=0.0).to(tl.float32)
    dout1 = dout
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    if T.mean:
        h -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        h = tl.where(inside, h, 0.0)
    h *= rstd
    grad = dout
    if weight_ptr is not None:
        grad = dout * held[0]
    if dout1_ptr is not None:
        dout1 = tl.load(element(dout1_ptr, strides[2], row, column), mask=inside, other=0.0).to(tl.float32)
        grad += dout1 * held[1]
    return h, dout, dout1, grad


@jit
def norm_backward_sums(given, weights, sums_ptr, strides, rows, T: tl.constexpr):
    """sums (2, rows): means over a row of grad * normalised h and of grad, for rows of several chunks."""
    row = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    ROWS: tl.constexpr = T.rows
    along = tl.zeros([ROWS], tl.float32)
    plain = along
    for chunk in tl.range(0, T.chunks):
        held = load_weights(weights, chunk * T.block, T)
        h, _dout, _dout1, grad = weighted(given, weights, held, strides, row, chunk * T.block, rows, T)
        along += tl.sum(h * grad, 1)
        plain += tl.sum(grad, 1)
    tl.store(sums_ptr + row, along / T.hidden, mask=row < rows)
    tl.store(sums_ptr + rows + row, plain / T.hidden, mask=row < rows)


@jit
def norm_backward(given, weights, source, outputs, sums, strides, rows, scale, drop, T: tl.constexpr, SLOTS: tl.constexpr):
    """dx, dresidual, dx1, and this program's share of the parameters' gradients, of one strip of columns.

    A program walks every so many rows and sums parameters' gradients in registers; `sum_columns` adds the programs'.
    sums = (row sums of `norm_backward_sums` or None, partial sums (slots, programs, hidden) or None).
    SLOTS: the slot of weight, bias, weight1, bias1, colscale, or None.
    """
    x_ptr, rowscale_ptr, colscale_ptr, subset_ptr, seed_ptr = source
    dx_ptr, dresidual_ptr, dx1_ptr = outputs
    first = tl.program_id(1) * T.block
    column = first + tl.arange(0, T.block)
    exists = column < T.hidden
    ROWS: tl.constexpr = T.rows
    BLOCK: tl.constexpr = T.block
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias, dweight1, dbias1, dcolscale = dweight, dweight, dweight, dweight
    held = load_weights(weights, first, T)
    for start in tl.range(tl.program_id(0) * T.rows, rows, tl.num_programs(0) * T.rows, num_stages=T.stages):
        row = tl.cast(start, tl.int64) + tl.arange(0, T.rows)
        inside = (row < rows)[:, None] & exists[None, :]
        if not T.holds:
            held = load_weights(weights, first, T)
        h, dout, dout1, grad = weighted(given, weights, held, strides, row, first, rows, T)
        if SLOTS[0] is not None:
            dweight += dout * h
        if SLOTS[1] is not None:
            dbias += dout
        if SLOTS[2] is not None:
            dweight1 += dout1 * h
        if SLOTS[3] is not None:
            dbias1 += dout1
        if sums[0] is not None:
            along = tl.load(sums[0] + row, mask=row < rows, other=0.0)
            plain = tl.load(sums[0] + rows + row, mask=row < rows, other=0.0)
        else:
            along, plain = tl.sum(h * grad, 1) / T.hidden, tl.sum(grad, 1) / T.hidden
        dh = grad - h * along[:, None]
        if T.mean:
            dh -= plain[:, None]
        dh *= tl.load(given[5] + row, mask=row < rows, other=0.0)[:, None]
        if given[3] is not None:
            dh += tl.load(element(given[3], strides[3], row, column), mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * T.hidden + column[None, :]
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, dh.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if dx1_ptr is not None:
            dx1 = dh
            if T.drops:
                dx1 = tl.where(keep(seed_ptr, row, first, 1, drop[0], T), dh * drop[1], 0.0)
            tl.store(dx1_ptr + at, dx1.to(dx1_ptr.dtype.element_ty), mask=inside)
        factor = dh
        if T.drops:
            factor = tl.where(keep(seed_ptr, row, first, 0, drop[0], T), dh * drop[1], 0.0)
        if rowscale_ptr is not None:
            factor *= tl.load(rowscale_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        if T.scaled:
            factor *= scale
        x_row, there = row, inside
        if subset_ptr is not None:
            x_row, found = source_rows(subset_ptr, row, rows)
            there = found[:, None] & inside
        if SLOTS[4] is not None:
            dcolscale += factor * tl.load(element(x_ptr, strides[4], x_row, column), mask=there, other=0.0).to(tl.float32)
        if dx_ptr is not None:
            if colscale_ptr is not None:
                factor *= parameter(colscale_ptr, column, exists, False)
            target = dx_ptr + x_row[:, None] * T.hidden + column[None, :]
            tl.store(target, factor.to(dx_ptr.dtype.element_ty), mask=there)
    if SLOTS[0] is not None:
        share(sums[1], dweight, SLOTS[0], column, exists, T)
    if SLOTS[1] is not None:
        share(sums[1], dbias, SLOTS[1], column, exists, T)
    if SLOTS[2] is not None:
        share(sums[1], dweight1, SLOTS[2], column, exists, T)
    if SLOTS[3] is not None:
        share(sums[1], dbias1, SLOTS[3], column, exists, T)
    if SLOTS[4] is not None:
        share(sums[1], dcolscale, SLOTS[4], column, exists, T)


@jit
def share(partial_ptr, total, SLOT: tl.constexpr, column, exists, T: tl.constexpr):
    at = (SLOT * tl.num_programs(0) + tl.program_id(0)) * T.hidden
    tl.store(partial_ptr + at + column, tl.sum(total, 0), mask=exists)
