"""The norms' kernels: rows forward, rows backward with this program's share of the parameters' gradients, and their sum."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.exchange import hand_out, pair, wait_for
from flashtile.kernels.device.number import number, quotient
from flashtile.kernels.device.random import keep_elements
from flashtile.triton_glue.language import constexpr, jit, tl

LINE = constexpr(8)  # columns of which one thread has all: 16 bytes of them in 16 bits


@dataclass(frozen=True)
class NormTile:
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
    exact: bool  # in fp32: rounded quotients, and a LayerNorm's gradients summed over rows in float64; memory is slow still
    wide: bool  # a backward's numbers
    first_read: str  # how a forward's first reading of a chunk leaves it in L2: its eviction policy


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
def mixed(inputs, strides, row, first, rows, scale, drop, POLICY: tl.constexpr, T: tl.constexpr):
    """h of a tile, in float32; 0 outside."""
    x_ptr, residual_ptr, x1_ptr, rowscale_ptr, colscale_ptr, subset_ptr, seed_ptr = inputs
    column = first + tl.arange(0, T.block)
    inside = (row < rows)[:, None] & (column < T.hidden)[None, :]
    x_row, there = row, inside
    if subset_ptr is not None:
        x_row, exists = source_rows(subset_ptr, row, rows)
        there = exists[:, None] & inside
    x = tl.load(element(x_ptr, strides[0], x_row, column), mask=there, other=0.0, eviction_policy=POLICY).to(tl.float32)
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
            x1 = tl.load(element(x1_ptr, strides[2], row, column), mask=inside, other=0.0, eviction_policy=POLICY).to(
                tl.float32
            )
            if T.drops:
                x1 = tl.where(keep(seed_ptr, row, first, 1, drop[0], T), x1 * drop[1], 0.0)
            x += x1
        if residual_ptr is not None:
            at = element(residual_ptr, strides[1], row, column)
            x += tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
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
def add_moments(state, h, first, T: tl.constexpr):
    """(count, mean, sum of squares around it) of each line of columns, after a tile more; no thread waits for another.

    Merged as in Chan, Golub and LeVeque (1979). An RMSNorm's are around 0.
    """
    ROWS: tl.constexpr = T.rows  # Triton 3.6 takes no attribute in a shape
    LINES: tl.constexpr = T.block // LINE
    before, mean, squares = state
    lines = tl.reshape(h, [ROWS, LINES, LINE])
    if T.mean:
        line = tl.arange(0, LINES)
        count = tl.minimum(tl.maximum(T.hidden - first - line * LINE, 0), LINE).to(tl.float32)[None, :]
        here = tl.sum(lines, 2) / tl.maximum(count, 1.0)
        off = lines - here[:, :, None]
        if T.hidden % T.block:
            column = first + line[:, None] * LINE + tl.arange(0, LINE)[None, :]
            off = tl.where((column < T.hidden)[None, :, :], off, 0.0)
        gap = here - mean
        share = count / tl.maximum(before + count, 1.0)
        return before + count, mean + gap * share, squares + tl.sum(off * off, 2) + gap * gap * (before * share)
    else:
        return before, mean, squares + tl.sum(lines * lines, 2)


@jit
def norm_forward(inputs, weights, outputs, kept, strides, rows, eps, scale, drop, T: tl.constexpr):
    """T.rows rows of out, out1, h, mean and rstd. Rows of several chunks are read twice, then from the end: L2 has that."""
    row = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    ROWS: tl.constexpr = T.rows
    LINES: tl.constexpr = T.block // LINE
    READ: tl.constexpr = T.first_read
    squares = tl.zeros([ROWS, LINES], tl.float32)
    state = (tl.zeros([1, LINES], tl.float32), squares, squares)
    h = mixed(inputs, strides, row, 0, rows, scale, drop, READ, T)
    state = add_moments(state, h, 0, T)
    for chunk in tl.range(1, T.chunks):
        h = mixed(inputs, strides, row, chunk * T.block, rows, scale, drop, READ, T)
        state = add_moments(state, h, chunk * T.block, T)
    count, means, squares = state
    mean = quotient(tl.sum(count * means, 1), T.hidden, T)
    if T.mean:
        off = means - mean[:, None]
        squares += count * (off * off)
    spread = tl.sqrt_rn(quotient(tl.sum(squares, 1), T.hidden, T) + eps)
    rstd = quotient(tl.full(spread.shape, 1.0, tl.float32), spread, T)
    if T.chunks == 1:
        emit(h, mean, rstd, weights, outputs, row, 0, rows, T)
    for done in tl.range(1, T.chunks + 1 if T.chunks > 1 else 1):
        first = (T.chunks - done) * T.block
        h = mixed(inputs, strides, row, first, rows, scale, drop, "evict_first", T)
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
def load_tiles(given, subset_ptr, strides, row, first, rows, T: tl.constexpr):
    """h, dout and dout1 (or dout) of a tile, as they are stored; 0 outside."""
    h_ptr, dout_ptr, dout1_ptr, _dh, _mean, _rstd = given
    column = first + tl.arange(0, T.block)
    inside = (row < rows)[:, None] & (column < T.hidden)[None, :]
    out_row, there = row, inside
    if subset_ptr is not None:
        out_row, wanted = source_rows(subset_ptr, row, rows)
        there = wanted[:, None] & inside
    h = tl.load(element(h_ptr, strides[0], row, column), mask=inside, other=0.0)
    dout = tl.load(element(dout_ptr, strides[1], out_row, column), mask=there, other=0.0)
    dout1 = dout
    if dout1_ptr is not None:
        dout1 = tl.load(element(dout1_ptr, strides[2], out_row, column), mask=there, other=0.0)
    return h, dout, dout1


@jit
def weighted(tiles, given, weights, held, row, first, rows, T: tl.constexpr):
    """(normalised h, dout, dout1, gradient of the normalised h) of a tile, as `number`s; held: `load_weights`'."""
    h, dout, dout1 = number(tiles[0], T), number(tiles[1], T), number(tiles[2], T)
    column = first + tl.arange(0, T.block)
    rstd = tl.load(given[5] + row, mask=row < rows, other=0.0)[:, None]
    if T.mean:
        h -= tl.load(given[4] + row, mask=row < rows, other=0.0)[:, None]
        h = tl.where((row < rows)[:, None] & (column < T.hidden)[None, :], h, 0.0)
    h *= rstd
    grad = dout
    if weights[0] is not None:
        grad = dout * held[0]
    if given[2] is not None:
        grad += dout1 * held[1]
    return h, dout, dout1, grad


