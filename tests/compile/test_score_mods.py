"""The functions that are written for a score_mod compile for a GPU, without one."""

from __future__ import annotations

import pytest

from tests.compile.conftest import Compiled

pytest.importorskip("triton", reason="Triton is not installed")


def test_score_mods_compile_for_hopper(compiled: Compiled) -> None:
    plans = compiled("score_mod_code.py", "2", "8")
    assert [plan["backend"] for plan in plans] == ["hopper", "hopper", "hopper", "triton"]
    assert not any(sum(plan["spill_bytes"]) for plan in plans)
