"""Plans of drawn problems are told by hashes, which name what a change of planning code changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from flashtile.audit.plans import against, rows, write
from flashtile.kernels.portable.choose import INTERPRETED
from flashtile.kernels.portable.tile import Launch


def test_plans_are_told_again_and_changes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "before.csv"
    made = list(rows(["sm80"], 6, 3))
    assert sum(not row.plan.startswith("refused") for row in made) > 12
    write(made, file)
    assert against(list(rows(["sm80"], 6, 3)), file) == (len(made), [])
    other = replace(made[0], plan="0" * 16)
    assert against([other, *made[1:-1]], file) == (len(made) - 1, [other])
    assert against([replace(made[0], problem="another")], file) == (0, [])
    wider = dict.fromkeys(INTERPRETED, Launch(32, 32))
    monkeypatch.setattr("flashtile.kernels.portable.choose.INTERPRETED", wider)
    compared, changed = against(list(rows(["sm80"], 6, 3)), file)
    assert compared == len(made)
    assert changed
    assert {row.backend for row in changed} == {"triton"}
