"""benchmarks/samples.py without a GPU: what it makes of ncu's source page."""

from __future__ import annotations

from benchmarks import samples

HEADER = '"Address","Source","# Samples","Instructions Executed","stall_wait","stall_barrier","stall_wait (Not Issued)"'


def page(kernel: str, *lines: tuple[str, int, int, int, int]) -> str:
    """A kernel of (instruction, samples, executed, of the samples waiting, at a barrier)."""
    rows = [
        f'"{0x700 + 16 * i}","{text}","{hits}","{runs}","{wait}","{barrier}","{wait}"'
        for i, (text, hits, runs, wait, barrier) in enumerate(lines)
    ]
    return "\n".join([f'"Kernel Name","{kernel}",', HEADER, *rows])


SAID = page(
    "attention_forward",
    ("MOV R1, R2 ", 5, 4, 0, 0),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR19], R18 ", 10, 100, 10, 0),  # 0x710
    ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT ", 20, 100, 15, 0),
    ("HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88 ", 0, 100, 0, 0),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x1 ", 30, 100, 0, 30),
    ("MUFU.EX2 R20, R20 ", 30, 100, 20, 0),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x0 ", 0, 100, 0, 0),
    ("@P0   BRA 0x710 ", 10, 100, 0, 5),
    ("EXIT ", 0, 4, 0, 0),
    ("NOP ", 7, 1, 7, 0),
    ("BRA 0x710 ", 1, 1, 0, 0),  # a rare path's way back
) + "\n" + page("attention_dq", ("MOV R1, R2 ", 1, 1, 0, 0), ("EXIT ", 1, 1, 0, 0))  # fmt: skip


def test_phases_of_the_loop_are_rows() -> None:
    rows = list(samples.rows_of(SAID))
    assert {row["kernel"] for row in rows} == {"attention_forward"}
    assert {row["loop"] for row in rows} == {0}
    shares = {row["phase"]: (row["share"], row["instructions"]) for row in rows}
    assert shares == {
        "before": (0.1, 1.0), "products": (0.2, 2.0), "wait 0x1": (0.3, 1.0), "after 0x1": (0.3, 1.0), "wait 0x0": (0.0, 1.0),
        "after 0x0": (0.1, 1.0),
    }  # fmt: skip
    assert next(row["why"] for row in rows if row["phase"] == "products") == "wait 0.150"
    assert next(row["why"] for row in rows if row["phase"] == "wait 0x1") == "barrier 0.300"


def test_a_loop_that_did_not_run_is_no_row() -> None:
    assert not list(samples.rows_of(SAID.replace('"100"', '"0"').replace('"1","', '"0","')))
