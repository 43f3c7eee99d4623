"""Which tile a resident block computes next: whoever is done first takes the next one."""

from flashtile.kernels.hopper.channel import Channel, make_channel
from flashtile.kernels.hopper.gluon import aggregate, gl, gluon


@gluon.jit
def take(counter_ptr):
    """Take a ticket. Only `spread` waits for it, and tells it to the whole warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p;\nelect.sync _|p, 0xffffffff; mov.u32 $0, 0;\n@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=&r,l", [counter_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def spread(ticket):
    """The ticket that one lane took."""
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class Tickets:
    """How one warp tells the other roles of its block what to compute."""

    numbers: gl.shared_memory_descriptor
    channel: Channel

    @gluon.constexpr_function
    def __init__(self, numbers, channel):
        self.numbers = numbers
        self.channel = channel

    @gluon.jit
    def publish(self, turn, ticket):
        """Tell the ticket of a turn."""
        self.channel.claim(turn)
        self.numbers.index(self.channel.at(turn)).store(gl.full([1], ticket, gl.int32, one(1)))
        self.channel.hand_over(turn)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """The ticket of a turn, for a role of WARPS warps."""
        self.channel.wait(turn)
        ticket = gl.sum(self.numbers.index(self.channel.at(turn)).load(one(WARPS)), 0)
        self.channel.release(turn)
        return ticket


@gluon.constexpr_function
def one(warps: int):
    """The layout of one number that every thread has."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def make_tickets(READERS: gl.constexpr):
    """Tickets for so many roles. Fence before specialising warps."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # pyright: ignore[reportAssignmentType]
    return Tickets(gl.allocate_shared_memory(gl.int32, [2, 1], layout), make_channel(2, READERS))
