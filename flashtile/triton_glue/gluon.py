"""The only import of Gluon, with the words that its releases spell differently or lack.

Importing this module fails where Triton has no usable Gluon; the backend imports it late and turns that into a refusal.
"""

# Device code: Triton's annotations do not describe what its compiler accepts.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import triton.experimental.gluon
from triton._C.libtriton import ir  # pyright: ignore[reportAttributeAccessIssue]
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import ampere, hopper

try:
    from triton import aggregate as _aggregate  # pyright: ignore[reportAttributeAccessIssue]  # 3.9
except ImportError:
    from triton.language.core import _aggregate

NEWEST = (3, 9)  # the last release that has compiled these kernels (make compile); what a later one changed nobody knows yet
if tuple(int(number) for number in triton.__version__.split(".")[:2]) > NEWEST:
    raise ImportError(f"it is newer than {NEWEST[0]}.{NEWEST[1]}, the last release that has compiled them")

# What these make is called in Gluon's language, not in Python's: to a type checker it is anything.
gluon: Any = triton.experimental.gluon
aggregate: Any = _aggregate
fence_async_shared: Any = hopper.fence_async_shared
mbarrier: Any = hopper.mbarrier
tma: Any = hopper.tma
warpgroup_mma: Any = hopper.warpgroup_mma
warpgroup_mma_wait: Any = hopper.warpgroup_mma_wait
store_wait: Any = tma.store_wait

if hasattr(tma, "async_load"):  # 3.9 renamed them; the old names remain and raise
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@builtin
def _tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to a tensor: 3.6's compiler knows it, its language does not."""
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle)


tma_add: Any = getattr(tma, "async_atomic_add", _tma_add)


@gluon.jit
def arrive_each(bar):
    """Every thread of a role arrives at an mbarrier by itself; none waits for the others, as `mbarrier.arrive` has them.

    It is the word for copies that a thread began before (cp.async), of which there are none. By itself it orders nothing: what
    a thread wrote for others it fences before (`fence_async_shared`, behind which all of it is in shared memory).
    """
    ampere.async_copy.mbarrier_arrive(bar, increment_count=False)


@builtin
def settled(value: Any, _semantic: Any = None) -> Any:
    """A kernel's argument as it may enter warp_specialize.

    Launches make constants of integers that equal 1. The type of the tuple that such a constant came in says None of it, and
    a role is given what the type says. Under a name of its own the tuple holds a number again, and a role loads along a dense
    axis element by element; called where the tuple enters, it keeps the constants. Modifiers' arguments bear that; of the
    strides of lists Triton 3.6.0 then makes None.
    """
    return gl.tuple([settled(part, _semantic=_semantic) for part in value]) if isinstance(value, gl.tuple) else value


role_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier  # of all threads of a role; 3.9 renamed it

# (tile, dtype, shape, layout): the same shared memory, or its beginning, as another tile, or as tiles; 3.9 renamed it
recast: Any = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def abreast(tiles, place, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COUNT: gl.constexpr = 2):
    """COUNT of a buffer's tiles, whose rows fill a swizzle, as one tile: that is how its columns would lie."""
    PLACES: gl.constexpr = tiles.shape[0] // COUNT
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)  # pyright: ignore[reportAssignmentType]
    return recast(tiles, tiles.dtype, [PLACES, ROWS, COUNT * COLUMNS], SHARED).index(place)


