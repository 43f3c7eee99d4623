"""`python -m flashtile.bench SUITE`: the same command as `flashtile bench SUITE`."""

from __future__ import annotations

import typer

from flashtile.bench.main import bench

if __name__ == "__main__":
    typer.run(bench)
