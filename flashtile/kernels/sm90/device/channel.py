"""Channel: how one warp role hands shared-memory tiles to another."""

from flashtile.triton_glue.gluon import aggregate, arrive_each, gl, gluon, mbarrier


@gluon.constexpr_function
def _log2(n: int) -> int:
    """The logarithm of a power of two, -1 for any other number: signed division costs instructions that a shift does not."""
    return n.bit_length() - 1 if n & (n - 1) == 0 else -1


@gluon.constexpr_function
def _arrivals(roles: int, warps: int, singly: bool) -> int:
    """How often roles of four warps, and of one, arrive at a barrier."""
    return 128 * roles + 32 * warps if singly else roles + warps


@gluon.jit
def _place(use, STAGES: gl.constexpr):
    if _log2(STAGES) >= 0:
        return use & (STAGES - 1)
    else:
        return use % STAGES


@gluon.jit
def _phase(use, STAGES: gl.constexpr):
    """Parity of the rounds before this use."""
    if _log2(STAGES) >= 0:
        return (use >> _log2(STAGES)) & 1
    else:
        return (use // STAGES) & 1


@aggregate
class Channel:
    """A ring of STAGES tiles between a producer and its consumers.

    Both sides count their uses from 0 (`use`); the tile is `use % STAGES`, and `use // STAGES` tells how often the ring
    went round, whose parity is the phase of the hardware barriers. `full` fires when a tile's bytes have arrived, `free`
    when every consumer has let go of it. Where RELEASES_SINGLY every thread of the consumers does so by itself, where
    GIVES_SINGLY every thread of the producers hands over by itself; otherwise one does it for its role, which meets before.
    """

    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    RELEASES_SINGLY: gl.constexpr
    GIVES_SINGLY: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full, free, STAGES, RELEASES_SINGLY, GIVES_SINGLY):
        self.full = full
        self.free = free
        self.STAGES = gl.constexpr(STAGES)
        self.RELEASES_SINGLY = gl.constexpr(RELEASES_SINGLY)
        self.GIVES_SINGLY = gl.constexpr(GIVES_SINGLY)

    @gluon.jit
    def at(self, use):
        """The tile's place in the ring."""
        return _place(use, self.STAGES)

    @gluon.jit
    def claim(self, use):
        """Producer: wait until the tile is free."""
        mbarrier.wait(self.free.index(_place(use, self.STAGES)), _phase(use, self.STAGES) ^ 1)

    @gluon.jit
    def acquire(self, use, BYTES: gl.constexpr):
        """Producer: wait until the tile is free, announce BYTES, and give the barrier that the copies must report to."""
        self.claim(use)
        return self.announce(use, BYTES)

    @gluon.jit
    def hand_over(self, use):
        """Producer: say that the tile is there, where no copy reports it."""
        if self.GIVES_SINGLY:
            arrive_each(self.full.index(_place(use, self.STAGES)))
        else:
            mbarrier.arrive(self.full.index(_place(use, self.STAGES)), count=1)

    @gluon.jit
    def reclaim(self, use):
        """Producer: wait until every consumer has let go of this use's tile."""
        mbarrier.wait(self.free.index(_place(use, self.STAGES)), _phase(use, self.STAGES))

    @gluon.jit
    def announce(self, use, BYTES: gl.constexpr):
        """Producer: as `acquire`, for a tile known to be free."""
        bar = self.full.index(_place(use, self.STAGES))
        mbarrier.expect(bar, BYTES)
        return bar

    @gluon.jit
    def wait(self, use):
        """Consumer: wait until the tile has arrived."""
        mbarrier.wait(self.full.index(_place(use, self.STAGES)), _phase(use, self.STAGES))

    @gluon.jit
    def release(self, use):
        """Consumer: let go of the tile."""
        if self.RELEASES_SINGLY:
            arrive_each(self.free.index(_place(use, self.STAGES)))
        else:
            mbarrier.arrive(self.free.index(_place(use, self.STAGES)), count=1)


@gluon.jit
def make_channel(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1,
                 RELEASES_SINGLY: gl.constexpr = False, GIVES_SINGLY: gl.constexpr = False,
                 WARPS: gl.constexpr = 0):  # fmt: skip
    """A channel whose tiles are each filled by PRODUCERS and released by CONSUMERS and WARPS. Fence before specialising warps.

    WARPS are roles of one warp; the others, where they do it SINGLY, of four. Without CONSUMERS nobody releases a tile, and who
    fills it knows from elsewhere that it is free. No barrier may be made that no role uses (`audit/barriers.py`).
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = full
    if CONSUMERS > 0:
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=_arrivals(PRODUCERS, 0, GIVES_SINGLY))
        if CONSUMERS > 0:
            mbarrier.init(free.index(i), count=_arrivals(CONSUMERS, WARPS, RELEASES_SINGLY))
    return Channel(full, free, STAGES, RELEASES_SINGLY, GIVES_SINGLY)
