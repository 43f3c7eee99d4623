"""The numbers that companions compute with."""

from __future__ import annotations

from flashtile.triton_glue.language import jit, tl

SHORT = 256  # columns of an fp32 row of which single roundings decide how exact it is; these take float64


@jit
def number(x, T: tl.constexpr):
    """float64 with T.wide, float32 otherwise."""
    if T.wide:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@jit
def quotient(x, y, T: tl.constexpr):
    """x / y; Triton's own is up to two units in the last place off, its rounded one takes some instructions more."""
    if T.exact:
        return tl.div_rn(x, tl.zeros_like(x) + y)
    else:
        return x / y


@jit
def ratio(x, y, T: tl.constexpr):
    """x / y of two scalars, rounded: Triton's own quotient of float32 is up to two units in the last place off."""
    if T.wide:
        return tl.cast(x, tl.float64) / tl.cast(y, tl.float64)
    else:
        return tl.div_rn(tl.cast(x, tl.float32), tl.cast(y, tl.float32))
