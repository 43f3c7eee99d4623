"""A block's share of dq, on its way from registers to the sum of all blocks."""

from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.backward.split_tiles import flatten
from flashtile.kernels.sm90.backward.tile_scheduler import find, meeting
from flashtile.kernels.sm90.device.locks import NOBODY_ASKED, await_turn, claim, is_first, report, writes_done
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast, store_wait, tma_add, tma_store


@gluon.jit
def add_dq(dq, memory, sum_ptrs, step, place, sizes, work, W: gl.constexpr, T: gl.constexpr):
    """Add a consumer's part of 64 queries' dq to the sum, laid out as the matrix unit leaves it in registers.

    Through shared memory and `add_shares` where T.outputs.copies_dq; otherwise every thread adds 16 contiguous bytes at a
    time, a warp 512. `rows.attention_dq` is the way back.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    shares = flatten(dq)
    if T.outputs.copies_dq:
        use = 2 * step + W
        memory.to.sums.claim(use)
        share_of(memory, W, COLUMNS, T).store(shares)
        fence_async_shared()
        memory.to.sums.hand_over(use)
    else:
        head, start = meeting(memory, step, place, 4, T)
        place_of_part = part_of(head, start, W, place, sizes, T)
        if T.schedule.deterministic:
            await_turn(sum_ptrs[2] + place_of_part, place.turn(head, start, sizes, work, 4, T) * 4)  # every warp reports
        at = place_of_part * (64 * T.columns_dq) + gl.arange(0, 64 * COLUMNS, layout=flat)
        gl.atomic_add(sum_ptrs[0] + at, shares, sem="relaxed")


@gluon.jit
def add_shares(sum_desc, sum_ptrs, memory, work, W: gl.constexpr, T: gl.constexpr):
    """The warp that adds what a consumer hands over to the sum, by the copy engine, and in turn if T.schedule.deterministic.

    Where every block has one tile, or helps with another, a part is claimed a step ahead, before its share comes, and while the
    first share of the one before is under way: who is first has two journeys to memory more in every step than the others. With
    more tiles a part that is claimed for longer is one that others wait for (docs/lab/hopper-backward.md); none of a tile's
    first step is claimed while consumers are busy with the tile before, for two blocks might then wait for each other.
    """
    ROWS: gl.constexpr = T.columns_dq // 4  # of 256 elements
    BOXES: gl.constexpr = 2 if T.cut and W == 0 else 1  # pyright: ignore[reportAssignmentType]
    EARLY: gl.constexpr = not (T.tells or T.schedule.deterministic)  # pyright: ignore[reportAssignmentType]
    turn, step, answer = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    ticket = memory.to.tickets.read(turn, 1)
    while ticket < work.tiles:
        place, sizes = find(memory.to.tickets, turn, ticket, step, work, 1, T)
        if T.begins_early:
            await_stream(False)
        if EARLY:
            answer = ask(sum_ptrs, memory, step, turn == 0, W, place, sizes, work, T)
        while step < place.visits.end:
            if T.tells:
                memory.to.sums.wait(2 * step + W)
            head, start = meeting(memory, step, place, 1, T)
            at = part_of(head, start, W, place, sizes, T)
            first = at < 0
            if T.schedule.deterministic:
                before = place.turn(head, start, sizes, work, 1, T)
                await_turn(sum_ptrs[2] + at, before)
                first = before == 0
            if not T.tells:
                memory.to.sums.wait(2 * step + W)
            if EARLY:
                first = is_first(sum_ptrs[2] + at, answer)
            elif not T.schedule.deterministic:
                first = is_first(sum_ptrs[2] + at)
            row = (at * ROWS).to(gl.int32)
            for i in gl.static_range(BOXES):
                share = memory.shares.index(2 * W + i if T.cut else W)
                if first:
                    tma_store(sum_desc, [0, 0, row + i * (ROWS // 2), 0], share)
                else:
                    tma_add(sum_desc, [0, 0, row + i * (ROWS // 2), 0], share)
            store_wait(0)
            memory.to.sums.release(2 * step + W)
            if EARLY:
                answer = ask(sum_ptrs, memory, step + 1, True, W, place, sizes, work, T)
            if T.schedule.deterministic or first:
                writes_done(0)
                report(sum_ptrs[2] + at)
            step = step + 1
        if T.pipeline.converts:
            writes_done(0)
            report(done_flag(sum_ptrs, place.batch * (sizes.heads // T.group) + place.head_kv, T))
        memory.to.tickets.finish(turn)
        turn = turn + 1
        ticket = memory.to.tickets.read(turn, 1)


@gluon.jit
def share_of(memory, W: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Where a consumer's part of dq goes through, as registers hold it: where T.cut two boxes, of which the second has one."""
    if T.cut:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # pyright: ignore[reportAssignmentType]
        PLACES: gl.constexpr = 2 * T.columns_dq // COLUMNS
        return recast(memory.shares, gl.float32, [PLACES, 64 * COLUMNS], FLAT).index(W * (PLACES // 2))
    else:
        return memory.shares.index(W).reshape([64 * COLUMNS])


@gluon.jit
def ask(sum_ptrs, memory, step, may, part, place, sizes, work, T: gl.constexpr):
    """Claim the part of a step to come, if there is one, it may be claimed, and the problem is one wave."""
    answer = gl.to_tensor(NOBODY_ASKED)
    wanted = (step < place.visits.end) & may
    if not T.schedule.helps:
        wanted = wanted & (work.tiles <= gl.num_programs(0))
    if wanted:
        head, start = meeting(memory, step, place, 1, T)
        answer = claim(sum_ptrs[2] + part_of(head, start, part, place, sizes, T))
    return answer


@gluon.jit
def done_flag(sum_ptrs, head_kv, T: gl.constexpr):
    """Where it is reported, by both roles that add, that a key tile of a head (of all batch entries) has added its shares."""
    return sum_ptrs[1] + T.counts + head_kv


@gluon.jit
def part_of(head, start, part, place, sizes, T: gl.constexpr):
    """Which part of the sum `part` of the query tile at `start` is: 64 queries, and T.columns_dq columns."""
    PARTS: gl.constexpr = T.columns // T.columns_dq
    head_rows = (place.slab * sizes.heads + head).to(gl.int64) * place.padded + place.first_row
    return (head_rows + start) // 64 * PARTS + part


@gluon.jit
def report_dq(sum_ptrs, memory, step, part, place, sizes, T: gl.constexpr):
    """Let the next block add where this one did in `step`."""
    head, start = meeting(memory, step, place, 4, T)
    report(sum_ptrs[2] + part_of(head, start, part, place, sizes, T))
