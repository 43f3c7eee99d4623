"""Starts a measuring process: this checkout's benchmark code on any checkout's flashtile. Run as a script.

    python boot.py LIBRARY_ROOT [PROVIDERS_FILE]

Two commits are compared with the same measuring code, so `flashtile` comes from LIBRARY_ROOT and `flashtile.bench`
from the folder of this file.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Answer requests until standard input ends."""
    sys.path[0] = sys.argv[1]  # was this folder, which a script gets
    here = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "flashtile.bench", here / "__init__.py", submodule_search_locations=[str(here)]
    )  # fmt: skip
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["flashtile.bench"] = bench
    spec.loader.exec_module(bench)

    import flashtile

    if Path(flashtile.__file__).resolve().parents[1] != Path(sys.argv[1]):
        raise SystemExit(f"flashtile was found in {Path(flashtile.__file__).parent}, not in {sys.argv[1]}")

    from flashtile.bench.child import serve

    serve(Path(sys.argv[2]) if len(sys.argv) > 2 else None)


if __name__ == "__main__":
    main()
