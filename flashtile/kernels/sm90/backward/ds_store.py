"""The way of the scores' gradients from shared memory to memory."""

from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.backward.tile_scheduler import find, flag_of, meeting
from flashtile.kernels.sm90.device.locks import await_turn, report, writes_done
from flashtile.kernels.sm90.device.strips import strips
from flashtile.triton_glue.gluon import add_pairs, fence_async_shared, gl, gluon, store_wait, tma_add, tma_store


@gluon.jit
def store_scores(ds_desc, counter_ptr, memory, work, T: gl.constexpr):
    """The warp that takes ds of both consumers, which lies queries x keys, to where it belongs, by the copy engine.

    Where T.outputs.pairs_ds that of a second batch entry is added to the first's: by L2 in one step, and in the next one here,
    to what the loader has brought back. Either alone makes every step wait for it (docs/lab/hopper-backward.md, a bias's
    gradient). A tile of the first is reported once it is stored, and the second's waits for that.
    """
    turn, step, former = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    ticket = memory.to.tickets.read(turn, 1)
    while ticket < work.tiles:
        place, sizes = find(memory.to.tickets, turn, ticket, step, work, 1, T)
        if T.outputs.pairs_ds:
            if place.batch > 0:
                await_stream(False)
                await_turn(flag_of(counter_ptr, place, sizes, T), 1)
        while step < place.visits.end:
            memory.to.scores.wait(step)
            head, start = meeting(memory, step, place, 1, T)
            if T.outputs.pairs_ds:
                if place.batch == 0:
                    store_both(ds_desc, memory.ds, step, 0, head, start, place, False)
                    memory.to.scores.release(step)
                elif brings_back(step):
                    for i in gl.static_range(2):
                        memory.to.formers.wait(former + i)
                        add_to(memory.former.index(i), memory.ds.index(2 * i + step % 2), T)
                        fence_async_shared()
                        tma_store(ds_desc, [0, head, start, place.column + i * 64], memory.former.index(i))
                    memory.to.scores.release(step)
                    for i in gl.static_range(2):
                        store_wait(1 - i)
                        memory.to.formers.release(former + i)
                    former = former + 2
                else:
                    store_both(ds_desc, memory.ds, step, 0, head, start, place, True)
                    memory.to.scores.release(step)
            else:
                store_both(ds_desc, memory.ds, step, place.batch, head, start, place, False)
                memory.to.scores.release(step)
            step = step + 1
        if T.outputs.pairs_ds:
            if place.batch == 0:
                writes_done(0)
                report(flag_of(counter_ptr, place, sizes, T))
        memory.to.tickets.finish(turn)
        turn = turn + 1
        ticket = memory.to.tickets.read(turn, 1)


@gluon.jit
def brings_back(step):
    """Whether the loader brings back what a second entry's ds of a step is added to."""
    return step % 2 == 0


@gluon.jit
def store_both(desc, ds, step, batch, head, start, place, ADDS: gl.constexpr):
    """Store, or add, both consumers' ds of a step, which may then be written to again."""
    for i in gl.static_range(2):
        if ADDS:
            tma_add(desc, [batch, head, start, place.column + i * 64], ds.index(2 * i + step % 2))
        else:
            tma_store(desc, [batch, head, start, place.column + i * 64], ds.index(2 * i + step % 2))
    store_wait(0)


@gluon.jit
def add_to(sum_tile, tile, T: gl.constexpr):
    """Add a tile of 16 bits to another one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    sums, others = strips(sum_tile.reshape([T.block_q, 64]), 8), strips(tile.reshape([T.block_q, 64]), 8)
    for i in range(sums.shape[0]):
        sums.index(i).store(add_pairs(sums.index(i).load(LAYOUT), others.index(i).load(LAYOUT)))
