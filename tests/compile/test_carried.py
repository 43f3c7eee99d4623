"""What a loop carries for the bounds of a loop within it alone Triton 3.6.0 takes for unused, and leaves at its first value. No
kernel may ask for that: what a bound is made of has to be read in the inner loop, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compile.conftest import ROOT, Compiled


def names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def ranges(node: ast.AST) -> Iterator[ast.For]:
    """The loops in a node that are loops for the compiler."""
    for found in ast.walk(node):
        if isinstance(found, ast.For) and "static_range" not in ast.unparse(found.iter):
            yield found


def carried(loop: ast.For) -> set[str]:
    """Names that the loop reads before it assigns them, and assigns."""
    read, written = dict[str, int](), dict[str, int]()
    for node in (n for s in loop.body for n in ast.walk(s)):
        if isinstance(node, ast.Name):
            first = written if isinstance(node.ctx, ast.Store) else read
            first[node.id] = min(first.get(node.id, node.lineno), node.lineno)
        if isinstance(node, ast.AugAssign):
            read.update(dict.fromkeys(names(node.target, ast.Store), node.lineno))
    return {name for name in read if name in written and read[name] <= written[name]}


def lost(function: ast.FunctionDef) -> Iterator[str]:
    """Names in bounds of inner loops that depend on what an outer one carries, and are not read in that inner loop."""
    for outer in ranges(function):
        depends = carried(outer)
        assigned = [s for b in outer.body for s in ast.walk(b) if isinstance(s, ast.Assign | ast.AugAssign)]
        for _ in assigned:  # as many steps as there may be from a name to what it is made of
            for s in assigned:
                if names(s.value, ast.Load) & depends:
                    depends |= names(s, ast.Store)
        for inner in (loop for s in outer.body for loop in ranges(s)):
            read = set[str]().union(*(names(s, ast.Load) for s in inner.body))
            yield from sorted((names(inner.iter, ast.Load) & depends) - read)


def functions(text: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))


FILES = sorted(file for file in (ROOT / "flashtile").glob("**/*.py") if "jit" in file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_kernel_carries_for_bounds_alone(file: Path) -> None:
    jitted = (f for f in functions(file.read_text()) if any("jit" in ast.unparse(d) for d in f.decorator_list))
    assert [(f.name, name) for f in jitted for name in lost(f)] == []


SKIPS = """
def f(ptr, left):
    done = 0
    for i in range(8):
        skip = min(left, load(ptr + i))
        left -= skip
        for j in range({bounds}):
            store(ptr + done, {value})
            done = done + 1
"""


@pytest.mark.parametrize(("bounds", "value", "found"), [
    ("skip, 10", "j", ["skip"]), ("10 - skip", "j", ["skip"]), ("10 - skip", "skip + j", []), ("done, 10", "j", []),
    ("load(ptr)", "j", []),
])  # fmt: skip
def test_it_would_be_found(bounds: str, value: str, found: list[str]) -> None:
    (function,) = functions(SKIPS.format(bounds=bounds, value=value))
    assert list(lost(function)) == found


@pytest.mark.parametrize("group", [2, 8])
def test_who_loads_counts_what_other_pieces_of_a_list_take_first(compiled: Compiled, group: int) -> None:
    """Of grouped heads: steps and those of others, which are 2 numbers, as of the loop that counts all of them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    spelling = f"attention(q=1x1024x8x128,kv=1024x{8 // group}x128,bf16,blocks=128x128)"
    (found,) = compiled("hopper_code.py", f"backward:{spelling}")
    assert found["carried"].count([group, 2]) == 2
