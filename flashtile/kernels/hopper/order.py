"""Locks of the parts of a sum: who adds in a fixed order waits for those before it, or whoever comes first stores."""

from flashtile.kernels.hopper.gluon import gl, gluon


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
    """For a role of one warp: 0 for the first that comes, who has to report; for others not 0, once it has reported."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q;\nelect.sync _|p, 0xffffffff; mov.u32 $0, 0;\n"
        "@p atom.acquire.gpu.global.cas.b32 $0, [$1], 0, 1;\n"
        "AGAIN: setp.eq.u32 q, $0, 1; @q ld.acquire.gpu.global.b32 $0, [$1]; @q bra AGAIN;\n"
        "redux.sync.or.b32 $0, $0, 0xffffffff; }",
        "=&r,l", [lock_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def report(lock_ptr):
    """Tell the lock that this role's warps have added; a warp's additions are performed before it is told."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p;\nbar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff;\n"
        "@p red.release.gpu.global.add.u32 [$1], 1;\nmov.u32 $0, 0; }",
        "=r,l", [lock_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def adds_done(PENDING: gl.constexpr):
    """Wait until all but the last PENDING additions that this thread began by the copy engine are performed."""
    gl.inline_asm_elementwise(_adds_done(PENDING), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _adds_done(pending: int) -> str:
    return f"cp.async.bulk.wait_group {pending}; mov.u32 $0, 0;"
