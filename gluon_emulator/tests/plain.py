"""A plain Gluon kernel, which knows nothing of the emulator: c = a @ b.T, one tile a block, two roles, two stages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load(a, b, tiles, full, free, STEPS: gl.constexpr, BLOCK: gl.constexpr):
    row = gl.program_id(0) * 64
    for step in range(STEPS):
        slot = step % 2
        mbarrier.wait(free.index(slot), (step // 2 + 1) & 1)
        mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)
        tma.async_copy_global_to_shared(a, [row, step * BLOCK], full.index(slot), tiles.index(2 * slot))
        tma.async_copy_global_to_shared(b, [0, step * BLOCK], full.index(slot), tiles.index(2 * slot + 1))


@gluon.jit
def multiply(c, tiles, full, free, staged, STEPS: gl.constexpr, EARLY: gl.constexpr, FENCED: gl.constexpr):
    acc = gl.zeros([64, 64], gl.float32)
    for step in range(STEPS):
        slot = step % 2
        mbarrier.wait(full.index(slot), step // 2 & 1)
        acc = warpgroup_mma(tiles.index(2 * slot), tiles.index(2 * slot + 1).permute((1, 0)), acc, is_async=True)
        if EARLY:  # the mistake: the slot is given away before its product is done
            mbarrier.arrive(free.index(slot), 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not EARLY:
            mbarrier.arrive(free.index(slot), 1)
    staged.store(acc.to(gl.float16))
    if FENCED:
        fence_async_shared()
    tma.async_copy_shared_to_global(c, [gl.program_id(0) * 64, 0], staged)
    tma.store_wait(0)


@gluon.jit
def product(a, b, c, STEPS: gl.constexpr, BLOCK: gl.constexpr, EARLY: gl.constexpr = False, FENCED: gl.constexpr = True):
    tiles = gl.allocate_shared_memory(gl.float16, [4, 64, BLOCK], a.layout)
    staged = gl.allocate_shared_memory(gl.float16, [64, 64], c.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), 1)
        mbarrier.init(free.index(slot), 1)
    gl.warp_specialize(
        [(multiply, (c, tiles, full, free, staged, STEPS, EARLY, FENCED)), (load, (a, b, tiles, full, free, STEPS, BLOCK))],
        [1],
        [24],
    )
