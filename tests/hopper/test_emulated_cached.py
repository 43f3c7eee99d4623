"""Hopper's kernel over caches computes what it should, in the emulator, in processes of their own."""

from __future__ import annotations

import json

import pytest

from tests.hopper.emulating import run

pytest.importorskip("triton", reason="Triton is not installed")

LIMIT = 5e-3  # of the largest element, in bf16, whose probabilities and results are rounded to 2e-3 each


@pytest.mark.parametrize(("first", "count", "stored", "full", "latent", "even"), [
    (0, 20, False, False, False, False), (20, 20, False, False, False, False), (0, 20, True, False, False, False),
    (40, 8, False, True, False, False), (0, 24, False, False, True, False), (40, 8, False, True, True, False),
    (0, 6, False, False, False, True), (6, 2, True, False, False, True),
])  # fmt: skip
def test_random_calls(first: int, count: int, stored: bool, full: bool, latent: bool, even: bool) -> None:
    what = {"stored": stored, "full": full, "latent": latent, "even": even}
    cases = [json.dumps({"seed": seed, **what}) for seed in range(first, first + count)]
    done = run("emulated_cached", *cases)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == count, done.stderr
    for seed, row in enumerate(rows, first):
        assert "failure" not in row, f"seed {seed}: {row}"
        assert row["errors"]["out"] <= LIMIT, f"seed {seed}: {row}"
        assert row["errors"]["lse"] <= 1e-6, f"seed {seed}: {row}"