@gluon.constexpr_function
def _barrier(word: str, number: int, threads: int) -> str:
    return f"bar.{word} {number}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def named_wait(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a hardware barrier and wait for it. Triton itself uses the low numbers: take 8 to 15."""
    gl.inline_asm_elementwise(_barrier("sync", BARRIER, THREADS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a hardware barrier without waiting."""
    gl.inline_asm_elementwise(_barrier("arrive", BARRIER, THREADS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pack(x, DTYPE: gl.constexpr):
    """float32 to 16 bits, rounded to nearest even, two by two.

    As `x.to(DTYPE)`, but where it stands: LLVM moves plain conversions into the next iteration and carries twice the registers.
    """
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=False, pack=2)


@gluon.jit
def pack_e4m3(a, b, c, d):
    """Four float32 as bytes of an int32, the first the lowest: e4m3, rounded to nearest even, the largest for what is beyond.

    Where it stands, as `pack`.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }",
        "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack_e4m3(words):
    """The bytes of int32 that four neighbours, in one thread, have the same of: of each neighbour its own, as e4m3."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def add_pairs(a, b):
    """The sum of tensors of 16 bits, two by two, rounded once: by way of float32 it takes seven times the instructions."""
    if a.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.constexpr_function
def _scale_unless_one(columns: int, waits: bool) -> str:
    count = columns // 2  # of a thread: two neighbours of one row, two of another, and so on
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};\n" for i in range(count))
    return f"""{{
        .reg .pred p, q;
        setp.neu.f32 p, ${2 * count}, 0f3F800000;
        setp.neu.f32 q, ${2 * count + 2}, 0f3F800000;
        or.pred p, p, q;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra.uni done;
        {"wgmma.wait_group.sync.aligned 0;" if waits else ""}
        {products}done:
    }}"""


@gluon.constexpr_function
def _in_place(columns: int, kind: str, outputs: int = 1, further: int = 1) -> str:
    count = columns // 2
    return ",".join(["=f"] * outputs * count + [str(i) for i in range(count)] + [kind] * further * count)


@gluon.jit
def scale_unless_one(acc, factor, COLUMNS: gl.constexpr, WAITS: gl.constexpr = False):
    """acc (64 x COLUMNS, in `matrix_layout`) times its rows' factors: a vote and a jump where those of a warp are all 1.

    Where other products are under way it WAITS for them, behind the jump: else ptxas lets none be under way (C7517).
    """
    return gl.inline_asm_elementwise(
        _scale_unless_one(COLUMNS, WAITS),
        _in_place(COLUMNS, "f"),
        [acc, factor],
        dtype=gl.float32,
        is_pure=False,
        pack=COLUMNS // 2,
    )


@gluon.constexpr_function
def _row(columns: int, row: int) -> list[int]:
    """Which of a thread's numbers of 64 x `columns` are its first or second row's: two neighbours of one, two of the other."""
    return [i for i in range(columns // 2) if i // 2 % 2 == row]


@gluon.constexpr_function
def _row_maximum(mine: list[int]) -> str:
    """m: the greatest of a row's numbers; four lanes hold it."""
    own = f"mov.f32 m, ${mine[0]};\n" + "".join(f"max.f32 m, m, ${i};\n" for i in mine[1:])
    return own + "".join(f"shfl.sync.bfly.b32 n, m, {lane}, 31, 0xffffffff; max.f32 m, m, n;\n" for lane in (1, 2))


@gluon.constexpr_function
def _raised(columns: int, blind: bool, votes: bool) -> str:
    count, rare, ask, farthest = columns // 2, "", "", "0f5F800000"  # 2^64
    first = [2 * count, 3 * count, 4 * count]  # where top, factor and wild begin
    for row in (0, 1):
        rare += f"{_row_maximum([count + i for i in _row(columns, row)])} mov.f32 b, t{row};\n"
        if blind:
            rare += "setp.eq.f32 q, b, 0fFF800000; selp.f32 b, 0f00000000, b, q; setp.gt.and.f32 q, m, 0fFF800000, q;\n"
        rare += f"neg.f32 b, b; fma.rn.f32 n, m, ${first[1]}, b; ex2.approx.ftz.f32 n, n;\n"
        rare += f"setp.gt{'.or' if blind else ''}.f32 p, n, {farthest}{', q' if blind else ''};\n"
        rare += f"mul.f32 m, m, ${first[1]}; @p mov.f32 t{row}, m;\n"
    if blind:
        ask = "setp.eq.or.f32 p, t0, 0fFF800000, p; setp.eq.or.f32 p, t1, 0fFF800000, p;"
    if blind or votes:
        ask += "vote.sync.any.pred p, p, 0xffffffff;"
    return f"""{{
        .reg .pred p, q; .reg .f32 t<2>, m, n, b;
        mov.f32 t0, ${first[0]}; mov.f32 t1, ${first[0] + 2};
        setp.ne.s32 p, ${first[2]}, {0x7FFFFFFF if votes else 0}; {ask}
        @!p bra.uni done;
        {rare}done:
        {"".join(f"mov.f32 ${i}, t{i // 2 % 2};" for i in range(count))}
    }}"""


@gluon.constexpr_function
def _operands(columns: int, kinds: str) -> str:
    return ",".join(kind for kind in kinds.split() for _ in range(columns // 2))


@gluon.jit
def raised(score, top, factor, wild, BLIND: gl.constexpr, VOTES: gl.constexpr, COLUMNS: gl.constexpr):
    """`top`, and behind a jump what `scores.lifted` says of it; all are 64 x COLUMNS, in `matrix_layout`, top of whole rows.

    A warp jumps that is careful or, if BLIND, of which some row's top is -inf. Careful is where it VOTES that of which some
    thread's `wild` is not 0x7FFFFFFF (again.NONE), otherwise that whose `wild`, the same in all its threads, is not 0.
    """
    return gl.inline_asm_elementwise(
        _raised(COLUMNS, BLIND, VOTES), _operands(COLUMNS, "=f f f f r"), [score, top, factor, wild], dtype=gl.float32,
        is_pure=False, pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.constexpr_function
def _rebased(columns: int) -> str:
    count, rare, much, farthest = columns // 2, "", "0f43800000", "0f5F800000"  # 256 and 2^64
    for row in (0, 1):
        mine = _row(columns, row)
        rare += f"setp.leu.f32 p, s{row}, {much}; setp.num.and.f32 p, s{row}, s{row}, p; selp.b32 w, 0, 1, p;\n"
        rare += "".join(f"shfl.sync.bfly.b32 v, w, {lane}, 31, 0xffffffff; or.b32 w, w, v;\n" for lane in (1, 2))
        rare += f"{_row_maximum(mine)} setp.ne.s32 p, w, 0; setp.gt.and.f32 q, m, {farthest}, p;\n"
        rare += "mov.b32 v, m; and.b32 v, v, 0x7F800000; sub.s32 w, 0x7F000000, v; shr.s32 v, v, 23; sub.s32 v, v, 127;\n"
        rare += "mov.b32 n, w; selp.f32 n, n, 0f3F800000, p; cvt.rn.f32.s32 m, v; selp.f32 m, m, 0f00000000, p;\n"
        rare += f"add.f32 t{row}, t{row}, m; mul.f32 s{row}, s{row}, n; @q mov.f32 s{row}, 0f7F800000;\n"
        rare += "".join(f"mul.f32 ${i}, ${i}, n;\n" for i in mine)
    made = "".join(f"mov.f32 ${count + i}, t{i // 2 % 2}; mov.f32 ${2 * count + i}, s{i // 2 % 2};\n" for i in range(count))
    return f"""{{
        .reg .pred p, q; .reg .b32 v, w; .reg .f32 t<2>, s<2>, m, n;
        mov.f32 t0, ${4 * count}; mov.f32 t1, ${4 * count + 2}; mov.f32 s0, ${5 * count}; mov.f32 s1, ${5 * count + 2};
        add.f32 n, s0, s1; setp.gtu.f32 p, n, {much};
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra.uni done;
        {rare}done:
        {made}
    }}"""


@gluon.jit
def rebased(p, top, sums, COLUMNS: gl.constexpr):
    """(p, top, sums), and behind a vote and a jump what `scores.measured` says of them; 64 x COLUMNS, in `matrix_layout`.

    top: of whole rows; sums: of a lane's numbers of a row.
    """
    return gl.inline_asm_elementwise(
        _rebased(COLUMNS), _in_place(COLUMNS, "f", 3, 2), [p, top, sums], dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False, pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.constexpr_function
def _row_products(columns: int) -> str:
    count, sums = columns // 2, ""
    for i in range(count):  # four chains: of either row, of even and odd columns
        own = f"s{i % 4}"
        sums += f"fma.rn.f32 {own}, ${count + i}, ${2 * count + i}, {own if i > 3 else '0f00000000'};\n"
    made = "".join(f"mov.f32 ${i}, s{i // 2 % 2 * 2};" for i in range(count))
    return f"{{ .reg .f32 s<4>;\n{sums}add.f32 s0, s0, s1; add.f32 s2, s2, s3;\n{made} }}"


@gluon.jit
def row_products(a, b, COLUMNS: gl.constexpr):
    """Of each row's numbers that a thread holds the sum of a times b, a multiply-add each; 64 x COLUMNS, in `matrix_layout`."""
    return gl.inline_asm_elementwise(
        _row_products(COLUMNS), _operands(COLUMNS, "=f f f"), [a, b], dtype=gl.float32, is_pure=True, pack=COLUMNS // 2
    )


@gluon.constexpr_function
def _ones(below: bool) -> str:
    return f"{{ .reg .s32 n; max.s32 n, $1, 0; bmsk.clamp.b32 $0, {'0, n' if below else 'n, 32'}; }}"


@gluon.jit
def ones(bit, BELOW: gl.constexpr):
    """A word whose bits BELOW this one are set, or otherwise from it on; a bit may be any number."""
    return gl.inline_asm_elementwise(_ones(BELOW), "=r,r", [bit], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _select_bits(columns: int, first: int, other: str) -> str:
    count, selects = columns // 2, ""  # of a thread: two neighbours of one row, two of another, and so on
    for row in (0, 1):  # one behind the other: of seven bits in a row ptxas makes predicates at a time (R2P)
        word = f"${2 * count + 2 * row}"
        for bit in range(count // 2):
            x = f"${bit // 2 * 4 + 2 * row + bit % 2}"
            selects += f"and.b32 b, {word}, {1 << first + bit}; setp.ne.b32 p, b, 0; selp.f32 {x}, {x}, {other}, p;\n"
    return f"{{ .reg .pred p; .reg .b32 b;\n{selects}}}"


@gluon.jit
def select_bits(x, words, FIRST: gl.constexpr, OTHER: gl.constexpr, COLUMNS: gl.constexpr):
    """x (64 x COLUMNS, in `matrix_layout`) where its bit is set, elsewhere OTHER, a number in PTX's spelling.

    A thread's columns of a row have the bits of the row's word from FIRST on.
    """
    return gl.inline_asm_elementwise(
        _select_bits(COLUMNS, FIRST, OTHER), _in_place(COLUMNS, "r"), [x, words], dtype=gl.float32, is_pure=True,
        pack=COLUMNS // 2,
    )  # fmt: skip


@gluon.constexpr_function
def _choose(selector: int) -> str:
    return f"prmt.b32 $0, $1, $2, {selector};"


@gluon.jit
def choose_bytes(a, b, SELECTOR: gl.constexpr):
    """Four of two words' bytes: each hexadecimal digit names one, 0 to 3 of a, 4 to 7 of b, the lowest last."""
    return gl.inline_asm_elementwise(_choose(SELECTOR), "=r,r,r", [a, b], dtype=gl.uint32, is_pure=True, pack=1)


# Halves of a word are compared as float16 without a sign: up to 0x7c00 these rise, and NaN is below nothing. What is kept has
# all bits of a mask set, or none where `flip` has: x & (mask ^ flip) is one instruction.


@gluon.constexpr_function
def _keep_pairs(kind: str) -> str:
    return f"""{{
        .reg .b32 p, m;
        cvt.rn.{kind}x2.f32 p, $2, $1;
        abs.f16x2 m, $3;
        set.geu.u32.f16x2 m, m, $4;
        lop3.b32 $0, p, m, $5, 0x60;
    }}"""


@gluon.jit
def keep_pairs(low, high, words, limits, flip, KIND: gl.constexpr):
    """`pack` of two numbers into an int32, with zeros for those whose halves of `words` are below that of `limits`."""
    return gl.inline_asm_elementwise(
        _keep_pairs(KIND), "=r,r,r,r,r,r", [low, high, words, limits, flip], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _keep_singles(by_predicates: bool) -> str:
    if by_predicates:
        chosen = "setp.eq.u32 f, $8, 0; setp.geu.xor.f16x2 p|q, m, $6, !f; selp.b32 $0, $2, 0, p; selp.b32 $1, $3, 0, q;"
    else:
        chosen = """set.geu.u32.f16x2 m, m, $6; prmt.b32 n, m, m, 0xbbbb; prmt.b32 m, m, m, 0x9999;
            lop3.b32 $0, $2, m, $8, 0x60; lop3.b32 $1, $3, n, $8, 0x60;"""
    return f"{{ .reg .b32 m, n; .reg .pred f, p, q; abs.f16x2 m, $4; {chosen} }}"


@gluon.jit
def keep_singles(x, words, limits, flip, BY_PREDICATES: gl.constexpr):
    """float32 likewise, where two neighbours share a word; BY_PREDICATES takes an instruction less of every four."""
    return gl.inline_asm_elementwise(
        _keep_singles(BY_PREDICATES), "=r,=r,r,r,r,r,r,r,r,r", [x, words, limits, flip], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.constexpr_function
def _zeros_of(kind: str) -> str:
    return f"{{ .reg .b32 z; mov.b32 z, 0; fma.rn.{kind}x2 $0, $1, z, $2; }}"


@gluon.jit
def zeros_of(x, total):
    """`total` plus 0 times x, of 16 bits, two by two: NaN where some x is not finite."""
    KIND: gl.constexpr = "bf16" if x.dtype == gl.bfloat16 else "f16"  # pyright: ignore[reportAssignmentType]
    return gl.inline_asm_elementwise(_zeros_of(KIND), "=r,r,r", [x, total], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def stay(x):
    """An int32, computed where this stands: otherwise what few tiles need is moved to where all others pay for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@builtin
def afresh(value: Any, _semantic: Any = None) -> Any:
    """A tuple whose int32 numbers `stay`: what is computed from strides, where a kernel starts otherwise, is computed here."""
    if isinstance(value, gl.tuple):
        return gl.tuple([afresh(part, _semantic=_semantic) for part in value])
    if isinstance(value, gl.tensor) and value.type == gl.int32:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    return value


@gluon.jit
def uniform(x):
    """An int32 that is the same in all lanes, for whole warps: said in this way it can live in a register that they share.

    As `stay`, it is computed where this stands.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def of_any(x):
    """The bits that some lane of a warp has in its int32, in a register that they share."""
    return uniform(x)


@gluon.jit
def first_lane(own, other):
    """An int32 for the first lane of a warp, which acts for all at mbarriers, and another one for the rest.

    By the lane's number: with the thread's, which is the same of one warp, ptxas spills in other roles' loops.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; selp.b32 $0, $1, $2, p; }",
        "=r,r,r", [own, gl.to_tensor(other)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def first_thread(own, other):
    """The same for the first thread of a role of four warps, for one whose loops ptxas does not make spill for that."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; selp.b32 $0, $1, $2, p; }",
        "=r,r,r", [own, gl.to_tensor(other)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def of_first_lane(x):
    """A warp's first lane's int32, for all of them; not one that they share: see `first_lane`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def lane():
    """The lane's number within its warp: an int32 that differs from lane to lane, where others are the same."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def of_lane(x, number):
    """A lane's int32, for all of its warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch(pointers, wanted):
    """Ask the L2 cache for the lines at these addresses, where `wanted`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [pointers.to(gl.int64), wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


__all__ = [
    "abreast", "add_pairs", "afresh", "aggregate", "arrive_each", "choose_bytes", "fence_async_shared", "first_lane",
    "first_thread", "gl", "gluon", "keep_pairs", "keep_singles", "lane", "mbarrier", "named_arrive", "named_wait", "of_any",
    "of_first_lane", "of_lane", "ones", "pack", "pack_e4m3", "prefetch", "raised", "rebased", "recast", "role_barrier",
    "row_products", "scale_unless_one", "select_bits", "settled", "stay", "store_wait", "tma_add", "tma_load", "tma_store",
    "uniform", "unpack_e4m3", "warpgroup_mma", "warpgroup_mma_wait", "zeros_of",
]  # fmt: skip