@jit
def row_sums(h, grad, T: tl.constexpr):
    """Sums over (a part of) rows of grad * normalised h and of grad, the latter in float64 in a LayerNorm with T.exact."""
    along = tl.sum(h * grad, 1)
    if T.exact and T.mean:
        grad = grad.to(tl.float64)
    return along, tl.sum(grad, 1)


@jit
def row_means(along, plain, T: tl.constexpr):
    """Of whole rows' sums. With T.exact equal gradients are their own mean, and leave nothing."""
    if T.exact and T.mean:
        plain = plain.to(tl.float64)
    return along / T.hidden, number(plain / T.hidden, T)


@jit
def norm_backward_sums(given, weights, sums_ptr, strides, rows, T: tl.constexpr):
    """sums (2, rows): over a row of grad * normalised h and of grad, for rows of several chunks."""
    row = tl.program_id(0).to(tl.int64) * T.rows + tl.arange(0, T.rows)
    ROWS: tl.constexpr = T.rows
    along = tl.zeros([ROWS], tl.float32)
    plain = along
    for chunk in tl.range(0, T.chunks):
        held = load_weights(weights, chunk * T.block, T)
        tiles = load_tiles(given, weights[2], strides, row, chunk * T.block, rows, T)
        h, _dout, _dout1, grad = weighted(tiles, given, weights, held, row, chunk * T.block, rows, T)
        here, there = row_sums(h, grad, T)
        along += here
        plain += there.to(tl.float32)
    tl.store(sums_ptr + row, along, mask=row < rows)
    tl.store(sums_ptr + rows + row, plain, mask=row < rows)


@jit
def hand_out_sums(words_ptr, strip, tiles, given, weights, held, row, first, rows, T: tl.constexpr):
    """Tell the other strips of one row this one's sums."""
    h, _dout, _dout1, grad = weighted(tiles, given, weights, held, row, first, rows, T)
    at = words_ptr + tl.max(row, 0) * T.chunks + strip
    along, plain = row_sums(h, grad, T)
    hand_out(at, tl.sum(along, 0), tl.sum(plain.to(tl.float32), 0), tl.max(row, 0) < rows)


@jit
def take_means(words_ptr, row, T: tl.constexpr):
    """The means of one row, of all strips' sums."""
    STRIPS: tl.constexpr = T.chunks
    found = wait_for(words_ptr + tl.max(row, 0) * STRIPS, STRIPS)
    along, plain = pair(found[0])
    for i in tl.static_range(1, STRIPS):
        a, b = pair(found[i])
        along += a
        plain += b
    zero = tl.zeros_like(row).to(tl.float32)
    return row_means(along + zero, plain + zero, T)


