"""A product of two 16-bit matrices on Hopper, and GELU's derivative done to its tiles on their way out.

As many blocks as SMs, each taking several tiles. One warp loads factors through a ring of stages; two consumer warpgroups
own half of a tile's rows each; a warp for each of them stores what it made and sums its columns. The second consumer stays
`lead` steps behind the first, so that the matrix unit has work from one while the other is at the end of its tile.
"""

from dataclasses import dataclass
from math import ceil

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
from flashtile.kernels.hopper.layouts import matrix_layout
from flashtile.kernels.lib.exponential import LOG2E
from flashtile.kernels.lib.stream import await_stream
from flashtile.plan.call import Descriptor, KernelCall, Pointer
from flashtile.plan.device import Device

TURN = gl.constexpr(8)  # a hardware barrier; Triton uses the lower ones
DEPTH = 64  # of a stage: 128 bytes, the widest that the matrix unit's swizzled operands are


@dataclass(frozen=True)
class Tile:
    """Compile-time part: `rows` x `columns` of the product, of which each consumer has half of the rows.

    wave: tile rows that are walked together.
    """

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
            tma_load(right_desc, [depth, column], bar, memory.right.index(at))
            use += 1
            if step == size[2] // 2:
                for group in gl.static_range(2):
                    bar = memory.others.acquire(2 * turn + group, other_desc.block_type.nbytes)
                    tma_load(other_desc, [row + group * HALF, column], bar, memory.out.index(group))


@gluon.jit
def multiply(memory, size, GROUP: gl.constexpr, T: gl.constexpr):
    """Role: half of the rows of every tile."""
    HALF: gl.constexpr = T.rows // 2
    COLUMNS: gl.constexpr = T.columns
    LAYOUT: gl.constexpr = matrix_layout(COLUMNS)
    use = 0
    for turn in range(turns(size)):
        if T.lead > 0 and GROUP == 1:
            named_wait(TURN, 256)
        acc = gl.zeros([HALF, COLUMNS], gl.float32, LAYOUT)  # pyright: ignore[reportCallIssue]
        acc = multiply_step(acc, memory, use, False, GROUP)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if T.lead == 1 and GROUP == 0:
            named_arrive(TURN, 256)
        use += 1
        for step in range(1, size[2]):
            acc = multiply_step(acc, memory, use, True, GROUP)
            acc = warpgroup_mma_wait(1, deps=[acc])
            memory.factors.release(use - 1)
            if T.lead > 1 and GROUP == 0:
                if step == T.lead - 1:
                    named_arrive(TURN, 256)
            use += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        memory.factors.release(use - 1)
        finish(acc, memory, turn, GROUP, T)


@gluon.jit
def multiply_step(acc, memory, use, ADDS: gl.constexpr, GROUP: gl.constexpr):
    """The accumulator and a stage's product, under way."""
    memory.factors.wait(use)
    at = memory.factors.at(use)
    return warpgroup_mma(memory.left.index(at * 2 + GROUP), memory.right.index(at), acc, use_acc=ADDS, is_async=True)


@gluon.jit
def finish(acc, memory, turn, GROUP: gl.constexpr, T: gl.constexpr):
    """Multiply a consumer's part of a tile by the derivative, and hand it over."""
    memory.others.wait(2 * turn + GROUP)
    at = memory.out.index(GROUP).load(matrix_layout(T.columns)).to(gl.float32)
    rounded = pack(acc * gelu_slope(at), memory.out.dtype)
    memory.out.index(GROUP).store(rounded)
    fence_async_shared()
    memory.results.hand_over(2 * turn + GROUP)


@gluon.jit
def reciprocal(x):
    """1 / x within an ulp: a division takes ten instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gelu_slope(x):
    """The derivative of GELU's tanh form x (1 + tanh(u)) / 2, by (1 + tanh(u)) / 2 = sigmoid(2 u), of which nothing cancels."""
    square = x * x
    gate = reciprocal(1.0 + gl.exp2(x * (-1.5957691216057308 * LOG2E - 0.07135481627260025 * LOG2E * square)))
    return gate + x * (1.5957691216057308 + 0.21406444881780076 * square) * (gate - gate * gate)


