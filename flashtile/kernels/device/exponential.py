"""The exponential, to the accuracy that a problem can use, and what its exponents are measured from."""

from __future__ import annotations

from flashtile.triton_glue.language import constexpr, jit, tl

LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)
# An lse beyond this, in natural units, is looked at for what its rounding lacks: below, probabilities are off by 2^-14 at most.
FAR = constexpr(1024.0)
LOG2E_REST = constexpr(1.925963033500e-08)  # what float32(LOG2E) lacks


@jit
def exp(x, T: tl.constexpr):
    """exp(x). 16-bit problems take the hardware's base-2 exponential of the product x * log2(e).

    In fp32 (T.exact) that product alone would cost several units in the last place, so the argument is split into an
    integer and a rest in [-1/2, 1/2], the latter taken by a polynomial (fitted; 8e-8 in all): 12 multiply-adds beside
    thousands of matrix operations per score. float64 numbers get float64's. x = -inf gives 0, NaN gives NaN.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif T.exact:
        x = tl.where(x < -104.0, -104.0, x)  # exp(-104) is 0 in float32, and finite arithmetic gets there
        log2e = tl.full(x.shape, LOG2E, tl.float32)
        if T.cut:
            power = x * LOG2E
            rest = tl.fma(x, log2e, -power) + x * LOG2E_REST
            p = tl.exp2(power)
            p += p * (rest * LN2)
        else:
            whole = tl.floor(x * LOG2E + 0.5)
            rest = tl.fma(x, log2e, -whole) + x * LOG2E_REST
            fit = 0.001339109727 + rest * 0.0001546167976
            fit = 0.05550356672 + rest * (0.009618056088 + rest * fit)
            fit = 0.6931471881 + rest * (0.2402265093 + rest * fit)
            p = (1.0 + rest * fit) * tl.exp2(whole)
        return p
    else:
        return tl.exp2(x * LOG2E)


@jit
def finite(top):
    """What exponents are measured from: their maximum, where that is one; 0 where nothing is seen."""
    return tl.where(top == float("-inf"), 0.0, top)