@jit
def norm_backward(given, weights, source, outputs, sums, strides, rows, scale, drop, T: tl.constexpr, SLOTS: tl.constexpr):
    """dx, dresidual, dx1, and this program's share of the parameters' gradients, of one strip of columns.

    A program walks every so many rows and sums parameters' gradients in registers; `sum_columns` adds the programs'.
    sums = (row sums of `norm_backward_sums` or None, partial sums (slots, programs, hidden) or None, words (rows, strips) by
    which the strips' programs tell one another their parts of a row's sums, or None: a row is finished after the next one's
    are told). SLOTS: the slot of weight, bias, weight1, bias1, colscale, or None.
    """
    strip = tl.program_id(0) if T.chunks > 1 else 0
    first = strip * T.block
    ROWS: tl.constexpr = T.rows
    BLOCK: tl.constexpr = T.block
    zero = number(tl.zeros([ROWS, BLOCK], tl.float32), T)
    totals = (zero, zero, zero, zero, zero)
    held = load_weights(weights, first, T)
    begin, step = tl.program_id(1) * T.rows, tl.num_programs(1) * T.rows
    if sums[2] is not None:
        row = tl.cast(begin, tl.int64) + tl.arange(0, T.rows)
        tiles = load_tiles(given, weights[2], strides, row, first, rows, T)
        hand_out_sums(sums[2], strip, tiles, given, weights, held, row, first, rows, T)
        for start in tl.range(begin + step, rows + step, step, num_stages=T.stages):
            if not T.holds:
                held = load_weights(weights, first, T)
            row = tl.cast(start, tl.int64) + tl.arange(0, T.rows)
            following = load_tiles(given, weights[2], strides, row, first, rows, T)
            hand_out_sums(sums[2], strip, following, given, weights, held, row, first, rows, T)
            row -= step
            means = take_means(sums[2], row, T)
            places = (source, outputs, strides, scale, drop)
            totals = finish(totals, tiles, means, given, weights, held, places, row, first, rows, T, SLOTS)
            tiles = following
    else:
        for start in tl.range(begin, rows, step, num_stages=T.stages):
            if not T.holds:
                held = load_weights(weights, first, T)
            row = tl.cast(start, tl.int64) + tl.arange(0, T.rows)
            tiles = load_tiles(given, weights[2], strides, row, first, rows, T)
            if sums[0] is not None:
                along = tl.load(sums[0] + row, mask=row < rows, other=0.0)
                plain = tl.load(sums[0] + rows + row, mask=row < rows, other=0.0)
                means = row_means(along, plain, T)
            else:
                h, _dout, _dout1, grad = weighted(tiles, given, weights, held, row, first, rows, T)
                along, plain = row_sums(h, grad, T)
                means = row_means(along, plain, T)
            places = (source, outputs, strides, scale, drop)
            totals = finish(totals, tiles, means, given, weights, held, places, row, first, rows, T, SLOTS)
    dweight, dbias, dweight1, dbias1, dcolscale = totals
    if SLOTS[0] is not None:
        share(sums[1], dweight, SLOTS[0], first, T)
    if SLOTS[1] is not None:
        share(sums[1], dbias, SLOTS[1], first, T)
    if SLOTS[2] is not None:
        share(sums[1], dweight1, SLOTS[2], first, T)
    if SLOTS[3] is not None:
        share(sums[1], dbias1, SLOTS[3], first, T)
    if SLOTS[4] is not None:
        share(sums[1], dcolscale, SLOTS[4], first, T)


@jit
def finish(totals, tiles, means, given, weights, held, places, row, first, rows, T: tl.constexpr, SLOTS: tl.constexpr):
    """A tile's gradients, by the means over whole rows of gradient * normalised h and of gradient; totals with it."""
    dweight, dbias, dweight1, dbias1, dcolscale = totals
    source, outputs, strides, scale, drop = places
    x_ptr, rowscale_ptr, colscale_ptr, subset_ptr, seed_ptr = source
    dx_ptr, dresidual_ptr, dx1_ptr = outputs
    column = first + tl.arange(0, T.block)
    exists = column < T.hidden
    inside = (row < rows)[:, None] & exists[None, :]
    h, dout, dout1, grad = weighted(tiles, given, weights, held, row, first, rows, T)
    if SLOTS[0] is not None:
        dweight += dout * h
    if SLOTS[1] is not None:
        dbias += dout
    if given[2] is not None:
        if SLOTS[2] is not None:
            dweight1 += dout1 * h
        if SLOTS[3] is not None:
            dbias1 += dout1
    dh = grad
    if T.mean:
        dh -= means[1][:, None]
    dh -= h * means[0][:, None]
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
    return dweight, dbias, dweight1, dbias1, dcolscale


@jit
def share(partial_ptr, total, SLOT: tl.constexpr, first, T: tl.constexpr):
    """Write this program's sums of a parameter's gradient."""
    column = first + tl.arange(0, T.block)
    at = (SLOT * tl.num_programs(1) + tl.program_id(1)) * T.hidden
    tl.store(partial_ptr + at + column, tl.sum(total, 0), mask=column < T.hidden)
