"""Locks of the parts of a sum: who adds in a fixed order waits for those before it, or whoever comes first stores."""

from flashtile.triton_glue.gluon import gl, gluon


@gluon.jit
def await_turn(lock_ptr, reports):
    """Wait until `reports` warps have reported to the lock. Every thread looks for itself: what follows comes after."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 n;\nAGAIN: ld.acquire.gpu.global.b32 n, [$1]; setp.ne.s32 p, n, $2; @p bra AGAIN;\n"
        "mov.u32 $0, 0; }",
        "=r,l,r", [lock_ptr.to(gl.int64), reports], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def claim(lock_ptr):
    """For a role of one warp: ask to be the first. Only `is_first` waits for the answer, and tells it to the whole warp."""
    return gl.inline_asm_elementwise(
        _block(ASK), "=&r,l", [lock_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def is_first(lock_ptr, answer=None):
    """Whether a claim was the first, who has to report; others it lets go on once that has reported.

    answer: what `claim` gave, or NOBODY_ASKED: the claim is made here. Who has claimed a part must not wait for the first of
    another one before it has reported.
    """
    if answer is None:
        first = gl.inline_asm_elementwise(
            _block(ASK, TELL), "=&r,l", [lock_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        first = gl.inline_asm_elementwise(
            _block(ASK_IF_NOBODY, TELL), "=&r,l,r", [lock_ptr.to(gl.int64), answer], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return first == 0


NOBODY_ASKED = gl.constexpr(-1)
ASK = gl.constexpr("elect.sync _|p, 0xffffffff; mov.u32 $0, 0; @p atom.acquire.gpu.global.cas.b32 $0, [$1], 0, 1;")
ASK_IF_NOBODY = gl.constexpr(
    "elect.sync _|p, 0xffffffff; mov.u32 $0, $2; setp.eq.s32 q, $0, -1; @q mov.u32 $0, 0; and.pred q, p, q;\n"
    "@q atom.acquire.gpu.global.cas.b32 $0, [$1], 0, 1;"
)
TELL = gl.constexpr(
    "AGAIN: setp.eq.u32 q, $0, 1; @q ld.acquire.gpu.global.b32 $0, [$1]; @q bra AGAIN; redux.sync.or.b32 $0, $0, 0xffffffff;"
)


@gluon.constexpr_function
def _block(*texts: str) -> str:
    return "\n".join(["{ .reg .pred p, q;", *texts, "}"])


@gluon.jit
def report(lock_ptr):
    """Tell the lock that this role's warps have added; a warp's additions are performed before it is told."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p;\nbar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff;\n"
        "@p red.release.gpu.global.add.u32 [$1], 1;\nmov.u32 $0, 0; }",
        "=r,l", [lock_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def writes_done(PENDING: gl.constexpr):
    """Wait until all but the last PENDING groups of stores and additions that this thread began by the copy engine are done."""
    gl.inline_asm_elementwise(_writes_done(PENDING), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _writes_done(pending: int) -> str:
    return f"cp.async.bulk.wait_group {pending}; mov.u32 $0, 0;"
