"""Products of two tiles: the matrix unit's own, or float32-grade ones of operands in three bf16 parts.

Matrix units cut off what they add to an accumulator, once in every 16 terms and always towards zero. What is done about
it, in units of 2^-24 of the result (rms, on an H100), for sums of 64 / 128 / 256 terms:

    a float32 matmul of cuBLAS                             2.4 / 3.4 / 4.8
    six products of freely rounded parts, one accumulator  1.3 / 2.1 / 3.9   and up to half of it a bias
    six products of aligned parts, the largest by itself   0.8 / 0.9 / 0.9   no bias

tf32 on sm90 (T.short) takes the three largest products of six. They leave out 2^-17 of an operand, TF32 itself 2^-12.
"""

from __future__ import annotations

from flashtile.triton_glue.language import constexpr, jit, tl

EXPONENT = constexpr(0x7F800000)
SIXTEEN = constexpr(16 << 23)
LARGEST = constexpr((127 + 110) << 23)  # beyond this power, and for inf, the anchor would overflow
HALF_BF16 = constexpr(1 << 15)
KEPT_BY_BF16 = constexpr(-1 << 16)
HALF_TF32 = constexpr(1 << 12)
KEPT_BY_TF32 = constexpr(-1 << 13)


@jit
def aligned_parts(x, T: tl.constexpr):
    """x as a tuple of what the matrix unit multiplies: parts whose sum it is, to 2^-26 of a row's largest element; (x,)
    unless T.parts, in float64 where T.wide.

    The first part counts in one unit per row, 2^-7 of the power of two in the row's largest element: at most 256 units,
    which bf16 holds, so that a sum of 256 products of two such numbers stays within 2^24 and is exact. (Ozaki's scheme;
    in integers: Ootomo, Ozaki and Yokota, arXiv 2306.11975.) Adding and subtracting the anchor rounds to the unit.
    """
    if T.wide:
        return (x.to(tl.float64),)
    elif T.cut:
        return cut_parts(x)
    elif T.parts:
        top = tl.max(tl.abs(x), 1, keep_dims=True)
        power = tl.minimum(top.to(tl.int32, bitcast=True) & EXPONENT, LARGEST)
        anchor = (power + SIXTEEN).to(tl.float32, bitcast=True) * 1.5
        high = ((x + anchor) - anchor).to(tl.bfloat16)
        return (high,) + rest_parts(x, high)  # noqa: RUF005 (Triton knows no unpacking)
    else:
        return (x,)


@jit
def free_parts(x, KIND: tl.constexpr, T: tl.constexpr):
    """x as a tuple of parts, each rounded to nearest; (x in type KIND, or float64,) unless T.parts."""
    if T.narrow:
        # Triton 3.6.0 lays a product's operands out for the narrowest load behind them, as no float64 product takes them. It
        # looks no further than a reduction.
        return (tl.max(x.to(tl.float64)[:, :, None], 2),)
    elif T.wide:
        return (x.to(tl.float64),)
    elif T.cut:
        return cut_parts(x)
    elif T.parts:
        high = x.to(tl.bfloat16)
        return (high,) + rest_parts(x, high)  # noqa: RUF005
    else:
        return (x.to(KIND),)


@jit
def cut_parts(x):
    """x as three bf16 parts of 8 bits each, whose sum it is exactly; what is not finite makes NaN of the second.

    The first is rounded to nearest, so that the products left out, of second and third parts, have either sign. All by
    integer operations: an H100 converts to bf16 at an eighth of their rate.
    """
    bits = x.to(tl.int32, bitcast=True) + HALF_BF16
    rest = x - (bits & KEPT_BY_BF16).to(tl.float32, bitcast=True)
    more = rest.to(tl.int32, bitcast=True)
    last = rest - (more & KEPT_BY_BF16).to(tl.float32, bitcast=True)
    return upper(bits), upper(more), upper(last.to(tl.int32, bitcast=True))


