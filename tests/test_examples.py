"""The examples and notebooks run on a CPU in seconds, and print what they promise."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def printed(name: str, *arguments: str) -> str:
    """What an example prints, in a process of its own, where kernels are not interpreted."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    (found,) = re.findall(pattern, text)
    return [float(number) for number in (found if isinstance(found, tuple) else (found,))]


def test_packed_documents() -> None:
    text = printed("packed_documents", "--steps", "6")
    assert "·········█····" in text, "the second document sees nothing of the first"
    first, last = numbers(r"loss ([\d.]+) at step 1, ([\d.]+) at step 6", text)
    assert last < 0.8 * first
    (apart,) = numbers(r"differ by (\S+) at most", text)
    assert apart < 1e-4


@pytest.mark.parametrize("compiled", [(), ("--compile", "aot_eager")], ids=["eager", "compiled"])
def test_mean_flow(compiled: tuple[str, ...]) -> None:
    """Which compares every loss with plain attention's, eager."""
    text = printed("mean_flow", "--steps", "2", *compiled)
    assert (text.count("mean flow flashtile"), text.count("penalty   flashtile")) == (2, 2)


def test_context_parallel() -> None:
    text = printed("context_parallel")
    (apart,) = numbers(r"largest difference of the loss in 50 steps: (\S+)", text)
    assert apart < 1e-4
    first, last = (numbers(rf"step +{step}: loss \S+ on one process, (\S+) on 2", text)[0] for step in (0, 49))
    assert last < 0.9 * first
    (share,) = numbers(r"a rank \((\S+) of it\)", text)
    assert share < 0.6
    assert "* ring: a rank sends" in text


def test_huggingface() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = printed("huggingface", "--steps", "6")
    first, last = numbers(r"flashtile +loss ([\d.]+) at step 1, ([\d.]+) at step 6", text)
    assert last < 0.9 * first
    (apart,) = numbers(r"They differ by (\S+) at most", text)
    assert apart < 1e-3


def test_generate() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = printed("generate", "--requests", "8", "--pages", "20")
    (made,) = numbers(r"8 requests, (\d+) tokens in \d+ steps, \d+ tokens/s", text)
    same, of, kinds = numbers(r"(\d+) of (\d+) tokens, of (\d+) kinds, are those of transformers' eager", text)
    assert same == of == made > 60
    assert kinds > 20, "it is no constant that is compared"
    (again,) = numbers(r"(\d+) requests gave their pages back", text)
    assert again >= 1


def test_own_mask(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    text = printed("own_mask", "--output", str(tmp_path / "mask.png"))
    assert "██····████████████······\n" in text
    (apart,) = numbers(r"for every score: (\S+) at most", text)
    assert apart < 1e-4
    assert (tmp_path / "mask.png").stat().st_size > 1000


@pytest.mark.parametrize("path", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        assert cell["outputs"] == [], "a notebook is stored without what it printed"
        *statements, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(statements, []), path.name, "exec"), names)
        if isinstance(last, ast.Expr):  # what a notebook shows
            assert repr(eval(compile(ast.Expression(last.value), path.name, "eval"), names))
        else:
            exec(compile(ast.Module([last], []), path.name, "exec"), names)
    assert len(cells) > 5


def test_every_example_is_in_the_list() -> None:
    listed = set(re.findall(r"^\| \[\S+\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
