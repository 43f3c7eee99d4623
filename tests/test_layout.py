"""The promises of docs/architecture.md that a program can check."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
check = runpy.run_path(str(ROOT / "tools" / "check_size.py"))
circles = runpy.run_path(str(ROOT / "tools" / "check_cycles.py"))["circles"]


def test_sizes() -> None:
    assert list(check["breaches"](ROOT)) == []


def test_no_circles() -> None:
    assert list(circles(ROOT)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from flashtile.a import f",
        "def g():\n    from flashtile import a",
        "if TYPE_CHECKING:\n    import flashtile.a",
        "from .. import a",
    ],
    ids=["at the top", "in a function", "for types", "relative"],
)
def test_the_check_for_circles_can_fail(tmp_path: Path, back: str) -> None:
    package = tmp_path / "flashtile"
    (package / "inner").mkdir(parents=True)
    texts = {"__init__": "", "a": "from flashtile.b import x", "b": "from flashtile.inner import c", "inner/__init__": ""}
    for name, text in {**texts, "inner/c": back}.items():
        (package / f"{name}.py").write_text(text)
    (found,) = circles(tmp_path)
    assert found.startswith("a circle: ")
    assert found.count(" needs flashtile.") == 3
    (package / "inner" / "c.py").write_text("import json")
    assert not list(circles(tmp_path))


def signature(count: int) -> str:
    return ", ".join(f"x{i}" for i in range(count))


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("flashtile/a.py", "\n" * 501, "flashtile/a.py: 501 lines; at most 500"),
        ("tests/a.py", f"def wide({signature(13)}): ...", "tests/a.py:1: function wide has 13 parameters; at most 12"),
        ("tools/a.py", f"class A:\n  def m(self, {signature(12)}, *, z): ...", "function m has 13 parameters"),
        ("flashtile/a.py", f"def attention({signature(17)}): ...", "public function attention has 17 parameters"),
        ("flashtile/a.py", f"@jit\ndef f({signature(17)}): ...", "kernel f has 17 parameters; at most 16"),
        (
            "flashtile/a.py",
            f"@jit\ndef f({signature(13)}): ...\n@jit\ndef g({signature(16)}):\n  f()",
            "device function f has 13 parameters; at most 12",
        ),
    ],
    ids=["lines", "host", "method", "public", "kernel", "device"],
)
def test_the_size_check_can_fail(tmp_path: Path, name: str, source: str, message: str) -> None:
    files = {"flashtile/__init__.py": '__all__ = ["attention"]\n', name: source}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (found,) = check["breaches"](tmp_path)
    assert message in found


def test_imports_follow_the_arrows() -> None:
    """import-linter reads .importlinter."""
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
