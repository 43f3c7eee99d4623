"""The kernels of cached attention, compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_every_kernel_compiles_without_spills_and_fits(compiled: Any, others: bool) -> None:
    rows = compiled("cached_code.py", *(["others"] if others else []))
    kernels = {"decode_forward", "decode_combine"} | (set() if others else {"append_rows", "decode_hopper", "decode_latent"})
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= row["limit"], row
        assert row["matrix"] > 0 or row["kernel"] not in ("decode_forward", "decode_hopper", "decode_latent"), row
        hopper = row["kernel"] in ("decode_hopper", "decode_latent")
        assert [row.get(found) for found in ("idle_barriers", "overwritten")] == [[] if hopper else None] * 2, row