@gluon.jit
def store(out_desc, partial_ptr, memory, size, GROUP: gl.constexpr, T: gl.constexpr):
    """Role: store what a consumer made, and the sums of its columns."""
    HALF: gl.constexpr = T.rows // 2
    for turn in range(turns(size)):
        row, column = place(gl.program_id(0) + turn * gl.num_programs(0), size, T)
        memory.results.wait(2 * turn + GROUP)
        tma_store(out_desc, [row * T.rows + GROUP * HALF, column * T.columns], memory.out.index(GROUP))
        if partial_ptr is not None:
            sum_rows(partial_ptr, memory.out.index(GROUP), row * 2 + GROUP, column * T.columns, size[3], T)
            fence_async_shared()
        store_wait(0)
        memory.others.release(2 * turn + GROUP)


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
def product(left_desc, right_desc, other_desc, out_desc, partial_ptr, T: gl.constexpr):
    """out (m, n) = left (m, k) right (k, n) times GELU's derivative at other (m, n); descriptors of rank 2, those of m rows in
    blocks of half a tile's. partial: sums of columns (2 * tile rows, n), or None.
    """
    HALF: gl.constexpr = T.rows // 2
    STAGES: gl.constexpr = T.stages
    dtype: gl.constexpr = left_desc.dtype
    left = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, T.depth], left_desc.layout)
    right = gl.allocate_shared_memory(dtype, [STAGES, T.depth, T.columns], right_desc.layout)
    out = gl.allocate_shared_memory(dtype, [2, HALF, T.columns], out_desc.layout)
    memory = Memory(left, right, out, make_channel(STAGES, 2), make_channel(2, 1), make_channel(2, 1))
    fence_async_shared()
    await_stream()
    m, n, depth = out_desc.shape[0], out_desc.shape[1], left_desc.shape[1]
    size = ((m + T.rows - 1) // T.rows, (n + T.columns - 1) // T.columns, (depth + T.depth - 1) // T.depth, n)
    gl.warp_specialize([
        (multiply, (memory, size, 0, T)),
        (multiply, (memory, size, 1, T)),
        (load, (left_desc, right_desc, other_desc, memory, size, T)),
        (store, (out_desc, partial_ptr, memory, size, 0, T)),
        (store, (out_desc, partial_ptr, memory, size, 1, T)),
    ], [4, 1, 1, 1], [T.registers, T.few_registers, T.few_registers, T.few_registers])  # fmt: skip


# -- launches -------------------------------------------------------------------------------------------------------------

LEAST_DEPTH, LEAST_ROUNDS = 1024, 4  # of what was timed the least are 2048 and 16


def fills(m: int, n: int, k: int, device: Device) -> bool:
    """Whether a product is large enough: the ends of tiles are little of it, and few SMs idle in the last round."""
    tiles = ceil(m / Tile.rows) * ceil(n / Tile.columns)
    rounds = ceil(tiles / device.sm_count)
    return k >= LEAST_DEPTH and rounds >= LEAST_ROUNDS and tiles >= 0.9 * rounds * device.sm_count


def parts(m: int, tile: Tile) -> int:
    """How many partial sums there are of each column."""
    return 2 * ceil(m / tile.rows)


def product_call(m: int, n: int, k: int, tile: Tile, partial: bool, device: Device) -> KernelCall:
    """dpre (m, n) = dout (m, k) weight2 (k, n) times GELU's derivative at pre (m, n), and partial sums of its columns."""
    half, axes = tile.rows // 2, (0, 1)
    args = (
        Descriptor("dout", (half, tile.depth), axes),
        Descriptor("weight2", (tile.depth, tile.columns), axes),
        Descriptor("pre", (half, tile.columns), axes),
        Descriptor("dpre", (half, tile.columns), axes),
        Pointer("partial") if partial else None,
    )
    tiles = ceil(m / tile.rows) * ceil(n / tile.columns)
    return KernelCall(product, (min(tiles, device.sm_count), 1, 1), args, (("T", tile),), 4, 1, early=True)
