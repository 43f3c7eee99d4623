"""Cross-entropy's kernels of rows: losses with their gradients, and gradients alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashtile.features.scores.softcap import tanh
from flashtile.kernels.device.exchange import hand_out, pair, wait_for
from flashtile.kernels.device.exponential import LN2, LOG2E, exp, finite
from flashtile.kernels.device.number import number, ratio
from flashtile.triton_glue.language import jit, tl


@dataclass(frozen=True)
class LossTile:
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
    caps: bool  # logits are bent by a softcap
    weighs: bool  # rows count by their label's class
    leans: bool  # smoothing counts by the classes too
    cut: ClassVar[bool] = False  # exp's other form


@jit
def unit(scale, T: tl.constexpr):
    """What makes exponents of logits."""
    if T.exact:
        return scale
    else:
        return scale * LOG2E


@jit
def measure(scale, T: tl.constexpr):
    """What `exponents` makes them with: a factor; with a softcap that of tanh's argument and that of tanh."""
    if T.caps:
        return ratio(scale[0], scale[1], T), unit(scale[1], T)
    else:
        return unit(scale[0], T)


@jit
def exponents(x, factor, T: tl.constexpr):
    """Of logits."""
    if T.caps:
        return tanh(number(x, T) * factor[0]) * factor[1]
    else:
        return number(x, T) * factor


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
def leaning(x, weight_ptr, column, there, T: tl.constexpr):
    """What smoothing adds up, of columns that are there: x, or with weights of classes each by its own."""
    if T.leans:
        return x * tl.load(weight_ptr + column, mask=there, other=0.0).to(x.dtype)
    else:
        return x


