"""The functions that are written for a score_mod compile for a GPU, without one."""

from __future__ import annotations

import pytest

from tests.compile.conftest import Compiled

pytest.importorskip("triton", reason="Triton is not installed")


def test_score_mods_compile_for_hopper(compiled: Compiled) -> None:
    plans = compiled("score_mod_code.py", "1", "9")
    assert [(plan["seed"], plan["backend"]) for plan in plans] == [(1, "hopper"), (1, "triton"), (9, "hopper"), (9, "hopper")]
    assert not any(sum(plan["spill_bytes"]) for plan in plans)