@jit
def upper(bits):
    """The upper halves of 32-bit integers, as the bits of bf16 numbers."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def rest_parts(x, high):
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit
def transposed(x, T: tl.constexpr):
    """The parts of the transposed tile."""
    if T.parts:
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        return (tl.trans(x[0]),)


@jit
def small_products(a, b, T: tl.constexpr):
    """All of a times b but the product of the highest parts, and what is below 2^-24; NaN stands for 0, unless T.cut.

    NaN comes of inf - inf in a lower part: `high` alone says what is infinite.
    """
    small = add_small_products(tl.dot(a[1], b[1]), a, b)
    if T.cut:
        return small
    return tl.where(small == small, small, 0.0)


@jit
def add_small_products(small, a, b):
    """small + a times b but the products of the highest parts and of the middle ones."""
    small = tl.dot(a[2], b[0], small)
    small = tl.dot(a[0], b[2], small)
    small = tl.dot(a[1], b[0], small)
    return tl.dot(a[0], b[1], small)


@jit
def rounded_sum(fresh, acc):
    """fresh + acc. Written as a sum, Triton would make acc the accumulator of the product that `fresh` is."""
    return tl.fma(fresh, tl.full(fresh.shape, 1.0, tl.float32), acc)


@jit
def operand(x, T: tl.constexpr):
    """x as the matrix unit is to take it: of tf32 it ignores the last 13 bits, which x is rounded to first.

    Cut off, they err twice as much and always towards zero. NaN keeps its bits: rounding would make 0 of all ones.
    """
    if T.precision == "tf32":
        nearest = (x.to(tl.int32, bitcast=True) + HALF_TF32) & KEPT_BY_TF32
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        return x


@jit
def product_and_rest(a, b, T: tl.constexpr):
    """`product` of aligned parts, and what rounding its two sums took off it."""
    small, high = small_products(a, b, T), tl.dot(a[0], b[0])
    whole = rounded_sum(high, small)
    return whole, small - (whole - high)


@jit
def product(a, b, T: tl.constexpr):
    """Parts a (m, k) times parts b (k, n)."""
    if T.wide:
        return tl.dot(a[0], b[0], out_dtype=tl.float64)
    elif T.short:
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0])))
    elif T.cut:
        return tl.dot(a[0], b[0], small_products(a, b, T))
    elif T.parts:
        small = small_products(a, b, T)
        return rounded_sum(tl.dot(a[0], b[0]), small)
    else:
        return tl.dot(operand(a[0], T), operand(b[0], T), input_precision=T.precision)


@jit
def score_product(a, b, T: tl.constexpr):
    """Parts of q (m, k) times parts of k (k, n), or the other way round: exact enough for lse, whatever the precision."""
    if T.short and T.makes_lse:
        return tl.dot(a[0], b[0], small_products(a, b, T))
    elif T.parts or T.wide:
        return product(a, b, T)
    else:
        return tl.dot(a[0], b[0], input_precision=T.score_precision)


@jit
def add_product(acc, a, b, T: tl.constexpr):
    """acc + a b. With parts both sums start from zero and a rounding unit adds them to acc.

    Of few terms, as in the first rows under a causal mask, the largest product is exact here too: 16 bits each.
    "ieee" is a chain of multiply-adds, a rounding of the accumulator each: there too it starts from zero.
    """
    if T.wide:
        return tl.dot(a[0], b[0], acc, out_dtype=tl.float64)
    elif T.short:
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0], acc)))
    elif T.cut:
        return rounded_sum(product(a, b, T), acc)
    elif T.parts:
        acc += small_products(a, b, T)
        return rounded_sum(tl.dot(a[0], b[0]), acc)
    elif T.precision == "ieee":
        return rounded_sum(product(a, b, T), acc)
    else:
        return tl.dot(operand(a[0], T), operand(b[0], T), acc, input_precision=T.precision)


@jit
def long_sum(ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr):
    """What `add_to_sum` adds up, at first: (a sum,), or where T.keeps_rest (a sum, the rest that rounding takes off it)."""
    zeros = tl.zeros([ROWS, COLUMNS], tl.float64 if T.wide else tl.float32)
    if T.keeps_rest:
        return zeros, zeros
    else:
        return (zeros,)


@jit
def add_to_sum(sums, a, b, T: tl.constexpr):
    """`long_sum` + a b.

    The rest is what addition rounds off (Fast2Sum, Dekker 1971), and of aligned parts the small products too: it is so much
    smaller than the sum that its own roundings, and a matrix unit's, are nothing.
    """
    if T.keeps_rest:
        acc, rest = sums
        if T.parts and not T.cut:
            rest = add_small_products(tl.dot(a[1], b[1], rest), a, b)
            fresh = tl.dot(a[0], b[0])
        else:
            fresh = product(a, b, T)
        whole = rounded_sum(fresh, acc)
        return whole, rest + (fresh - (whole - acc))
    else:
        return (add_product(sums[0], a, b, T),)


@jit
def whole_sum(sums, T: tl.constexpr):
    """What a `long_sum` has come to; a rest that is not finite stands beside a sum that says what it is."""
    if T.keeps_rest:
        return sums[0] + tl.where(tl.abs(sums[1]) < float("inf"), sums[1], 0.0)
    else:
        return sums[0]


@jit
def add_rounded(acc, x, parts, T: tl.constexpr):
    """acc + x times parts, x rounded to their type; where T.halves_rounding what that took off counts too."""
    acc = add_product(acc, free_parts(x, parts[0].dtype, T), parts, T)
    if T.halves_rounding:
        rest = x - x.to(parts[0].dtype).to(x.dtype)
        acc = add_product(acc, free_parts(rest, parts[0].dtype, T), parts, T)
    return acc
