"""A product of two 16-bit matrices on Hopper, with GELU or its derivative done to its tiles on their way out.

As many blocks as SMs, each taking several tiles. One warp loads factors through a ring of stages; two consumer warpgroups
own half of a tile's rows each; a warp for each of them stores what it made and sums its columns. The second consumer stays
`lead` steps behind the first, so that the matrix unit has work from one while the other is at the end of its tile.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from flashtile.kernels.hopper.channel import Channel, make_channel
from flashtile.kernels.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    named_arrive,
    named_wait,
    pack,
    recast,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.kernels.hopper.layouts import column_layout, matrix_layout
from flashtile.kernels.lib.exponential import LOG2E
from flashtile.kernels.lib.stream import await_stream
from flashtile.plan.call import Descriptor, KernelCall, Pointer
from flashtile.plan.device import Device

TURN = gl.constexpr(8)  # a hardware barrier; Triton uses the lower ones
DEPTH = 64  # of a stage: 128 bytes, the widest that the matrix unit's swizzled operands are


@dataclass(frozen=True)
class Tile:
    """Compile-time part: `rows` x `columns` of the product, of which each consumer has half of the rows.

    ending: what is done to the product: nothing; GELU of it and the bias, with or without storing what it is taken of
    (`keeps`); or a multiplication with GELU's derivative at a further matrix. sums: of the result's columns, for each consumer.
    transposed: the right factor lies (n, k) in memory. wave: tile rows that are walked together.
    """

    ending: Literal["plain", "gelu", "derivative"] = "plain"
    keeps: bool = False
    sums: bool = False
    transposed: bool = False
    rows: int = 128
    columns: int = 256
    depth: int = DEPTH
    stages: int = 3
    lead: int = 2
    wave: int = 16
    registers: int = 232
    few_registers: int = 40


@aggregate
class Memory:
    """Shared memory of a block, and the channels that fill it."""

    left: gl.shared_memory_descriptor  # (stage * 2 + consumer, rows / 2, depth)
    right: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # (consumer, rows / 2, columns): what the derivative is taken at, then the result
    factors: Channel
    others: Channel  # what the derivative is taken at
    results: Channel

    @gluon.constexpr_function
    def __init__(self, left, right, out, factors, others, results):
        self.left, self.right, self.out = left, right, out
        self.factors, self.others, self.results = factors, others, results


@gluon.jit
def place(tile, size, T: gl.constexpr):
    """(tile row, tile column): T.wave rows go together, so that the tiles under way share what the L2 cache holds."""
    WAVE: gl.constexpr = T.wave
    rows, columns = size[0], size[1]
    first = tile // (WAVE * columns) * WAVE
    high = gl.minimum(rows - first, WAVE)
    inner = tile - first * columns
    return first + inner % high, inner // high


@gluon.jit
def turns(size):
    """How many tiles this block has."""
    return (size[0] * size[1] - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def load(left_desc, right_desc, other_desc, memory, size, T: gl.constexpr):
    """Role: bring the factors of every tile, and half-way through it what the derivative is taken at."""
    HALF: gl.constexpr = T.rows // 2
    DEPTH_OF: gl.constexpr = T.depth
    BYTES: gl.constexpr = 2 * left_desc.block_type.nbytes + right_desc.block_type.nbytes
    use = 0
    for turn in range(turns(size)):
        row, column = place(gl.program_id(0) + turn * gl.num_programs(0), size, T)
        row, column = row * T.rows, column * T.columns
        for step in range(size[2]):
            bar = memory.factors.acquire(use, BYTES)
            at, depth = memory.factors.at(use), step * DEPTH_OF
            tma_load(left_desc, [row, depth], bar, memory.left.index(at * 2))
            tma_load(left_desc, [row + HALF, depth], bar, memory.left.index(at * 2 + 1))
            if T.transposed:
                tma_load(right_desc, [column, depth], bar, memory.right.index(at))
            else:
                tma_load(right_desc, [depth, column], bar, memory.right.index(at))
            use += 1
            if T.ending == "derivative":
                if step == size[2] // 2:
                    for group in gl.static_range(2):
                        bar = memory.others.acquire(2 * turn + group, other_desc.block_type.nbytes)
                        tma_load(other_desc, [row + group * HALF, column], bar, memory.out.index(group))


@gluon.jit
def multiply(bias_ptr, memory, size, GROUP: gl.constexpr, T: gl.constexpr):
    """Role: half of the rows of every tile."""
    HALF: gl.constexpr = T.rows // 2
    COLUMNS: gl.constexpr = T.columns
    LAYOUT: gl.constexpr = matrix_layout(COLUMNS)
    use = 0
    for turn in range(turns(size)):
        if T.lead > 0 and GROUP == 1:
            named_wait(TURN, 256)
        acc = gl.zeros([HALF, COLUMNS], gl.float32, LAYOUT)  # pyright: ignore[reportCallIssue]
        acc = multiply_step(acc, memory, use, False, GROUP, T)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if T.lead == 1 and GROUP == 0:
            named_arrive(TURN, 256)
        use += 1
        for step in range(1, size[2]):
            acc = multiply_step(acc, memory, use, True, GROUP, T)
            acc = warpgroup_mma_wait(1, deps=[acc])
            memory.factors.release(use - 1)
            if T.lead > 1 and GROUP == 0:
                if step == T.lead - 1:
                    named_arrive(TURN, 256)
            use += 1
        if bias_ptr is not None:
            bias = load_bias(bias_ptr, turn, size, T)
        acc = warpgroup_mma_wait(0, deps=[acc])
        memory.factors.release(use - 1)
        if bias_ptr is not None:
            acc = acc + bias.to(gl.float32)[None, :]
        finish(acc, memory, turn, GROUP, T)


@gluon.jit
def multiply_step(acc, memory, use, ADDS: gl.constexpr, GROUP: gl.constexpr, T: gl.constexpr):
    """The accumulator and a stage's product, under way."""
    memory.factors.wait(use)
    at = memory.factors.at(use)
    right = memory.right.index(at)
    if T.transposed:
        return warpgroup_mma(memory.left.index(at * 2 + GROUP), right.permute((1, 0)), acc, use_acc=ADDS, is_async=True)
    else:
        return warpgroup_mma(memory.left.index(at * 2 + GROUP), right, acc, use_acc=ADDS, is_async=True)


