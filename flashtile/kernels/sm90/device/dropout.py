"""Dropout in the registers of a warpgroup; `lib/dropout.py` has the portable form, `problem/dropout.py` says which bits."""

from flashtile.kernels.device.dropout import Seed, philox, placed, rounds_up
from flashtile.kernels.sm90.device.layouts import call_layout, matrix_layout, operand_layout, word_layout
from flashtile.triton_glue.gluon import choose_bytes, gl, gluon, keep_pairs, keep_singles, pack, uniform


@gluon.jit
def steady(seed):
    """The same Seed, in registers that a warp's lanes share."""
    return Seed(
        steady_word(seed.low), steady_word(seed.high), steady_word(seed.offset), steady_word(seed.dither),
        steady_word(seed.limit), steady_word(seed.rest), steady_word(seed.flip), seed.below, seed.above, seed.factor, seed.zero,
        seed.origin,
    )  # fmt: skip


@gluon.jit
def steady_word(x):
    """An unsigned word, `uniform`."""
    return uniform(x.to(gl.int32, bitcast=True)).to(gl.uint32, bitcast=True)


@gluon.jit
def draw(seed, batch_head, row, column, COLUMNS: gl.constexpr, BY_KEY: gl.constexpr):
    """(words, limits) of the 64 x COLUMNS scores from (row, column), multiples of 64 and 32: queries by keys or, if BY_KEY,
    keys by queries.

    Two neighbours in a row have one word, and their numbers in the upper bytes of its halves, less the sign; limits likewise.
    """
    return spread_words(draw_words(seed, batch_head, row, column, COLUMNS, BY_KEY), COLUMNS, BY_KEY)


@gluon.jit
def draw_words(seed, batch_head, row, column, COLUMNS: gl.constexpr, BY_KEY: gl.constexpr):
    """What `spread_words` makes the numbers of `draw` of, half as many.

    A call of Philox serves rows that differ in bit 0, which two lanes hold: each makes the calls of every second 16 columns,
    and gives the other one what that needs.
    """
    CALLS: gl.constexpr = call_layout(COLUMNS)
    WORDS: gl.constexpr = word_layout(COLUMNS)
    if len(seed.origin) > 0:
        if BY_KEY:
            batch_head, column, row = placed(seed, batch_head, column, row)
        else:
            batch_head, row, column = placed(seed, batch_head, row, column)
    rows = (row // 4 + gl.arange(0, 16, gl.SliceLayout(1, CALLS))).to(gl.uint32)[:, None]
    columns = (column // 4 + gl.arange(0, COLUMNS // 4, gl.SliceLayout(0, CALLS))).to(gl.uint32)[None, :]
    if BY_KEY:
        a, b, c, d = philox(seed.offset, rows, batch_head.to(gl.uint32), columns, seed.low, seed.high)
        first = gl.join(choose_bytes(a, c, 0x5410), choose_bytes(a, c, 0x7632))  # [..., bit 0 of the key]
        second = gl.join(choose_bytes(b, d, 0x5410), choose_bytes(b, d, 0x7632))
    else:
        a, b, c, d = philox(seed.offset, columns, batch_head.to(gl.uint32), rows, seed.low, seed.high)
        first, second = gl.join(a, c), gl.join(b, d)  # [..., bit 0 of the query]
    words = gl.join(first, second).permute([0, 2, 1, 3]).reshape([32, COLUMNS // 4, 2])  # [rows, columns, bit 3 of the key]
    words = gl.convert_layout(words, WORDS)
    line = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None]  # without bit 3
    place = gl.arange(0, COLUMNS // 4, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :]  # without bits 0 and 3
    line, place = row // 64 * 4 + line // 2 % 4, (column // 64 + place // 16) * 4 + place % 4
    if BY_KEY:
        up = rounds_up(seed, batch_head, place, line)
    else:
        up = rounds_up(seed, batch_head, line, place)
    limits = gl.where(up, (seed.limit + 1) * 0x1000100, seed.limit * 0x1000100)[:, :, None]
    return words, gl.join(limits, limits).reshape([32, COLUMNS // 4, 2])


@gluon.jit
def words_of(tile, at, size, seed, T: gl.constexpr):
    """Dropout's words for the scores of a key tile, as `spread_words` takes them."""
    return draw_words(seed, at.item.batch * size.heads + at.head, at.row, tile * T.block_k, T.block_k, False)


@gluon.jit
def draw_tile(tile, at, size, seed, T: gl.constexpr):
    """`draw` for the scores of a key tile."""
    return spread_words(words_of(tile, at, size, seed, T), T.block_k, False)


@gluon.jit
def spread_words(drawn, COLUMNS: gl.constexpr, BY_KEY: gl.constexpr):
    """(words, limits), as `draw` gives them."""
    words, limits = drawn
    return spread(words << 8, words, COLUMNS, BY_KEY), spread(limits, limits, COLUMNS, BY_KEY)


@gluon.jit
def spread(lower, upper, COLUMNS: gl.constexpr, BY_KEY: gl.constexpr):
    """What is [rows, columns, bit 3 of the key], for either bit 3 of the query, as [64, COLUMNS]: each for two neighbours."""
    both = gl.join(lower, upper)
    both = gl.join(both, both).reshape([4, 8, COLUMNS // 16, 4, 2, 2, 2])  # [..., bits 3 of key and query, bit 0 of the column]
    if BY_KEY:
        both = both.permute([0, 4, 1, 2, 5, 3, 6])
    else:
        both = both.permute([0, 5, 1, 2, 4, 3, 6])
    return gl.convert_layout(both.reshape([64, COLUMNS]), matrix_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def halves(x):
    """(even columns, odd columns)."""
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def as_weights(p, drawn, seed, DTYPE: gl.constexpr, T: gl.constexpr):
    """Probabilities as the product with values takes them or, where T.modifiers.dropout, `packed`."""
    if T.modifiers.dropout:
        return packed(p, drawn, seed, DTYPE)
    else:
        return gl.convert_layout(pack(p, DTYPE), operand_layout(T.columns_v))


@gluon.jit
def packed(p, drawn, seed, DTYPE: gl.constexpr):
    """p in 16 bits, zero where dropped; two neighbours in an int32, for which a loop needs no copies at its end."""
    low, high = halves(p)
    words, _ = halves(drawn[0])
    limits, _ = halves(drawn[1])
    return keep_pairs(low, high, words, limits, seed.flip, "bf16" if DTYPE == gl.bfloat16 else "f16")


@gluon.jit
def unpacked(pairs, DTYPE: gl.constexpr):
    """What was `packed`, as scores lie."""
    COLUMNS: gl.constexpr = 2 * pairs.shape[1]
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).reshape([pairs.shape[0], COLUMNS])
    return gl.convert_layout(both.to(DTYPE, bitcast=True), matrix_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def kept(x, drawn, seed, BY_PREDICATES: gl.constexpr):
    """x, float32, zero where dropped."""
    return keep_singles(x, drawn[0], drawn[1], seed.flip, BY_PREDICATES)
