"""Cross-entropy's kernels: rows' losses with their gradients, gradients alone, and what sums over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashtile._triton import jit, tl
from flashtile.kernels.lib.exchange import hand_out, pair, wait_for
from flashtile.kernels.lib.exponential import LN2, LOG2E, exp, finite
from flashtile.kernels.lib.number import number, ratio


@dataclass(frozen=True)
class Tile:
    """Compile-time part: `block` columns a step, `line` in 16 bytes. `leads`: rows begin and end amid lines.

    `exact`, for fp32: natural exponents and an exponential exact to float32's last place, beside which memory is slow still.
    Otherwise exponents are base 2, by one multiplication, and the hardware's exponential takes them.
    """

    block: int
    line: int
    columns: int
    leads: bool
    pieces: int  # programs that share a row
    steps: int  # of a piece, at most
    walks: bool  # a program has several rows
    smooth: bool
    loss: bool  # rather than a shard's share
    mean: bool
    exact: bool
    wide: bool
    cut: ClassVar[bool] = False  # exp's other form


@jit
def unit(scale, T: tl.constexpr):
    """What makes exponents of logits."""
    if T.exact:
        return scale
    else:
        return scale * LOG2E


@jit
def power(x, T: tl.constexpr):
    """The exponential of exponents."""
    if T.exact:
        return exp(x, T)
    else:
        return tl.exp2(x)


@jit
def logarithm(x, T: tl.constexpr):
    """The exponent of which x is the exponential."""
    if T.exact:
        return tl.log(x)
    else:
        return tl.log2(x)


@jit
def natural_of(x, T: tl.constexpr):
    """An exponent, or a sum of them, in base e."""
    if T.exact:
        return x
    else:
        return x * LN2


@jit
def whole_lines(row, strides, T: tl.constexpr):
    """(columns before the first whole 16-byte line of a row, offset of that line, whole lines)."""
    begin = row.to(tl.int64) * strides[0]
    LINE: tl.constexpr = T.line
    if T.leads:
        head = tl.where(strides[1] == 1, (LINE - begin % LINE) % LINE, 0).to(tl.int32)
        head = tl.minimum(head, T.columns)
        return head, tl.multiple_of(begin + head, LINE), (T.columns - head) // LINE
    else:
        return 0, begin, T.columns // LINE


@jit
def line_numbers(T: tl.constexpr):
    """Lines of a step."""
    LINES: tl.constexpr = T.block // T.line
    return tl.arange(0, LINES)


@jit
def offsets(T: tl.constexpr):
    """Elements of a step, a line of 16 bytes to a thread."""
    LINE: tl.constexpr = T.line
    return line_numbers(T)[:, None] * LINE + tl.arange(0, LINE)[None, :]


@jit
def edge_columns(head, lines, T: tl.constexpr):
    """(columns outside of whole lines, which of them are there)."""
    LINE: tl.constexpr = T.line
    element = tl.arange(0, 2 * LINE)
    column = tl.where(element < LINE, element, head + lines * LINE + element - LINE)
    return column, (column < T.columns) & ((element >= LINE) | (element < head))


@jit
def add_lines(state, x, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of each line, after a line more; no thread waits for another."""
    top, total, plain = state
    higher = tl.maximum(top, tl.max(x, 1))
    pivot = finite(higher)
    total = total * power(top - pivot, T) + tl.sum(power(x - pivot[:, None], T), 1)
    return higher, total, plain