@gluon.jit
def load_bias(bias_ptr, turn, size, T: gl.constexpr):
    """The bias of a tile's columns."""
    COLUMNS: gl.constexpr = T.columns
    _row, column = place(gl.program_id(0) + turn * gl.num_programs(0), size, T)
    column = column * COLUMNS + gl.arange(0, COLUMNS, column_layout(COLUMNS))
    return gl.load(bias_ptr + column, mask=column < size[3], other=0.0)


@gluon.jit
def finish(acc, memory, turn, GROUP: gl.constexpr, T: gl.constexpr):
    """Do to a consumer's part of a tile what T.ending says, and hand it over."""
    COLUMNS: gl.constexpr = T.columns
    if T.ending == "derivative":
        memory.others.wait(2 * turn + GROUP)
        at = memory.out.index(GROUP).load(matrix_layout(COLUMNS)).to(gl.float32)
        hand_over(acc * gelu_slope(at), memory, turn, GROUP)
    elif T.ending == "gelu":
        if T.keeps:
            hand_over(acc, memory, 2 * turn, GROUP)
            hand_over(acc * gelu_gate(acc, acc * acc), memory, 2 * turn + 1, GROUP)
        else:
            hand_over(acc * gelu_gate(acc, acc * acc), memory, turn, GROUP)
    else:
        hand_over(acc, memory, turn, GROUP)


@gluon.jit
def hand_over(result, memory, number, GROUP: gl.constexpr):
    """Give the number-th result of this consumer to the warp that stores it."""
    rounded = pack(result, memory.out.dtype)
    memory.results.claim(2 * number + GROUP)
    memory.out.index(GROUP).store(rounded)
    fence_async_shared()
    memory.results.hand_over(2 * number + GROUP)


@gluon.jit
def reciprocal(x):
    """1 / x within an ulp: a division takes ten instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gelu_gate(x, square):
    """GELU's tanh form, over x: (1 + tanh(u)) / 2 = sigmoid(2 u), of which nothing cancels."""
    return reciprocal(1.0 + gl.exp2(x * (-1.5957691216057308 * LOG2E - 0.07135481627260025 * LOG2E * square)))


@gluon.jit
def gelu_slope(x):
    """Its derivative."""
    square = x * x
    gate = gelu_gate(x, square)
    return gate + x * (1.5957691216057308 + 0.21406444881780076 * square) * (gate - gate * gate)


@gluon.jit
def store(out_desc, pre_desc, partial_ptr, memory, size, GROUP: gl.constexpr, T: gl.constexpr):
    """Role: store what a consumer made, and the sums of its columns."""
    HALF: gl.constexpr = T.rows // 2
    for turn in range(turns(size)):
        row, column = place(gl.program_id(0) + turn * gl.num_programs(0), size, T)
        number = turn
        if T.keeps:
            store_result(pre_desc, memory, row * T.rows + GROUP * HALF, column * T.columns, 2 * turn, GROUP)
            store_wait(0)
            memory.results.release(4 * turn + GROUP)
            number = 2 * turn + 1
        store_result(out_desc, memory, row * T.rows + GROUP * HALF, column * T.columns, number, GROUP)
        if T.sums:
            sum_rows(partial_ptr, memory.out.index(GROUP), row * 2 + GROUP, column * T.columns, size[3], T)
            fence_async_shared()
        store_wait(0)
        memory.results.release(2 * number + GROUP)
        if T.ending == "derivative":
            memory.others.release(2 * turn + GROUP)


