"""Every line of code that the documentation shows runs here, as far as a CPU and the installed packages go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_code import PAGES, ROOT, blocks, commands

NEEDS = {"vllm", "jax"}  # of what is left out: vLLM wants a GPU, JAX has tests and an environment of its own


def fresh(*command: str, cwd: Path) -> str:
    """What a new interpreter prints, where kernels are not interpreted and no GPU is looked for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def told_together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is printed of pages without blocks, and of those of answers: one process imports everything for all of them."""
    pages = [page for page in PAGES if not blocks(page) or page.startswith("docs/answers/")]
    *printed, end = fresh("-m", "tests.docs_code", *pages, cwd=tmp_path_factory.mktemp("pages")).split(": done\n")
    assert not end
    found = {told.splitlines()[-1]: told.splitlines() for told in printed}
    assert list(found) == pages
    return {page: [*told[:-1], f"{page}: done"] for page, told in found.items()}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/jax.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, told_together: dict[str, list[str]]) -> None:
    if "triton.jit" in (ROOT / page).read_text():
        pytest.importorskip("triton")
    *told, last = told_together.get(page) or fresh("-m", "tests.docs_code", page, cwd=tmp_path).splitlines()
    assert last == f"{page}: done"
    ran = [line for line in told if line in ("ran", "a line of a kernel") or (line.startswith("needs ") and ": " not in line)]
    assert len(ran) == len(blocks(page))
    packages = {line.removeprefix("needs ").partition(":")[0] for line in told if line.startswith("needs ")}
    assert packages <= NEEDS | {"kernels", "diffusers", "transformers", "pytorch_lightning", "onnx", "onnxscript", "two GPUs"}


def test_readme_and_the_page_of_pytorch_show_code() -> None:
    """The test above finds it: so many blocks at least."""
    assert len(blocks("README.md")) >= 1
    assert len(blocks("docs/pytorch.md")) >= 9
    assert len(blocks("docs/add-a-feature.md")) == 3


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_the_commands_of_a_page_exist(page: str, tmp_path: Path) -> None:
    """`explain` runs; what takes minutes, or a GPU, is asked for its options."""
    pytest.importorskip("typer")
    for words in commands(page):
        if words[0] == "explain":
            assert "forward: " in fresh("-m", "flashtile", *words, cwd=tmp_path)
            continue
        told = fresh("-m", "flashtile", words[0], "--help", cwd=tmp_path)
        for word in words[1:]:
            assert not word.startswith("-") or word in told, f"flashtile {words[0]} has no {word}"
