"""Checks that no module of a package needs itself through others, imports in functions and for type checkers alone counted.

python tools/check_cycles.py [ROOT]

import-linter's contracts say which layers stand above which; within a layer they let circles be.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "flashtile"


def circles(root: Path) -> Iterator[str]:
    """One line for a circle of every knot of modules, with the lines of the imports that make it."""
    files = {name_of(path, root): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    needs = {name: dict(needed(name, path, files)) for name, path in files.items()}
    while True:
        try:
            TopologicalSorter({name: [*others] for name, others in needs.items()}).prepare()
            return
        except CycleError as error:
            ring: list[str] = error.args[1][::-1]  # each needs the next one
            steps = [(a, b) for a, b in itertools.pairwise(ring)]
            yield "a circle: " + ", ".join(f"{files[a].relative_to(root)}:{needs[a][b]} needs {b}" for a, b in steps)
            for a, b in steps:  # without these others are found, if there are any
                del needs[a][b]


def name_of(path: Path, root: Path) -> str:
    """A module's dotted name; a package's is that of its `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def needed(name: str, path: Path, files: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """(a module that this one imports wherever in its text, the line)."""
    home = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = home.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (up, node.module) if part)
            found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in files else base for alias in node.names]
        else:
            continue
        for other in found:
            if other in files and other != name:
                yield other, node.lineno


if __name__ == "__main__":
    lines = list(circles(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    print("\n".join(lines) or "no module needs itself through others")
    sys.exit(bool(lines))
