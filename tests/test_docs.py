"""The documentation shows code that exists and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashtile

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_diff_of_softcap_is_the_code() -> None:
    (diff,) = blocks("docs/add-a-feature.md", "diff")
    for part in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
        header, _, body = part.partition("\n")
        path = ROOT / header.removeprefix("+++ b/")
        for hunk in re.split(r"^@@.*@@\n", body, flags=re.MULTILINE)[1:]:
            after = "\n".join(line[1:] for line in hunk.splitlines() if not line.startswith("-"))
            assert after in path.read_text(), f"docs/add-a-feature.md shows lines that {header} does not have:\n{after}"


def test_the_support_matrix_is_what_the_backends_say() -> None:
    """In a process of its own, where kernels are not interpreted."""
    pytest.importorskip("triton")
    code = "import runpy; print(runpy.run_path('tools/make_docs.py')['support'](), end='')"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "support.md").read_text(), "run `make docs`"


def test_the_readme_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("README.md", "python")
    assert len([line for line in example.splitlines() if line]) <= 6
    exec(example.replace("2, 1024, 8, 64", "1, 32, 2, 16"), {})  # small: the kernels may be interpreted
    assert "forward: " in capsys.readouterr().out


def test_the_modifier_of_add_a_feature_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    pytest.importorskip("triton")
    import torch

    code = blocks("docs/add-a-feature.md", "python")[-1]
    (tmp_path / "locality.py").write_text(code.partition("\nout = ")[0])  # Triton reads sources from files
    monkeypatch.syspath_prepend(tmp_path)
    from locality import Locality  # pyright: ignore[reportMissingImports]

    q, k, v = (torch.randn(1, 32, 2, 16, device=device) for _ in range(3))
    bend = Locality(0.5)
    out = flashtile.attention(q, k, v, score=(bend,))
    distance = (torch.arange(32)[:, None] - torch.arange(32)).abs().to(device)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - 0.5 * distance.float().log1p()
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/add-a-feature.md"])
def test_files_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    home = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (home / target).exists(), f"{page} links to {target}"
    for name in re.findall(r"`((?:flashtile|tests|tools|benchmarks|docs)/[\w/.-]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"
