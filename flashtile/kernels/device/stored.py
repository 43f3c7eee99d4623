"""Numbers of 8 bits, as a cache holds them: e4m3 and e5m2 (OCP's, without and with infinities) in bytes, and int8."""

from __future__ import annotations

from flashtile.triton_glue.language import INTERPRETED, constexpr, jit, tl

BY_FLOAT32 = constexpr(INTERPRETED)  # which makes no bfloat16 of an integer
EXPONENT = constexpr(0x7F800000)
LEAST_POWER = constexpr(27 << 23)  # 2^-100: of rows of zeros
MAGIC = constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, the nearest, of two the even one
# e4m3 and e5m2 as the upper bits of a float32 are too small by a power of two, which is that of their biases' difference.
E4M3_SCALE = constexpr(2.0**120)
E5M2_SCALE = constexpr(2.0**112)


@jit
def widened(x, KIND: tl.constexpr, STORED: tl.constexpr, NATIVE: tl.constexpr):
    """Stored numbers in KIND, exactly: each of 8 bits is one of bf16, of fp16 and of fp32.

    NATIVE: Triton makes fp16 of them well on this GPU.
    """
    if STORED == "int8":
        return x.to(tl.float32).to(KIND) if BY_FLOAT32 else x.to(KIND)
    elif STORED == "e5m2" and NATIVE:
        return by_float32(x.to(tl.float8e5, bitcast=True).to(tl.float16), KIND)
    elif STORED == "e5m2":  # the upper half of an fp16
        return by_float32((x.to(tl.int16) << 8).to(tl.float16, bitcast=True), KIND)
    elif NATIVE:
        return by_float32(x.to(tl.float8e4nv, bitcast=True).to(tl.float16), KIND)
    else:
        bits = x.to(tl.int32)
        number = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * E4M3_SCALE
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(KIND)


@jit
def operand_of(x, KIND: tl.constexpr, T: tl.constexpr):
    """Stored numbers as products take them: in KIND, or where T.fp8 as they are."""
    if T.fp8:
        return x.to(tl.float8e4nv, bitcast=True)
    else:
        STORED: tl.constexpr = T.stored
        NATIVE: tl.constexpr = T.native
        return widened(x, KIND, STORED, NATIVE)


@jit
def as_e4m3(x):
    """float32 from -448 to 448 as e4m3, the nearest; Triton's interpreter would cut off the bits that are left out."""
    if BY_FLOAT32:
        return narrowed(x, 448.0, "e4m3").to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@jit
def as_bytes(x, NATIVE: tl.constexpr):
    """The same as bytes, of any float32. NATIVE: the GPU has an instruction for it."""
    if NATIVE:
        return (
            tl.minimum(tl.maximum(x, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
            .to(tl.float8e4nv)
            .to(tl.uint8, bitcast=True)
        )
    else:
        return narrowed(x, 448.0, "e4m3")


@jit
def scale_of_head(ptr, strides, item, head):
    """What everything of an item's head is to be multiplied by."""
    return tl.load(ptr + item.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1])


@jit
def scales_of_rows(ptr, strides, slab, first, head, count, ROWS: tl.constexpr, begin):
    """Of ROWS rows from `first` on those scales that begin <= row < count, 0 of others; strides of (slabs, span, heads)."""
    row = tl.arange(0, ROWS)
    at = ptr + slab.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return tl.load(at + (first + row).to(tl.int64) * strides[1], mask=(row >= begin) & (row < count), other=0.0)


@jit
def by_float32(x, KIND: tl.constexpr):
    """fp16 as KIND. Triton 3.6.0 goes to bf16 by an instruction that an H100 issues at a quarter of these two's rate."""
    return x if KIND == tl.float16 else x.to(tl.float32).to(KIND)


@jit
def lowered(x, top):
    """(bf16 rows in fp16, what their products are to be multiplied by); top: the largest magnitude of each row.

    Rows are divided by a power of two, their largest is then from 2^14 up: what is 2^28 times smaller is as exact as it was.
    """
    power = tl.maximum(top.to(tl.float32).to(tl.int32, bitcast=True) & EXPONENT, LEAST_POWER).to(tl.float32, bitcast=True)
    return (x.to(tl.float32) * (16384.0 / power)[:, None]).to(tl.float16), power * (1.0 / 16384.0)


@jit
def narrowed(x, MOST: tl.constexpr, STORED: tl.constexpr):
    """float32 as stored numbers: the nearest, of two the even one, and the largest, MOST, of what is beyond. NaN stays NaN;
    int8 has none, and stores 0.
    """
    nan = x != x
    x = tl.minimum(tl.maximum(tl.where(nan, 0.0, x), -MOST), MOST)
    if STORED == "int8":
        return ((x + MAGIC).to(tl.int32, bitcast=True) - tl.full(x.shape, MAGIC, tl.float32).to(tl.int32, bitcast=True)).to(
            tl.int8
        )
    else:  # SHIFT: bits of a float32's fraction that are left out, HALF: less than half of them; LEAST: of those with an
        # exponent; adding UNIT rounds to a multiple of the least number
        SHIFT: tl.constexpr = 20 if STORED == "e4m3" else 21  # pyright: ignore[reportAssignmentType]
        HALF: tl.constexpr = 0x7FFFF if STORED == "e4m3" else 0xFFFFF  # pyright: ignore[reportAssignmentType]
        BIAS: tl.constexpr = (120 << 3) if STORED == "e4m3" else (112 << 2)  # pyright: ignore[reportAssignmentType]
        LEAST: tl.constexpr = 2.0**-6 if STORED == "e4m3" else 2.0**-14  # pyright: ignore[reportAssignmentType]
        UNIT: tl.constexpr = 2.0**14 if STORED == "e4m3" else 2.0**7  # pyright: ignore[reportAssignmentType]
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        large = ((size + HALF + ((size >> SHIFT) & 1)) >> SHIFT) - BIAS
        near = tl.abs(x) + UNIT
        small = near.to(tl.int32, bitcast=True) - tl.full(x.shape, UNIT, tl.float32).to(tl.int32, bitcast=True)
        made = tl.where(tl.abs(x) < LEAST, small, large)
        return (tl.where(nan, 0x7F, made) | ((bits >> 24) & 0x80)).to(tl.uint8)
