"""What benchmarks/jax_attention.py and jax_accuracy.py do without a GPU: other attentions are loaded, and fail by themselves;
cases come from a bounded set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import jax_accuracy, jax_attention
from benchmarks.record import Record

ORIGINAL = """
import jax

def mha(q, k, v, sm_scale, causal):
    return {factor} * jax.nn.dot_product_attention(q, k, v, scale=sm_scale, is_causal=causal)
"""


@pytest.mark.parametrize("factor", [1, 2])
def test_a_file_s_attention_is_timed_if_it_is_right(factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_attention, "SEQLEN", 32)
    monkeypatch.setattr(jax_attention, "BATCH", 1)
    file, record = tmp_path / "attention.py", Record(tmp_path / "rows.csv", 1e9, {})
    file.write_text(ORIGINAL.format(factor=factor))
    names = ["flashtile/auto", "jax-triton/fused", "pallas/mha", "flashtile/fused", "jax.nn/xla"]
    jax_attention.measure(64, True, names, str(file), 1, float("inf"), record)
    timed = {(r["provider"], r["which"]) for r in record.rows if "ms" in r}
    right = ["flashtile/auto", "jax.nn/xla", *(["jax-triton/fused"] if factor == 1 else [])]
    assert timed == {(name, which) for name in right for which in ("forward", "backward", "both")}
    assert [r["provider"] for r in record.rows if r.get("failure")] == ["flashtile/fused"]  # ours fails aloud
    jax_attention.report(record.rows)


def test_what_does_not_compile_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(_: Any, jobs: list[Any], ends: float) -> Any:
        for job in jobs:
            if job[2] == "pallas/mha" and job[3] == "both":
                yield job, jax_attention.Failure("too large")
            elif job[:3] != (64, True, "tokamax/mosaic"):
                yield job, 1.0

    monkeypatch.setattr(jax_attention, "in_processes", outcomes)
    record = Record(tmp_path / "rows.csv", 1e9, {})
    ready = jax_attention.compile_all(["tokamax/mosaic", "pallas/mha", "flashtile/auto"], None, 60.0, record)
    cells = set(jax_attention.CELLS)
    assert ready == {(*c, "flashtile/auto") for c in cells} | {(*c, "tokamax/mosaic") for c in cells - {(64, True)}}
    assert len(record.missing) == 2
    assert all(text.startswith("64 True tokamax/mosaic") for text in record.missing)


def test_cases_that_differ_in_sizes_share_their_kernels() -> None:
    sizes = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k")
    for kind in range(20):
        cases = [jax_accuracy.draw(kind * jax_accuracy.SHAPES + i) for i in range(jax_accuracy.SHAPES)]
        assert len({str({k: v for k, v in case.items() if k not in (*sizes, "number")}) for case in cases}) == 1
        assert len({tuple((case[s] == 1, case[s] % 16 == 0) for s in sizes) for case in cases}) <= jax_accuracy.SIZINGS
        assert len({tuple(case[s] for s in sizes) for case in cases}) > jax_accuracy.SHAPES / 2
