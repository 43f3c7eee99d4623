"""Register layouts of the warpgroup's matrix unit."""

from __future__ import annotations

from typing import Any

from flashtile.triton_glue.gluon import gl, gluon


@gluon.constexpr_function
def matrix_layout(columns: int, depth: int = 16) -> Any:
    """An accumulator of one warpgroup: 64 rows (or a multiple), `columns` wide. A warp holds 16 rows, four lanes a row.

    depth: how many products an instruction sums, 16 of 16 bits or 32 of 8; what it sums lies alike.
    """
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def operand_layout(columns: int, depth: int = 16) -> Any:
    """The left operand, in registers, of a product that accumulates into `matrix_layout(columns, depth)`."""
    return gl.DotOperandLayout(0, matrix_layout(columns, depth), depth // 8)


@gluon.constexpr_function
def row_layout(columns: int) -> Any:
    """One number per row of `matrix_layout(columns)`."""
    return gl.SliceLayout(1, matrix_layout(columns))


@gluon.constexpr_function
def column_layout(columns: int) -> Any:
    """One number per column of `matrix_layout(columns)`."""
    return gl.SliceLayout(0, matrix_layout(columns))


@gluon.constexpr_function
def memory_layout(columns: int) -> Any:
    """A tile of `matrix_layout(columns)`, each row in the same four lanes, eight neighbours in one thread."""
    wide = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]]
    return gl.DistributedLinearLayout(
        reg_bases=[base for base in wide if base[1] < columns],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def pair_layout(columns: int) -> Any:
    """`matrix_layout(columns)`, two neighbours taken together."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *([0, 1 << i] for i in range(2, (columns // 2).bit_length() - 1))],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns // 2],
    )


@gluon.constexpr_function
def call_layout(columns: int) -> Any:
    """Dropout's calls: `matrix_layout(columns)` without bits 0 and 3 of rows and columns, a half in every second lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i] for i in range(3, (columns // 4).bit_length() - 1)],
        lane_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[16, columns // 4],
    )


@gluon.constexpr_function
def word_layout(columns: int) -> Any:
    """Their words, two by two: `matrix_layout(columns)` without bit 3 of rows and bits 0 and 3 of columns."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *([0, 1 << i, 0] for i in range(2, (columns // 4).bit_length() - 1))],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[32, columns // 4, 2],
    )


@gluon.constexpr_function
def key_bytes_layout(keys: int, columns: int) -> Any:
    """Bytes of a left operand, keys x columns: a thread has four neighbours of a row, where `operand_layout` has it have two
    neighbours and the two that are eight further.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1], [0, 2], [8, 0], *([0, 1 << i] for i in range(4, columns.bit_length() - 1)),
            *([1 << i, 0] for i in range(6, keys.bit_length() - 1)),
        ],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[keys, columns],
    )  # fmt: skip


@gluon.constexpr_function
def value_bytes_layout(keys: int, columns: int) -> Any:
    """Bytes of a left operand that is turned, keys x columns (64 or 128): a thread has neighbours of a row, two or four, which
    are its rows of the operand.
    """
    own = columns // 32
    return gl.DistributedLinearLayout(
        reg_bases=[
            *([0, 1 << i] for i in range(own.bit_length() - 1)), [1, 0], [8, 0],
            *([1 << i, 0] for i in range(4, keys.bit_length() - 1)),
        ],
        lane_bases=[[2, 0], [4, 0], [0, own], [0, 2 * own], [0, 4 * own]],
        warp_bases=[[0, 8 * own], [0, 16 * own]],
        block_bases=[],
        shape=[keys, columns],
    )  # fmt: skip
