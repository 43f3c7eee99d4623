"""Query tiles that are computed again: those of which some exponent ran away.

Where T.softmax.watches a step measures exponents from a maximum that it does not look for (`scores.lifted`), so that one may
overflow: then the sum of its row is infinite. The thread that has the row sees that at the end of the tile, remembers the
tile's place, and its warp is careful in all tiles after it: so a thread has one place to remember at most. When a block is
done with its tiles its roles meet, find the first place that some thread remembers, compute that tile again, and so on.
What a row gives depends on its own scores alone, for the careful do another thing only with rows that would overflow.
"""

from flashtile.kernels.sm90.device.layouts import row_layout
from flashtile.kernels.sm90.device.ticket import make_words, read_word, write_words
from flashtile.triton_glue.gluon import aggregate, gl, gluon, named_wait, of_any, role_barrier

MEETING = gl.constexpr(15)  # the hardware barrier at which the roles meet
NONE = gl.constexpr(0x7FFFFFFF)  # behind all places of tiles
AGAIN = gl.constexpr(-0x80000000)  # is added to the place of a tile that is computed again


@aggregate
class Again:
    """What consumers remember: a place for each thread's pair of rows, and what they tell at a meeting.

    The latter twice: while some read, others may be at the next meeting.
    """

    wild: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, wild, told):
        self.wild, self.told = wild, told


@gluon.jit
def make_again(T: gl.constexpr):
    """Shared memory for it."""
    GROUPS: gl.constexpr = T.groups
    WARPS: gl.constexpr = T.rows // 16
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])  # pyright: ignore[reportAssignmentType]
    return Again(gl.allocate_shared_memory(gl.int32, [GROUPS, WARPS, 8], layout), make_words(2 * GROUPS))


@gluon.jit
def of_threads(rows, T: gl.constexpr):
    """The greatest of the two numbers that a thread has of a warpgroup's rows."""
    WARPS: gl.constexpr = T.rows // 16
    return gl.max(rows.reshape([WARPS, 2, 8]), 1)


@gluon.jit
def nothing(T: gl.constexpr):
    """What threads remember at first: NONE."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    return of_threads(gl.full([ROWS], NONE, gl.int32, row_layout(BLOCK_K)), T)


@gluon.jit
def forget(again, GROUP: gl.constexpr, T: gl.constexpr):
    """Consumer: begin with nothing remembered."""
    again.wild.index(GROUP).store(nothing(T))
    role_barrier()


@gluon.jit
def remembered(again, GROUP: gl.constexpr, T: gl.constexpr):
    """Consumer: the place that each of its threads remembers, or NONE."""
    return again.wild.index(GROUP).load(nothing(T).type.layout)


@gluon.jit
def careful(again, GROUP: gl.constexpr, T: gl.constexpr):
    """Consumer, where a tile begins: of each warp, whether some thread remembers a place. () where T.softmax.votes, and steps
    ask.
    """
    if T.softmax.watches and not T.softmax.votes:
        return of_any((remembered(again, GROUP, T) != NONE).to(gl.int32))
    else:
        return ()


@gluon.jit
def remember(again, place, ran, GROUP: gl.constexpr, T: gl.constexpr):
    """Consumer, behind the tile at `place`: remember it where rows `ran` are to be computed again."""
    wild = remembered(again, GROUP, T)
    again.wild.index(GROUP).store(gl.where((of_threads(ran.to(gl.int32), T) > 0) & (wild == NONE), place & NONE, wild))
    role_barrier()


@gluon.jit
def tell_first(again, turn, before, GROUP: gl.constexpr, T: gl.constexpr):
    """Consumer, before a meeting: tell the first place that it remembers; behind `before`, if that was computed again."""
    wild = remembered(again, GROUP, T)
    first = gl.min(gl.min(gl.where((before >= 0) | (wild > (before & NONE)), wild, NONE), 1), 0)
    write_words(again.told, (turn & 1) * T.groups + GROUP, (first,), 4)


@gluon.jit
def meet(again, turn, WARPS: gl.constexpr, T: gl.constexpr):
    """Every role: wait for all others; the place of the tile that is computed again, plus AGAIN, or NONE."""
    THREADS: gl.constexpr = 128 * T.groups + 32 * T.pipeline.loader_warps  # pyright: ignore[reportAssignmentType]
    GROUPS: gl.constexpr = T.groups
    named_wait(MEETING, THREADS)
    found = gl.to_tensor(NONE)
    for group in gl.static_range(GROUPS):
        found = gl.minimum(found, read_word(again.told, (turn & 1) * GROUPS + group, WARPS))
    return gl.where(found == NONE, found, found + AGAIN)