@gluon.jit
def store_result(desc, memory, row, column, number, GROUP: gl.constexpr):
    """Begin to store a consumer's number-th result, once it is there."""
    memory.results.wait(2 * number + GROUP)
    tma_store(desc, [row, column], memory.out.index(GROUP))


@gluon.jit
def strips(tile):
    """A tile's strips of 8 rows and 64 columns, column after column, as a swizzled tile has them in memory."""
    COUNT: gl.constexpr = tile.shape[0] // 8 * (tile.shape[1] // 64)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], tile.dtype)
    return recast(tile, tile.dtype, [COUNT, 8, 64], SHARED)


@gluon.jit
def sum_rows(partial_ptr, tile, index, start, columns, T: gl.constexpr):
    """partial[index] = sums of a tile's rows, as they are stored, from column `start` on. By a single warp of few registers."""
    COUNT: gl.constexpr = T.rows // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    tiles = strips(tile)
    for part in range(T.columns // 64):
        total = gl.zeros([8, 64], gl.float32, LAYOUT)  # pyright: ignore[reportCallIssue]
        for i in range(COUNT):
            total += tiles.index(part * COUNT + i).load(LAYOUT).to(gl.float32)
        column = start + part * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        gl.store(partial_ptr + index.to(gl.int64) * columns + column, gl.sum(total, 0), mask=column < columns)


@gluon.jit
def product(left_desc, right_desc, other_desc, out_desc, pre_desc, bias_ptr, partial_ptr, T: gl.constexpr):
    """out (m, n) = left (m, k) right, ended as T says; descriptors of rank 2, in blocks of half a tile's rows.

    other_desc: what the derivative is taken at; pre_desc: where what GELU is taken of is stored; bias (n,); partial sums
    (2 * tile rows, n). Each may be None.
    """
    HALF: gl.constexpr = T.rows // 2
    STAGES: gl.constexpr = T.stages
    dtype: gl.constexpr = left_desc.dtype
    left = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, T.depth], left_desc.layout)
    if T.transposed:
        right = gl.allocate_shared_memory(dtype, [STAGES, T.columns, T.depth], right_desc.layout)
    else:
        right = gl.allocate_shared_memory(dtype, [STAGES, T.depth, T.columns], right_desc.layout)
    out = gl.allocate_shared_memory(dtype, [2, HALF, T.columns], out_desc.layout)
    results = make_channel(2, 1)
    others = results
    if T.ending == "derivative":
        others = make_channel(2, 1)
    memory = Memory(left, right, out, make_channel(STAGES, 2), others, results)
    fence_async_shared()
    await_stream()
    m, n, depth = out_desc.shape[0], out_desc.shape[1], left_desc.shape[1]
    size = ((m + T.rows - 1) // T.rows, (n + T.columns - 1) // T.columns, (depth + T.depth - 1) // T.depth, n)
    gl.warp_specialize([
        (multiply, (bias_ptr, memory, size, 0, T)),
        (multiply, (bias_ptr, memory, size, 1, T)),
        (load, (left_desc, right_desc, other_desc, memory, size, T)),
        (store, (out_desc, pre_desc, partial_ptr, memory, size, 0, T)),
        (store, (out_desc, pre_desc, partial_ptr, memory, size, 1, T)),
    ], [4, 1, 1, 1], [T.registers, T.few_registers, T.few_registers, T.few_registers])  # fmt: skip


# -- launches -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The buffers of a product."""

    left: str
    right: str
    out: str
    other: str | None = None
    pre: str | None = None
    bias: str | None = None
    partial: str | None = None


def parts(m: int, tile: Tile) -> int:
    """How many partial sums there are of each column."""
    return 2 * ceil(m / tile.rows)


def product_call(names: Names, m: int, n: int, k: int, tile: Tile, device: Device) -> KernelCall:
    """out (m, n) = left (m, k) right."""
    half, axes = tile.rows // 2, (0, 1)
    result = (half, tile.columns)

    def described(name: str | None, block: tuple[int, ...]) -> Any:
        return name and Descriptor(name, block, axes)

    args = (
        described(names.left, (half, tile.depth)),
        described(names.right, (tile.columns, tile.depth) if tile.transposed else (tile.depth, tile.columns)),
        described(names.other, result),
        described(names.out, result),
        described(names.pre, result),
        names.bias and Pointer(names.bias),
        names.partial and Pointer(names.partial),
    )
    tiles = ceil(m / tile.rows) * ceil(n / tile.columns)
    return KernelCall(product, (min(tiles, device.sm_count), 1, 1), args, (("T", tile),), 4, 1, early=True)
