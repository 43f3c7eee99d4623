"""`python -m benchmarks NAME [options]` runs an experiment of this folder; without a name it says which there are."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def experiments() -> dict[str, str]:
    """Each script's name and the first line of its docstring."""
    texts = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__).resolve()}
    named = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in texts.items() if '"__main__"' in text}
    return {name: text.partition("\n")[0] for name, text in named.items()}


def main() -> int:
    known = experiments()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("python -m benchmarks NAME [options]; NAME --help says which. Experiments:\n")
        print(*(f"{name:20s} {line}" for name, line in known.items()), sep="\n")
        return 0
    name = sys.argv[1]
    if name not in known:
        print(f"{name} is no experiment; they are {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    return importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
