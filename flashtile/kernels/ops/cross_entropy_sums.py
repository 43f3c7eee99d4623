"""Cross-entropy's kernels over all rows: how many count, their weights, the reduced loss, and its gradient's factor."""

from __future__ import annotations

from flashtile.triton_glue.language import jit, tl


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
def cross_entropy_weigh(labels_ptr, weight_ptr, count_ptr, rows, classes, ignore_index, BLOCK: tl.constexpr):
    """count = (the sum of the weights of the labels of rows that count, how many these are, the sum of all weights)."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + row, mask=row < rows, other=0).to(tl.int64)
        counts = (label != ignore_index) & (label >= 0) & (label < classes) & (row < rows)
        total += tl.load(weight_ptr + label, mask=counts, other=0.0).to(tl.float32)
    every = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        every += tl.load(weight_ptr + column, mask=column < classes, other=0.0).to(tl.float32)
    tl.store(count_ptr, tl.sum(total, 0))
    tl.store(count_ptr + 1, count_rows(labels_ptr, rows, ignore_index, BLOCK))
    tl.store(count_ptr + 2, tl.sum(every, 0))


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
