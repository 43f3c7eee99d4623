"""Attention over a cache with keys and values as left operands: scores are keys x queries, the result is columns x queries.

The matrix unit takes 64 rows on the left and as few as 8 columns on the right. One query of a few heads, as rows, leaves most
of a tile to zeros, which are exponentiated like all others; as columns it leaves none. And left operands come from registers:
8 bits become fp16 there, and never go back to shared memory, which reads 16 KiB of 64 keys where it moved 112.

Of each four neighbours, in bytes, a thread makes its part of an operand. So a product goes through the columns of keys in
another order, as queries then do, too (`shuffled`), and rows of the result are the columns of values in another (`natural`).
"""

from typing import NamedTuple

from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import visible
from flashtile.kernels.device.softmax import Rows as Sums
from flashtile.kernels.device.stored import widened
from flashtile.kernels.sm90.cached.seat import DROP, STRIP, lifted, places
from flashtile.kernels.sm90.cached.tiles import blank, let_go, tile_of
from flashtile.kernels.sm90.device.layouts import (
    column_layout,
    key_bytes_layout,
    matrix_layout,
    operand_layout,
    row_layout,
    value_bytes_layout,
)
from flashtile.kernels.sm90.device.parts import first_parts
from flashtile.kernels.sm90.device.scores import level
from flashtile.triton_glue.gluon import (
    abreast,
    fence_async_shared,
    gl,
    gluon,
    pack,
    recast,
    uniform,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEIGHT = gl.constexpr(64)  # rows of a matrix instruction


class TurnedRows(NamedTuple):
    """State of T.rows queries."""

    acc: gl.tensor  # [columns of values, queries]
    top: gl.tensor  # maximum score, in units of log2
    total: gl.tensor  # sums of probabilities, one for each of 64 keys of a tile


@gluon.jit
def nothing(T: gl.constexpr):
    """The state before the first key."""
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    L: gl.constexpr = matrix_layout(ROWS)
    acc, total = gl.zeros([COLUMNS, ROWS], gl.float32, L), gl.zeros([HEIGHT, ROWS], gl.float32, L)  # pyright: ignore[reportCallIssue]
    return TurnedRows(acc, gl.full([ROWS], float("-inf"), gl.float32, column_layout(ROWS)), total)


@gluon.jit
def summed(rows, v_scale, T: gl.constexpr):
    """The state as one of rows of queries, with a number for each; values times their scale."""
    acc = natural(rows.acc, T)
    L: gl.constexpr = gl.SliceLayout(1, acc.type.layout)  # pyright: ignore[reportAssignmentType]
    top, total = gl.convert_layout(rows.top, L), gl.convert_layout(gl.sum(rows.total, 0), L)
    if T.lowers:
        total, v_scale = total * DROP, v_scale * DROP
    if T.lowers or T.v_scale:
        acc = acc * v_scale
    return Sums(acc, top, total)


@gluon.jit
def natural(acc, T: gl.constexpr):
    """[queries, columns of values] of an accumulator, in whose rows `value_operand` has these in its own order."""
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    if T.converts:
        return acc.reshape([COLUMNS // HEIGHT, 4, 2, 8, ROWS]).permute((4, 1, 3, 0, 2)).reshape([ROWS, COLUMNS])
    else:
        return acc.permute((1, 0))


@gluon.jit
def walk(use, mem, seat, low, high, sizes, scale, T: gl.constexpr):
    """(TurnedRows, key tiles used) of the keys from low to high, of which there are some.

    Values are added while the next keys are multiplied, but of latents at once: they are the keys, and of two tiles in shared
    memory the other is on its way meanwhile.
    """
    BLOCK_K: gl.constexpr = T.block_k
    rows = first_step(nothing(T), mem, use, low, seat, sizes, scale, T)
    if T.latent:
        rows = last_step(rows, mem, use, low, seat, T)
    use += 1
    for start in range(low + BLOCK_K, high, BLOCK_K):
        if T.latent:
            rows = first_step(rows, mem, use, start, seat, sizes, scale, T)
            rows = last_step(rows, mem, use, start, seat, T)
        else:
            rows = step(rows, mem, use, start, seat, sizes, scale, T)
        use += 1
    if not T.latent:
        last = low + (gl.cdiv(high - low, BLOCK_K) - 1) * BLOCK_K
        rows = last_step(rows, mem, use - 1, last, seat, T)
    return rows, use


@gluon.jit
def first_step(rows, mem, use, start, seat, sizes, scale, T: gl.constexpr):
    """The state after a key tile, whose values are yet to be added."""
    score = warpgroup_mma_wait(0, deps=[multiply_keys(mem, use, T)])
    let_go(mem.keys, use, T)
    return weighed(rows, score, mem, use, start, seat, sizes, scale, False, T)


@gluon.jit
def last_step(rows, mem, use, start, seat, T: gl.constexpr):
    """The state with a tile's values added."""
    acc = warpgroup_mma_wait(0, deps=[add_values(rows.acc, mem, use, start, seat, T)])
    let_go(mem.values, use, T)
    return TurnedRows(acc, rows.top, rows.total)


@gluon.jit
def step(rows, mem, use, start, seat, sizes, scale, T: gl.constexpr):
    """The state after a further key tile; the values of the one before are added meanwhile."""
    score = multiply_keys(mem, use, T)
    acc = add_values(rows.acc, mem, use - 1, start - T.block_k, seat, T)
    score = warpgroup_mma_wait(1, deps=[score])
    let_go(mem.keys, use, T)
    return weighed(TurnedRows(acc, rows.top, rows.total), score, mem, use, start, seat, sizes, scale, True, T)


@gluon.jit
def weighed(rows, score, mem, use, start, seat, sizes, scale, ADDS: gl.constexpr, T: gl.constexpr):
    """The state after the scores of a tile, whose probabilities are put where its values will be multiplied with them.

    ADDS: values of the tile before are being added.
    """
    BLOCK_K: gl.constexpr = T.block_k
    ROWS: gl.constexpr = T.rows
    score = shaped(score * scale, mem, use, start, seat, sizes, T)
    top = gl.maximum(rows.top, gl.max(score, 0))
    shift = level(top, True, T)
    decay = gl.exp2(rows.top - shift)[None, :]
    p = gl.exp2(score - lifted(shift, T)[None, :])
    acc = rows.acc
    if ADDS:
        acc = warpgroup_mma_wait(0, deps=[acc])
        let_go(mem.values, use - 1, T)
    mem.p.index(use & 1).permute((1, 0)).store(pack(p, mem.p.dtype))
    fence_async_shared()
    sums = p
    if BLOCK_K > HEIGHT:
        sums = gl.convert_layout(gl.sum(p.reshape([BLOCK_K // HEIGHT, HEIGHT, ROWS]), 0), matrix_layout(ROWS))
    return TurnedRows(acc * decay, top, rows.total * decay + sums)


@gluon.jit
def multiply_keys(mem, use, T: gl.constexpr):
    """A key tile times queries, under way. Of latents the ring of values has all columns but the last 64."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    PARTS: gl.constexpr = T.parts_k
    VALUES: gl.constexpr = T.parts_v
    zero = gl.zeros([BLOCK_K, ROWS], gl.float32, matrix_layout(ROWS))  # pyright: ignore[reportCallIssue]
    mem.keys.wait(use)
    if T.latent:
        mem.values.wait(use)
        first = uniform(gl.to_tensor(0))  # else addresses of the queries wait in registers for the next tile
        wide = abreast(mem.q, first, ROWS, STRIP, VALUES)
        score = times(tile_of(mem.v, mem.values.at(use), VALUES, T), wide, zero, False)
        return times(tile_of(mem.k, mem.keys.at(use), 1, T), mem.q.index(first + VALUES).reshape([ROWS, STRIP]), score, True)
    elif T.converts:
        return times(key_operand(mem, use, T), first_parts(mem.q, 0, ROWS, STRIP, PARTS), zero, False)
    else:
        return times(tile_of(mem.k, mem.keys.at(use), PARTS, T), first_parts(mem.q, 0, ROWS, STRIP, PARTS), zero, False)


@gluon.jit
def times(a, rows, acc, ADDS: gl.constexpr):
    """`a` times rows of shared memory, under way, onto `acc` if ADDS."""
    return warpgroup_mma(a, rows.permute((1, 0)), acc, use_acc=ADDS, is_async=True)


@gluon.jit
def add_values(acc, mem, use, start, seat, T: gl.constexpr):
    """The accumulator plus a value tile times its probabilities, under way."""
    mem.values.wait(use)
    if T.converts:
        return times(value_operand(mem, use, start, seat, T), mem.p.index(use & 1), acc, True)
    else:
        return times(tile_of(mem.v, mem.values.at(use), T.parts_v, T).permute((1, 0)), mem.p.index(use & 1), acc, True)


@gluon.jit
def bytes_at(tiles, place, PARTS: gl.constexpr, T: gl.constexpr):
    """The ring's tile at a place."""
    WIDTH: gl.constexpr = PARTS * STRIP
    BLOCK_K: gl.constexpr = T.block_k
    BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, WIDTH], tiles.dtype)
    return recast(tiles, tiles.dtype, [T.pipeline.stages, BLOCK_K, WIDTH], BYTES).index(place)


@gluon.jit
def key_operand(mem, use, T: gl.constexpr):
    """A key tile in fp16, its columns `shuffled`; nobody needs it in shared memory any more."""
    BLOCK_K: gl.constexpr = T.block_k
    STORED: gl.constexpr = T.stored
    x = bytes_at(mem.k, mem.keys.at(use), T.parts_k, T).load(key_bytes_layout(BLOCK_K, T.parts_k * STRIP))
    fence_async_shared()
    mem.keys.release(use)
    return gl.convert_layout(shuffled(widened(x, gl.float16, STORED, True)), operand_layout(T.rows), True)


@gluon.jit
def value_operand(mem, use, start, seat, T: gl.constexpr):
    """A value tile in fp16, [columns, keys], columns in the order that `natural` undoes; zeros for keys that no query sees."""
    BLOCK_K: gl.constexpr = T.block_k
    WIDTH: gl.constexpr = T.parts_v * STRIP
    STORED: gl.constexpr = T.stored
    L: gl.constexpr = value_bytes_layout(BLOCK_K, WIDTH)
    x = bytes_at(mem.v, mem.values.at(use), T.parts_v, T).load(L)
    fence_async_shared()
    mem.values.release(use)
    if (start < seat.seen_from) | (start + BLOCK_K > seat.seen_to):
        key = start + gl.arange(0, BLOCK_K, gl.SliceLayout(1, L))
        x = gl.where(((key >= seat.seen_from) & (key < seat.seen_to))[:, None], x, 0)
    x = widened(x, gl.float16, STORED, True).permute((1, 0))
    x = x.reshape([4, 8, WIDTH // HEIGHT, 2, BLOCK_K]).permute((2, 0, 3, 1, 4)).reshape([WIDTH, BLOCK_K])
    return gl.convert_layout(x, operand_layout(T.rows), True)


@gluon.jit
def shuffled(x):
    """Rows whose columns come in the order in which a product goes through them: of 16, a thread's are neighbours in memory."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, COLUMNS // 16, 2, 2, 2, 2]).permute((0, 1, 4, 2, 3, 5)).reshape([ROWS, COLUMNS])


@gluon.jit
def shaped(score, mem, use, start, seat, sizes, T: gl.constexpr):
    """Scores, -inf where a query does not see a key; values that no query sees become 0, as converted ones are."""
    BLOCK_K: gl.constexpr = T.block_k
    ROWS: gl.constexpr = T.rows
    if (start < seat.whole_from) | (start + BLOCK_K > seat.whole_to):
        row, _, _ = places(seat, sizes, column_layout(ROWS), T)
        key = start + gl.arange(0, BLOCK_K, row_layout(ROWS))
        keep = visible(row[None, :], key[:, None], Sizes(seat.queries, seat.keys, 0, 0), (sizes.left, sizes.right), T)
        score = gl.where(keep, score, float("-inf"))
        if not T.converts:
            if (start < seat.seen_from) | (start + BLOCK_K > seat.seen_to):
                blank(mem, use, seat.seen_from - start, seat.seen_to - start, T)
    return score
