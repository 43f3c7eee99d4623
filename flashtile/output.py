"""Whether results can be written where they are asked for: known before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from flashtile.errors import InvalidProblem


def prepare(*paths: Path) -> None:
    """Make the folders of files that are to be written, and no file. Raises InvalidProblem where one cannot be written."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            path.open("ab").close()  # permission bits say nothing to root, nor about /proc
            if not there:
                path.resolve().unlink()  # of a link, what it leads to
        except OSError as error:
            raise InvalidProblem(
                f"output is '{path}'; it must be a file that can be written ({error.filename}: {error.strerror})."
            ) from error