@jit
def add_step(
    state, pointers, base, head, step, lines, stride, factor, MASKED: tl.constexpr, POLICY: tl.constexpr, T: tl.constexpr
):
    """The state after a step of whole lines; MASKED: not all of its lines are there."""
    BLOCK: tl.constexpr = T.block
    at = pointers[0] + (base + tl.cast(step, tl.int64) * BLOCK * stride) + offsets(T) * stride
    column = head + step * BLOCK + offsets(T)
    top, total, plain = state
    if MASKED:
        there = (line_numbers(T) < lines - step * (T.block // T.line))[:, None]
        x = tl.load(at, mask=there, other=float("-inf"), eviction_policy=POLICY)
        x = tl.where(there, exponents(x, factor, T), float("-inf"))
        if T.smooth:
            plain += tl.sum(tl.where(there, leaning(x, pointers[1], column, there, T), 0.0), 1)
    else:
        x = exponents(tl.load(at, eviction_policy=POLICY), factor, T)
        if T.smooth:
            plain += tl.sum(leaning(x, pointers[1], column, column < T.columns, T), 1)
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
def fold_piece(pointers, row, piece, strides, factor, POLICY: tl.constexpr, T: tl.constexpr):
    """(maximum, sum of exponentials, sum) of a piece of a row, of `exponents`; the first has the edges.

    pointers = (logits, weights of the columns or None).
    """
    LINES: tl.constexpr = T.block // T.line
    head, base, lines = whole_lines(row, strides, T)
    top = number(tl.full([LINES], float("-inf"), tl.float32), T)
    total = tl.zeros_like(top)
    state = (top, total, total)
    whole = lines // LINES
    first = piece * T.steps
    for step in tl.range(first, tl.minimum(first + T.steps, whole)):
        state = add_step(state, pointers, base, head, step, lines, strides[1], factor, False, POLICY, T)
    if T.leads or T.columns % T.block:
        if (whole >= first) & (whole < first + T.steps):
            state = add_step(state, pointers, base, head, whole, lines, strides[1], factor, True, POLICY, T)
    joined = join(state[0], state[1], state[2], T)
    if T.leads:
        if piece == 0:
            column, there = edge_columns(head, lines, T)
            at = pointers[0] + row.to(tl.int64) * strides[0] + column * strides[1]
            x = exponents(tl.load(at, mask=there, other=float("-inf")), factor, T)
            x = tl.where(there, x, float("-inf"))
            plain = tl.where(there, leaning(x, pointers[1], column, there, T), 0.0)
            edge = join(x, number(tl.where(there, 1.0, 0.0), T), plain, T)
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
def gradient(x, labelled, weight_ptr, column, there, of_row, T: tl.constexpr):
    """Of logits, by what `write_piece` takes of a row; labelled: which of them is the label's, rounded no more than others."""
    factor, pivot, _label, along, at_label, at_all, _alive = of_row
    if T.leans:
        at_all = leaning(at_all, weight_ptr, column, there, T)
    if T.caps:
        bent = tanh(number(x, T) * factor[0])
        value = along * power(bent * factor[1] - pivot, T) + tl.where(labelled, at_all + at_label, at_all)
        return value * (1.0 - bent * bent)
    else:
        return along * power(number(x, T) * factor - pivot, T) + tl.where(labelled, at_all + at_label, at_all)


@jit
def write_step(pointers, base, target_base, head, step, lines, strides, of_row, MASKED: tl.constexpr, T: tl.constexpr):
    """The gradient of a step of whole lines; the logits of a row that does not count are not read."""
    BLOCK: tl.constexpr = T.block
    offset, there = offsets(T), of_row[6]
    begin = tl.cast(step, tl.int64) * BLOCK
    at = pointers[1] + (target_base + begin * strides[1][1]) + offset * strides[1][1]
    left = lines - step * (T.block // T.line)
    if MASKED:
        there = (line_numbers(T) < tl.where(of_row[6], left, 0))[:, None]
    x = tl.load(pointers[0] + (base + begin * strides[0][1]) + offset * strides[0][1], mask=there, other=0.0,
                eviction_policy="evict_first")  # fmt: skip
    LINE: tl.constexpr = T.line
    label = of_row[2] - (step * BLOCK + head) - line_numbers(T) * LINE  # within each line: of elements only constants are left
    labelled, column = label[:, None] == tl.arange(0, LINE)[None, :], head + step * BLOCK + offset
    value = gradient(x, labelled, pointers[2], column, there, of_row, T).to(pointers[1].dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=(line_numbers(T) < left)[:, None], eviction_policy="evict_first")
    else:
        tl.store(at, value, eviction_policy="evict_first")


@jit
def write_columns(pointers, row, column, there, strides, of_row, T: tl.constexpr):
    """The gradient of single columns, of which those that are there."""
    at = pointers[0] + row.to(tl.int64) * strides[0][0] + column.to(tl.int64) * strides[0][1]
    read = there & (column < tl.where(of_row[6], T.columns, 0))
    value = gradient(tl.load(at, mask=read, other=0.0), column == of_row[2], pointers[2], column, read, of_row, T)
    at = pointers[1] + row.to(tl.int64) * strides[1][0] + column.to(tl.int64) * strides[1][1]
    tl.store(at, value.to(pointers[1].dtype.element_ty), mask=there)


@jit
def write_steps(pointers, base, target_base, head, piece, lines, strides, of_row, T: tl.constexpr):
    """The gradient of a piece's whole lines, from the last on: what was read last L2 still has."""
    LINES: tl.constexpr = T.block // T.line
    whole, first = lines // LINES, piece * T.steps
    if T.leads or T.columns % T.block:
        if (whole >= first) & (whole < first + T.steps):
            write_step(pointers, base, target_base, head, whole, lines, strides, of_row, True, T)
    end = tl.minimum(first + T.steps, whole)
    for done in tl.range(first, end):
        step = first + end - 1 - done
        write_step(pointers, base, target_base, head, step, lines, strides, of_row, False, T)


@jit
def write_piece(pointers, row, piece, strides, of_row, T: tl.constexpr):
    """The gradient of a piece of a row.

    pointers = (logits, their gradient, weights of the columns or None). of_row = (what makes exponents of logits, what these
    are measured from, label's column, what multiplies their exponentials, what the label's column gets more, what all columns
    do, whether any of these is not 0).
    """
    head, base, lines = whole_lines(row, strides[0], T)
    target_base = row.to(tl.int64) * strides[1][0] + head * strides[1][1]
    LINE: tl.constexpr = T.line
    if T.leads:
        if target_base % LINE == 0:
            aligned = tl.multiple_of(target_base, LINE)
            write_steps(pointers, base, aligned, head, piece, lines, strides, of_row, T)
            if piece == 0:
                column, there = edge_columns(head, lines, T)
                write_columns(pointers, row, column, there, strides, of_row, T)
        else:
            LINES: tl.constexpr = T.block // T.line
            first = piece * T.steps * T.block
            for start in tl.range(first, tl.minimum(first + T.steps * T.block, T.columns), LINES):
                column = start + line_numbers(T)
                write_columns(pointers, row, column, column < T.columns, strides, of_row, T)
    else:
        write_steps(pointers, base, target_base, head, piece, lines, strides, of_row, T)


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
    inputs = (logits, labels, `cross_entropy_weigh`'s sums or the count of rows, weights of all classes), None for those that
    are not there; smoothing = (1 - smoothing, smoothing / classes); scale = (logit_scale, softcap if there is one);
    whole = (classes in all, first class, ignore_index).
    """
    piece = tl.program_id(0) % T.pieces
    if T.walks:
        for row in tl.range(tl.program_id(0) // T.pieces, rows, tl.num_programs(0) // T.pieces):
            row_forward(tl.cast(row, tl.int32), piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T)
    else:
        row_forward(tl.program_id(0), piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T)


@jit
def row_weights(weight_ptr, count_ptr, label, known, smoothing, z_loss, whole, T: tl.constexpr):
    """(what the label's logit counts in a row's loss, what any class's does, what lse does, what its square does)."""
    of_label, of_all = portions(smoothing, whole[0], T)
    if T.weighs:
        of_label *= number(tl.load(weight_ptr + label, mask=known, other=0.0), T)
        of_lse, of_square = of_label, number(tl.cast(z_loss, tl.float32), T)
        if T.leans and T.loss:
            of_lse += of_all * tl.load(count_ptr + 2)
        if T.mean:  # the square is divided by the rows that count, not by their weights
            of_square *= ratio(tl.load(count_ptr), tl.load(count_ptr + 1), T)
        return of_label, of_all, of_lse, of_square
    else:
        return of_label, of_all, 1.0, z_loss


@jit
def row_forward(row, piece, inputs, outputs, strides, smoothing, z_loss, scale, whole, T: tl.constexpr):
    """A piece of a row: with a pointer for it its gradient too, of logits read the second time from L2."""
    logits_ptr, labels_ptr, count_ptr, weight_ptr = inputs
    loss_ptr, lse_ptr, gradient_ptr, words_ptr = outputs
    if T.weighs:
        weight_ptr += whole[1]
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    here = (label >= 0) & (label < T.columns)
    x = tl.load(logits_ptr + row.to(tl.int64) * strides[0][0] + label * strides[0][1], mask=here & counts, other=0.0)
    factor, pointers = measure(scale, T), (logits_ptr, weight_ptr)
    if gradient_ptr is not None:
        state = fold_piece(pointers, row, piece, strides[0], factor, "evict_last", T)
    else:
        state = fold_piece(pointers, row, piece, strides[0], factor, "evict_first", T)
    if T.pieces > 1:
        words = words_ptr + row.to(tl.int64) * T.pieces
        hand_out(words + piece, lse_of(state, T), state[2], piece < T.pieces)
        state = of_pieces(wait_for(words, T.pieces), T)
    lse = lse_of(state, T)
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    of_label, of_all, of_lse, of_square = row_weights(weight_ptr, count_ptr, label, known & counts, smoothing, z_loss, whole, T)
    if T.caps:
        share = -of_label * natural_of(exponents(x, factor, T), T)
    else:
        share = -of_label * x.to(tl.float32) * scale[0]
    if T.smooth:
        share -= of_all * natural_of(state[2], T)
    share = tl.where(known, share, float("nan"))  # a label that is none of the classes
    natural = natural_of(lse, T)
    loss = share
    if T.loss:
        if T.smooth:
            if T.weighs:
                loss += of_lse * natural
            else:
                loss += natural
        else:  # of a row that is sure of its label lse would say little beyond the label's logit
            exponent = tl.where(here, exponents(x, factor, T), 0.0)  # rounded, as the row's maximum is: no fma takes it
            off = natural_of(finite(state[0]) - exponent + logarithm(state[1], T), T)
            if T.weighs:
                off *= of_lse
            loss = tl.where(known, off, float("nan"))
        loss += of_square * natural * natural
    if piece == 0:
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
        tl.store(lse_ptr + row, natural)
    if gradient_ptr is not None:
        weight = number(tl.cast(scale[0], tl.float32), T)
        if T.mean:
            weight = ratio(scale[0], tl.load(count_ptr), T)
        weight = tl.where(counts, tl.where(known, weight, float("nan")), 0.0)
        along, pivot = weight * of_lse + 2.0 * of_square * weight * natural, lse
        if T.exact:  # lse's own rounding stays out
            along, pivot = ratio(along, state[1], T), finite(state[0])
        along = tl.where(counts, along, 0.0)
        shares = (label, along, -weight * of_label, -weight * of_all)
        write_piece((logits_ptr, gradient_ptr, weight_ptr), row, piece, strides, settled(scale, pivot, shares, T), T)


@jit
def settled(scale, pivot, shares, T: tl.constexpr):
    """What `write_piece` takes of a row: nothing of a row without a gradient counts, whatever its logits and lse."""
    label, along, at_label, at_all = shares
    alive = (along != 0.0) | (at_label != 0.0) | (at_all != 0.0)
    label = tl.where((label >= 0) & (label < T.columns), label, -1).to(tl.int32)
    return measure(scale, T), tl.where(alive, pivot, 0.0), label, along, at_label, at_all, alive


@jit
def cross_entropy_backward(inputs, given, dlogits_ptr, strides, smoothing, z_loss, scale, whole, T: tl.constexpr):
    """A piece of a row's gradient: from dloss, or from a shard's dshare and dlse."""
    logits_ptr, labels_ptr, count_ptr, weight_ptr, lse_ptr = inputs
    dloss_ptr, dlse_ptr = given
    if T.weighs:
        weight_ptr += whole[1]
    row = tl.program_id(0)
    label, counts = label_of(labels_ptr, row, whole[1], whole[2])
    lse = tl.load(lse_ptr + row)
    known = (label + whole[1] >= 0) & (label + whole[1] < whole[0])
    of_label, of_all, of_lse, of_square = row_weights(weight_ptr, count_ptr, label, known & counts, smoothing, z_loss, whole, T)
    dloss = number(tl.load(dloss_ptr + row * strides[2][0]), T)
    if T.mean:
        dloss = ratio(dloss, tl.load(count_ptr), T)
    along = dloss * of_lse + 2.0 * of_square * dloss * lse
    if not T.loss:
        lse = finite(lse)  # a shard without any finite logit
        along = tl.zeros_like(dloss)
        if dlse_ptr is not None:
            along += tl.load(dlse_ptr + row * strides[3][0])
    dloss = tl.where(known, dloss, float("nan"))
    weight = tl.where(counts, dloss, 0.0) * scale[0]
    if T.loss:
        along = tl.where(counts, along, 0.0)
    shares = (label, along * scale[0], -weight * of_label, -weight * of_all)
    pointers = (logits_ptr, dlogits_ptr, weight_ptr)
    write_piece(pointers, row, tl.program_id(1), strides, settled(scale, unit(lse, T), shares, T), T)
