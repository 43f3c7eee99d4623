"""The tool that finds registers written before they are read, on code as the disassembler prints it."""

from __future__ import annotations

import pytest

from flashtile.audit.hazards import overwritten_operands

NONE = 7  # of the barriers


def line(place: int, text: str, written: int = NONE, read: int = NONE, waits: int = 0) -> str:
    """An instruction and its bits; `waits` has one for each barrier."""
    control = written << 5 | read << 8 | waits << 11
    return f"        /*{place:04x}*/    {text} ;    /* 0x0000000000000000 */\n    /* 0x{control << 41:016x} */"


LOAD = line(0x10, "LDG.E.U16 R15, desc[UR4][R8.64]", written=4, read=1)
NEXT = line(0x20, "LDG.E.U16 R17, desc[UR4][R10.64]", written=4, read=2)


@pytest.mark.parametrize("register", [8, 9])
def test_an_address_that_is_written_while_its_load_is_under_way_is_found(register: int) -> None:
    code = [LOAD, line(0x20, f"IADD3 R{register}, P3, R18.reuse, R3, RZ")]
    assert overwritten_operands("\n".join(code)) == [f"20 IADD3 R{register}"]


@pytest.mark.parametrize(
    "rest",
    [
        [line(0x20, "IADD3 R10, P3, R18, R3, RZ")],  # another register
        [line(0x20, "IADD3 R8, P3, R18, R3, RZ", waits=0b10)],  # it waits for the address
        [line(0x20, "FADD R2, R15, R15", waits=0b10000), line(0x30, "MOV R8, R2")],  # what was loaded has come
        [NEXT, line(0x30, "MOV R11, R2", waits=0b100), line(0x40, "MOV R9, R2")],  # a later load has its address
        [line(0x20, "DEPBAR.LE SB1, 0x0"), line(0x30, "MOV R8, R2")],
        [line(0x20, "LDS R8, [R3]", written=0)],  # behind the load in the same queue
        [line(0x20, "EXIT"), line(0x30, "MOV R8, R2")],  # nor what stands behind the end
        [".L_x_3:", line(0x20, "MOV R8, R2")],  # code that is reached in other ways, too, is not followed
    ],
)
def test_what_waits_is_not(rest: list[str]) -> None:
    assert overwritten_operands("\n".join([LOAD, *rest])) == []


def test_an_end_for_some_threads_is_none() -> None:
    code = [LOAD, line(0x20, "@P0 EXIT"), line(0x30, "MOV R8, R2")]
    assert overwritten_operands("\n".join(code)) == ["30 MOV R8"]


def test_stored_values_are_read_late_too() -> None:
    store = line(0x10, "@!P5 STG.E.128 desc[UR54][R14.64+0x100], R16", read=4)
    assert overwritten_operands("\n".join([store, line(0x20, "FMUL R19, R2, R3")])) == ["20 FMUL R19"]
    assert overwritten_operands("\n".join([store, line(0x20, "FMUL R20, R2, R3")])) == []


GUARDED = line(0x10, "@P0 LDG.E R2, desc[UR24][R4.64]", written=5, read=0)


@pytest.mark.parametrize(("rest", "found"), [
    (["@!P0 SHL R4, R38, 0x8, RZ"], []),  # other threads
    (["@P0 SHL R4, R38, 0x8, RZ"], ["20 SHL"]), (["@!P1 SHL R4, R38, 0x8, RZ"], ["20 SHL"]),
    (["SHL R4, R38, 0x8, RZ"], ["20 SHL"]),
    (["ISETP.NE.AND P0, PT, R7, RZ, PT", "@!P0 SHL R4, R38, 0x8, RZ"], ["30 SHL"]),  # by another value of the predicate
])  # fmt: skip
def test_who_needs_the_opposite_predicate_is_another_thread(rest: list[str], found: list[str]) -> None:
    code = [GUARDED, *(line(0x20 + 0x10 * i, text) for i, text in enumerate(rest))]
    assert [text.rpartition(" ")[0] for text in overwritten_operands("\n".join(code))] == found


def test_conversions_stand_in_one_queue() -> None:
    first = line(0x10, "F2F.F32.F64 R14, R36.64", written=3, read=2)
    assert overwritten_operands("\n".join([first, line(0x20, "F2F.F32.F64 R36, R98.64")])) == []
    assert overwritten_operands("\n".join([first, line(0x20, "MOV R36, R98")])) == ["20 MOV R36"]
    assert overwritten_operands("\n".join([LOAD, line(0x20, "F2F.F32.F64 R8, R98.64")])) == ["20 F2F.F32.F64 R8"]


def test_a_special_function_is_no_load() -> None:
    code = [LOAD, line(0x20, "MUFU.EX2 R2, R4", written=3), line(0x30, "MOV R8, R2", waits=0b1000)]
    assert overwritten_operands("\n".join(code)) == ["30 MOV R8"]
