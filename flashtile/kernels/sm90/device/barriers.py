"""Whose turn it is to issue products: while one warpgroup exponentiates, another multiplies."""

from flashtile.triton_glue.gluon import gl, gluon, named_arrive, named_wait

FIRST_TURN = gl.constexpr(8)  # hardware barriers 8, 9, ... say whose turn it is; Triton uses the lower ones


@gluon.jit
def take_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Wait until the warpgroup before this one has issued its products."""
    if T.schedule.turns:
        named_wait(FIRST_TURN + GROUP, 256)


@gluon.jit
def pass_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Let the next warpgroup issue its products."""
    if T.schedule.turns:
        named_arrive(FIRST_TURN + (GROUP + 1) % T.groups, 256)
