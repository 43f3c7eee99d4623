"""Commits: the one that is measured, and the one it is compared with."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import flashtile
from flashtile.errors import InvalidProblem

LIBRARY = Path(flashtile.__file__).resolve().parents[1]


def commit(library: Path) -> str:
    """Short hash of the commit, with "+" when the library's files differ from it; "" where git does not know the library."""
    found = _git(library, "rev-parse", "--short=10", "HEAD")
    known = _git(library, "ls-files", "--error-unmatch", "flashtile/__init__.py")  # not only a folder around it
    if found.returncode != 0 or known.returncode != 0:
        return ""
    changed = _git(library, "status", "--porcelain", "--", "flashtile")
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


@contextmanager
def checked_out(revision: str) -> Generator[Path, None, None]:
    """Root of a temporary worktree of that revision, or the folder of that name if flashtile lies there.

    Raises InvalidProblem if it is neither.
    """
    if (Path(revision) / "flashtile" / "__init__.py").is_file():
        yield Path(revision).resolve()
        return
    if _git(LIBRARY, "rev-parse", "--verify", "--quiet", revision + "^{commit}").returncode != 0:
        known = f"a revision that git knows in {LIBRARY}, or a folder with flashtile in it"
        raise InvalidProblem(f"base is {revision!r}; it must be {known}.")
    with tempfile.TemporaryDirectory(prefix="flashtile-base-") as folder:
        root = Path(folder).resolve() / "tree"
        added = _git(LIBRARY, "worktree", "add", "--detach", str(root), revision)
        if added.returncode != 0:
            raise InvalidProblem(f"base is {revision!r}; git worktree says: {added.stderr.strip()}")
        try:
            yield root
        finally:
            _git(LIBRARY, "worktree", "remove", "--force", str(root))


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed: it knows nothing
        return subprocess.CompletedProcess(command, 127, "", "git is not installed")
