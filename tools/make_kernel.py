"""Writes flashtile as a repository of a kernels hub, which the `kernels` package loads: python tools/make_kernel.py FOLDER

FOLDER/build/torch-{cpu,cuda,rocm}/ each hold the library, metadata.json with a digest of every file, and an `__init__.py`
with the functions that transformers looks for. Such a repository is loaded from anywhere, under a name that is its own, beside
others of its kind: so imports of "flashtile" become relative here, and whichever flashtile is installed is never seen.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "flashtile"
VERSION = 1  # of the functions below: a hub's users ask for a number, and get what is compatible with it
KERNELS = "0.17.0"  # the oldest `kernels` that this was tried with is 0.17
BACKENDS = ("cpu", "cuda", "rocm")
# Programs, other frameworks and hooks: nothing that the functions below reach.
LEFT_OUT = {"__main__.py", "audit", "bench", "cli.py", "demo", "export", "fuzz", "integrations", "jax", "output.py", "tune.py"}
INIT = '''"""flashtile's attention under flash-attention 2's names."""

from .flashtile.compat.hub import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
'''
CARD = """---
license: apache-2.0
library_name: kernels
---

# flashtile

Exact attention in pure Python and Triton, forward and backward: `flash_attn_func` and `flash_attn_varlen_func` with
flash-attention 2's arguments, and `s_aux`, a sink per head.
"""


def relative(text: str, path: Path) -> str:
    """A module's text with its imports of the library made relative. path: such as torch/execute/bound.py."""
    lines = text.splitlines(keepends=True)
    dots = "." * len(path.parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == NAME for alias in node.names):
            raise SystemExit(f"{path}:{node.lineno}: `import {NAME}` has no relative form; write `from {NAME} import`")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == NAME:
            line = lines[node.lineno - 1]
            start = line[node.col_offset :]
            found = f"from {node.module} import"
            if not start.startswith(found):
                raise SystemExit(f"{path}:{node.lineno}: {start.strip()!r} is not written as {found!r}")
            inner = node.module[len(NAME) + 1 :]
            lines[node.lineno - 1] = line[: node.col_offset] + f"from {dots}{inner} import" + start[len(found) :]
    return "".join(lines)


def contents() -> dict[str, bytes]:
    """Every file of a variant but its metadata, by its path there."""
    library = ROOT / NAME
    files = {"__init__.py": INIT.encode()}
    for source in sorted(library.rglob("*")):
        path = source.relative_to(library)
        if source.is_file() and "__pycache__" not in path.parts and path.parts[0] not in LEFT_OUT:
            data = source.read_bytes()
            files[f"{NAME}/{path.as_posix()}"] = relative(data.decode(), path).encode() if source.suffix == ".py" else data
    return files


def metadata(files: dict[str, bytes], backend: str) -> dict[str, object]:
    """metadata.json. Its id is the module's name once it is loaded: other contents have another."""
    digests = {path: hashlib.sha256(data).digest() for path, data in files.items()}
    whole = hashlib.sha256(b"".join(path.encode() + digest for path, digest in sorted(digests.items()))).hexdigest()
    return {
        "id": f"_{NAME}_{backend}_{whole[:12]}",
        "name": NAME,
        "version": VERSION,
        "kernels-minver": KERNELS,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {path: base64.b64encode(d).decode() for path, d in digests.items()}},
    }


def write(folder: Path) -> None:
    """Write the repository; raises SystemExit where something else lies in its place."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    files = contents()
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for path, data in files.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_bytes(data)
        (variant / "metadata.json").write_text(json.dumps(metadata(files, backend), indent=2) + "\n")
    (folder / "README.md").write_text(CARD)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write(Path(sys.argv[1]))
