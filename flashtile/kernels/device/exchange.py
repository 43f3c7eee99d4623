"""Pairs of numbers that neighbouring programs of one launch hand to one another, through words that start at zero.

A program that waits must not keep a place from one it waits for: those of a group have ids one after another, and programs
start in the order of their ids. A word is there as soon as it is not 0; it holds the pair itself, so that nothing is fenced.
"""

from __future__ import annotations

from flashtile.plan.device import Device
from flashtile.triton_glue.language import constexpr, jit, tl

MARK = constexpr(0x7FA5A5A5)  # the bits of a NaN that no arithmetic makes: what they are taken from is never 0
MOST_PROGRAMS = 8  # of a group

# Each lane of a warp reads one of the words again until it is not 0; then all lanes have all of them. Fewer requests than
# where every lane reads all: 8 x 16 warps of a group of 8 that read the same line at once slow its writers down. What comes
# out are scalars, which have no layout: the compiler repeats this for none.
_SHARE = "".join(
    f"shfl.sync.idx.b32 x, low, {i}, 31, -1;\nshfl.sync.idx.b32 y, high, {i}, 31, -1;\nmov.b64 ${i}, {{x, y}};\n"
    for i in range(MOST_PROGRAMS)
)
WAIT = constexpr(
    f"""{{
    .reg .pred absent;
    .reg .b32 lane, low, high, x, y;
    .reg .b64 at, word;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, {MOST_PROGRAMS - 1};
    min.u32 lane, lane, ${MOST_PROGRAMS + 1};
    mul.wide.u32 at, lane, 8;
    add.u64 at, at, ${MOST_PROGRAMS};
    again:
    ld.relaxed.gpu.global.b64 word, [at];
    setp.eq.u64 absent, word, 0;
    @absent bra again;
    mov.b64 {{low, high}}, word;
    {_SHARE}
    }}"""
)
REGISTERS = constexpr(",".join(["=&l"] * MOST_PROGRAMS + ["l", "r"]))


def talk(device: Device) -> bool:
    """Whether programs there run at once and can wait for one another; an interpreter's do not."""
    return device.kind == "cuda"


@jit
def hand_out(at, a, b, there):
    """Write a float32 pair as the word at an int64 pointer, if it is there."""
    low = (tl.cast(a, tl.uint32, bitcast=True) ^ MARK).to(tl.uint64)
    high = tl.cast(b, tl.uint32, bitcast=True).to(tl.uint64) << 32
    tl.atomic_xchg(at, (high | low).to(tl.int64), mask=there, sem="relaxed")


@jit
def wait_for(first, COUNT: tl.constexpr):
    """COUNT words from an int64 pointer on, once all are there, and copies of the last one."""
    last = tl.full((), COUNT - 1, tl.int32)
    return tl.inline_asm_elementwise(
        WAIT, REGISTERS, [first.to(tl.int64), last],
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64),  # MOST_PROGRAMS of them
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def pair(word):
    """What `hand_out` wrote."""
    bits = word.to(tl.uint64)
    low, high = bits.to(tl.uint32) ^ MARK, (bits >> 32).to(tl.uint32)
    return tl.cast(low, tl.float32, bitcast=True), tl.cast(high, tl.float32, bitcast=True)