@jit
def add_step(state, logits_ptr, base, step, lines, stride, factor, MASKED: tl.constexpr, POLICY: tl.constexpr, T: tl.constexpr):
    """The state after a step of whole lines; MASKED: not all of its lines are there."""
    BLOCK: tl.constexpr = T.block
    at = logits_ptr + (base + tl.cast(step, tl.int64) * BLOCK * stride) + offsets(T) * stride
    top, total, plain = state
    if MASKED:
        there = (line_numbers(T) < lines - step * (T.block // T.line))[:, None]
        x = tl.load(at, mask=there, other=float("-inf"), eviction_policy=POLICY)
        x = tl.where(there, number(x, T) * factor, float("-inf"))
        if T.smooth:
            plain += tl.sum(tl.where(there, x, 0.0), 1)
    else:
        x = number(tl.load(at, eviction_policy=POLICY), T) * factor
        if T.smooth:
            plain += tl.sum(x, 1)
    return add_lines((top, total, plain), x, T)


@jit
def join(top, total, plain, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of all lines."""
    highest = tl.max(top, 0)
    return highest, tl.sum(total * power(top - finite(highest), T), 0), tl.sum(plain, 0)


@jit
def merged(one, other, T: tl.constexpr):
    """What `join` says of two parts of a row."""
    highest = tl.maximum(one[0], other[0])
    pivot = finite(highest)
    return highest, one[1] * power(one[0] - pivot, T) + other[1] * power(other[0] - pivot, T), one[2] + other[2]


@jit
def lse_of(state, T: tl.constexpr):
    """The logarithm of the sum of exponentials."""
    return finite(state[0]) + logarithm(state[1], T)


@jit
def fold_piece(logits_ptr, row, piece, strides, factor, POLICY: tl.constexpr, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of a piece of a row, of logits times `factor`; the first has the edges."""
    LINES: tl.constexpr = T.block // T.line
    head, base, lines = whole_lines(row, strides, T)
    top = number(tl.full([LINES], float("-inf"), tl.float32), T)
    total = tl.zeros_like(top)
    state = (top, total, total)
    whole = lines // LINES
    first = piece * T.steps
    for step in tl.range(first, tl.minimum(first + T.steps, whole)):
        state = add_step(state, logits_ptr, base, step, lines, strides[1], factor, False, POLICY, T)
    if T.leads or T.columns % T.block:
        if (whole >= first) & (whole < first + T.steps):
            state = add_step(state, logits_ptr, base, whole, lines, strides[1], factor, True, POLICY, T)
    joined = join(state[0], state[1], state[2], T)
    if T.leads:
        if piece == 0:
            column, there = edge_columns(head, lines, T)
            at = logits_ptr + row.to(tl.int64) * strides[0] + column * strides[1]
            x = number(tl.load(at, mask=there, other=float("-inf")), T) * factor
            x = tl.where(there, x, float("-inf"))
            edge = join(x, number(tl.where(there, 1.0, 0.0), T), tl.where(there, x, 0.0), T)
            joined = merged(joined, edge, T)
    return joined


@jit
def of_pieces(words, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of a row, of its pieces' lse and sums."""
    PIECES: tl.constexpr = T.pieces
    lse, plain = pair(words[0])
    top = lse
    for i in tl.static_range(1, PIECES):
        top = tl.maximum(top, pair(words[i])[0])
    pivot = finite(top)
    total = power(lse - pivot, T)
    for i in tl.static_range(1, PIECES):
        lse, rest = pair(words[i])
        total += power(lse - pivot, T)
        plain += rest
    return top, total, plain


@jit
def gradient(x, labelled, of_row, T: tl.constexpr):
    """Of logits, by what `write_piece` takes of a row; labelled: which of them is the label's, rounded no more than others."""
    factor, pivot, _label, along, at_label, at_all, _alive = of_row
    return along * power(number(x, T) * factor - pivot, T) + tl.where(labelled, at_all + at_label, at_all)


@jit
def write_step(
    logits_ptr, target_ptr, base, target_base, head, step, lines, strides, of_row, MASKED: tl.constexpr, T: tl.constexpr
):
    """The gradient of a step of whole lines; the logits of a row that does not count are not read."""
    BLOCK: tl.constexpr = T.block
    offset, there = offsets(T), of_row[6]
    begin = tl.cast(step, tl.int64) * BLOCK
    at = target_ptr + (target_base + begin * strides[1][1]) + offset * strides[1][1]
    left = lines - step * (T.block // T.line)
    if MASKED:
        there = (line_numbers(T) < tl.where(of_row[6], left, 0))[:, None]
    x = tl.load(logits_ptr + (base + begin * strides[0][1]) + offset * strides[0][1], mask=there, other=0.0,
                eviction_policy="evict_first")  # fmt: skip
    LINE: tl.constexpr = T.line
    label = of_row[2] - (step * BLOCK + head) - line_numbers(T) * LINE  # within each line: of elements only constants are left
    value = gradient(x, label[:, None] == tl.arange(0, LINE)[None, :], of_row, T).to(target_ptr.dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=(line_numbers(T) < left)[:, None], eviction_policy="evict_first")
    else:
        tl.store(at, value, eviction_policy="evict_first")


@jit
def write_columns(logits_ptr, target_ptr, row, column, there, strides, of_row, T: tl.constexpr):
    """The gradient of single columns, of which those that are there."""
    at = logits_ptr + row.to(tl.int64) * strides[0][0] + column.to(tl.int64) * strides[0][1]
    read = there & (column < tl.where(of_row[6], T.columns, 0))
    value = gradient(tl.load(at, mask=read, other=0.0), column == of_row[2], of_row, T)
    at = target_ptr + row.to(tl.int64) * strides[1][0] + column.to(tl.int64) * strides[1][1]
    tl.store(at, value.to(target_ptr.dtype.element_ty), mask=there)


@jit
def write_steps(logits_ptr, target_ptr, base, target_base, head, piece, lines, strides, of_row, T: tl.constexpr):
    """The gradient of a piece's whole lines, from the last on: what was read last L2 still has."""
    LINES: tl.constexpr = T.block // T.line
    whole, first = lines // LINES, piece * T.steps
    if T.leads or T.columns % T.block:
        if (whole >= first) & (whole < first + T.steps):
            write_step(logits_ptr, target_ptr, base, target_base, head, whole, lines, strides, of_row, True, T)
    end = tl.minimum(first + T.steps, whole)
    for done in tl.range(first, end):
        step = first + end - 1 - done
        write_step(logits_ptr, target_ptr, base, target_base, head, step, lines, strides, of_row, False, T)


@jit
def write_piece(logits_ptr, target_ptr, row, piece, strides, of_row, T: tl.constexpr):
    """The gradient of a piece of a row.

    of_row = (what makes exponents of logits, what these are measured from, label's column, what multiplies their
    exponentials, what the label's column gets more, what all columns do, whether any of these is not 0).
    """
    head, base, lines = whole_lines(row, strides[0], T)
    target_base = row.to(tl.int64) * strides[1][0] + head * strides[1][1]
    LINE: tl.constexpr = T.line
    if T.leads:
        if target_base % LINE == 0:
            aligned = tl.multiple_of(target_base, LINE)
            write_steps(logits_ptr, target_ptr, base, aligned, head, piece, lines, strides, of_row, T)
            if piece == 0:
                column, there = edge_columns(head, lines, T)
                write_columns(logits_ptr, target_ptr, row, column, there, strides, of_row, T)
        else:
            LINES: tl.constexpr = T.block // T.line
            first = piece * T.steps * T.block
            for start in tl.range(first, tl.minimum(first + T.steps * T.block, T.columns), LINES):
                column = start + line_numbers(T)
                write_columns(logits_ptr, target_ptr, row, column, column < T.columns, strides, of_row, T)
    else:
        write_steps(logits_ptr, target_ptr, base, target_base, head, piece, lines, strides, of_row, T)


@jit
def label_of(labels_ptr, row, first_class, ignore_index):
    """(column of the label, whether the row counts)."""
    label = tl.load(labels_ptr + row).to(tl.int64)
    return label - first_class, label != ignore_index


@jit
def portions(smoothing, classes, T: tl.constexpr):
    """How much of a row's loss is its label's, and how much any class's; T.wide: the former of the smaller, exacter latter."""
    if T.wide:
        of_all = tl.cast(smoothing[1], tl.float64)
        return 1.0 - of_all * classes, of_all
    else:
        return smoothing[0], smoothing[1]


@jit
def cross_entropy_forward(inputs, outputs, strides, smoothing, z_loss, scale, whole, rows, T: tl.constexpr):
    """Losses (or shares), lse and gradients: of a row or, where programs walk, of every so many.

    T.pieces programs share a row where it is long: rows that are being read stay in L2 until they are read again.
    whole = (classes in all, first class, ignore_index); smoothing = (1 - smoothing, smoothing / classes).
    """
    piece = tl.program_id(0) % T.pieces
    if T.walks:
        for row in tl.range(tl.program_id(0) // T.pieces, rows, tl.num_programs(0) // T.pieces):
            row_forward(tl.cast(row, tl.int32), piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T)
    else:
        row_forward(tl.program_id(0), piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T)


@jit
def row_forward(row, piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T: tl.constexpr):
    """A piece of a row: with a pointer for it its gradient too, of logits read the second time from L2."""
    logits_ptr, labels_ptr, count_ptr = inputs
    loss_ptr, lse_ptr, gradient_ptr, words_ptr = outputs
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    here = (label >= 0) & (label < T.columns)
    x = tl.load(logits_ptr + row.to(tl.int64) * strides[0][0] + label * strides[0][1], mask=here & counts, other=0.0)
    if gradient_ptr is not None:
        state = fold_piece(logits_ptr, row, piece, strides[0], unit(scale, T), "evict_last", T)
    else:
        state = fold_piece(logits_ptr, row, piece, strides[0], unit(scale, T), "evict_first", T)
    if T.pieces > 1:
        words = words_ptr + row.to(tl.int64) * T.pieces
        hand_out(words + piece, lse_of(state, T), state[2], piece < T.pieces)
        state = of_pieces(wait_for(words, T.pieces), T)
    lse = lse_of(state, T)
    of_label, of_all = portions(smoothing, whole[0], T)
    share = -of_label * x.to(tl.float32) * scale
    if T.smooth:
        share -= of_all * natural_of(state[2], T)
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    share = tl.where(known, share, float("nan"))  # a label that is none of the classes
    natural = natural_of(lse, T)
    loss = share
    if T.loss:
        if T.smooth:
            loss += natural
        else:  # of a row that is sure of its label lse would say little beyond the label's logit
            exponent = tl.where(here, number(x, T) * unit(scale, T), 0.0)  # rounded, as the row's maximum is: no fma takes it
            off = finite(state[0]) - exponent + logarithm(state[1], T)
            loss = tl.where(known, natural_of(off, T), float("nan"))
        loss += z_loss * natural * natural
    if piece == 0:
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
        tl.store(lse_ptr + row, natural)
    if gradient_ptr is not None:
        weight = number(tl.cast(scale, tl.float32), T)
        if T.mean:
            weight = ratio(scale, tl.load(count_ptr), T)
        weight = tl.where(counts, tl.where(known, weight, float("nan")), 0.0)
        along, pivot = weight + 2.0 * z_loss * weight * natural, lse
        if T.exact:  # lse's own rounding stays out
            along, pivot = ratio(along, state[1], T), finite(state[0])
        along = tl.where(counts, along, 0.0)
        shares = (label, along, -weight * of_label, -weight * of_all)
        write_piece(logits_ptr, gradient_ptr, row, piece, strides, settled(scale, pivot, shares, T), T)


@jit
def settled(scale, pivot, shares, T: tl.constexpr):
    """What `write_piece` takes of a row: nothing of a row without a gradient counts, whatever its logits and lse."""
    label, along, at_label, at_all = shares
    alive = (along != 0.0) | (at_label != 0.0) | (at_all != 0.0)
    label = tl.where((label >= 0) & (label < T.columns), label, -1).to(tl.int32)
    return unit(scale, T), tl.where(alive, pivot, 0.0), label, along, at_label, at_all, alive


@jit
def cross_entropy_backward(inputs, given, dlogits_ptr, strides, smoothing, z_loss, scale, whole, T: tl.constexpr):
    """A piece of a row's gradient: from dloss, or from a shard's dshare and dlse."""
    logits_ptr, labels_ptr, count_ptr, lse_ptr = inputs
    dloss_ptr, dlse_ptr = given
    row = tl.program_id(0)
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    lse = tl.load(lse_ptr + row)
    of_label, of_all = portions(smoothing, whole[0], T)
    dloss = number(tl.load(dloss_ptr + row * strides[2][0]), T)
    if T.mean:
        dloss = ratio(dloss, tl.load(count_ptr), T)
    along = dloss + 2.0 * z_loss * dloss * lse
    if not T.loss:
        lse = finite(lse)  # a shard without any finite logit
        along = tl.zeros_like(dloss)
        if dlse_ptr is not None:
            along += tl.load(dlse_ptr + row * strides[3][0])
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    dloss = tl.where(known, dloss, float("nan"))
    weight = tl.where(counts, dloss, 0.0) * scale
    if T.loss:
        along = tl.where(counts, along, 0.0)
    shares = (label, along * scale, -weight * of_label, -weight * of_all)
    write_piece(logits_ptr, dlogits_ptr, row, tl.program_id(1), strides, settled(scale, unit(lse, T), shares, T), T)


@jit
def count_rows(labels_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """How many rows count."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + row, mask=row < rows, other=0).to(tl.int64)
        total += ((label != ignore_index) & (row < rows)).to(tl.int32)
    return tl.sum(total, 0).to(tl.float32)


@jit
def cross_entropy_count(labels_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """How many rows count, for gradients made together with the losses."""
    tl.store(count_ptr, count_rows(labels_ptr, rows, ignore_index, BLOCK))


@jit
def cross_entropy_reduce(
    losses_ptr, labels_ptr, count_ptr, loss_ptr, rows, ignore_index, COUNTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of the rows' losses, or their mean over those that count; with COUNTS their count too."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + row, mask=row < rows, other=0.0)
    loss = tl.sum(total, 0)
    if COUNTS:
        count = count_rows(labels_ptr, rows, ignore_index, BLOCK)
        tl.store(count_ptr, count)
        loss = tl.div_rn(loss, count)
    elif count_ptr is not None:
        loss = tl.div_rn(loss, tl.load(count_ptr))
    tl.store(loss_ptr, loss)


@jit
def cross_entropy_scale(gradient_ptr, dloss_ptr, count, BLOCK: tl.constexpr):
    """gradient *= dloss, in place; nothing is read or written where that is 1, as at the end of a model."""
    factor = tl.load(dloss_ptr)
    if factor != 1.0:
        for step in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = tl.cast(step, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(gradient_ptr + at, mask=at < count, other=0.0).to(tl.float32) * factor
            tl.store(gradient_ptr + at, value.to(gradient_ptr.dtype.element_ty), mask=at < count)
