"""Which tile a resident block computes next: whoever is done first takes the next one."""

from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.triton_glue.gluon import aggregate, first_lane, first_thread, gl, gluon, of_first_lane, uniform


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
    return uniform(ticket)


@aggregate
class Tickets:
    """How one warp tells the other roles of its block what to compute: a ticket, and where WORDS > 1 what it stands for."""

    numbers: gl.shared_memory_descriptor
    channel: Channel
    WORDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, channel, WORDS):
        self.numbers = numbers
        self.channel = channel
        self.WORDS = gl.constexpr(WORDS)

    @gluon.jit
    def number(self, turn, i: gl.constexpr, WARPS: gl.constexpr):
        """A turn's `i`-th number, for a role of WARPS warps."""
        return read_word(self.numbers, self.channel.at(turn) * self.WORDS + i, WARPS)

    @gluon.jit
    def publish(self, turn, numbers):
        """Tell the numbers of a turn."""
        self.channel.claim(turn)
        write_words(self.numbers, self.channel.at(turn) * self.WORDS, numbers, 1)
        self.channel.hand_over(turn)

    @gluon.jit
    def read(self, turn, WARPS: gl.constexpr):
        """The ticket of a turn, for a role of WARPS warps. Where WORDS > 1 it lets go of them by `finish`."""
        self.channel.wait(turn)
        ticket = self.number(turn, 0, WARPS)
        if self.WORDS == 1:
            self.channel.release(turn)
        return ticket

    @gluon.jit
    def finish(self, turn):
        """Let go of a turn's numbers."""
        if self.WORDS > 1:
            self.channel.release(turn)


@gluon.jit
def write_words(words, first, numbers, WARPS: gl.constexpr, ALONE: gl.constexpr = False):
    """Write numbers to shared memory from `first` on, for a role of WARPS warps.

    By the lane that hands them over: what a warp's other lanes write goes to a word that nobody reads. A barrier would order
    these and that one, but a warp's is no instruction: racecheck, which sees none, takes what they write for a race. Of four
    warps each writes them, or the first ALONE: racecheck follows no barrier from there to an mbarrier.
    """
    SPARE: gl.constexpr = words.shape[0] - 1  # pyright: ignore[reportAssignmentType]
    for i in gl.static_range(len(numbers)):
        at = first_thread(first + i, SPARE) if ALONE and WARPS > 1 else first_lane(first + i, SPARE)
        words.index(at).store(gl.full([1], numbers[i], gl.int32, one(WARPS)))


@gluon.jit
def read_word(words, at, WARPS: gl.constexpr):
    """One of the numbers that `write_words` wrote, for a role of WARPS warps.

    If that is one, by the lane that lets go of it, likewise; the others read a word that nobody writes.
    """
    SPARE: gl.constexpr = words.shape[0] - 2  # pyright: ignore[reportAssignmentType]
    if WARPS == 1:
        return of_first_lane(gl.sum(words.index(first_lane(at, SPARE)).load(one(WARPS)), 0))
    else:
        return gl.sum(words.index(at).load(one(WARPS)), 0)


@gluon.constexpr_function
def one(warps: int):
    """The layout of one number that every thread has."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def make_tickets(READERS: gl.constexpr, WORDS: gl.constexpr, WARPS: gl.constexpr = 0, SINGLY: gl.constexpr = False):
    """Tickets for READERS, roles of four warps, and WARPS, of one; see `make_channel`. Fence before specialising warps."""
    return Tickets(make_words(2 * WORDS), make_channel(2, READERS, 1, SINGLY, False, WARPS), WORDS)


@gluon.jit
def make_words(COUNT: gl.constexpr):
    """Shared memory for so many numbers, and two to spare."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # pyright: ignore[reportAssignmentType]
    return gl.allocate_shared_memory(gl.int32, [COUNT + 2, 1], layout)
