"""The machine code of a compiled kernel: its loops around matrix instructions, and the order of work inside them."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtile.triton_glue.compile import TOOLS

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BITS = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")
_NAMED = re.compile(r"^\s*[.;].*\n", re.MULTILINE)  # directives and comments
_BRANCH = re.compile(r"BRA.*?(\.L_x_\d+)")


@dataclass(frozen=True)
class Loop:
    """The opcodes of one innermost loop, predicates dropped, in program order: "HGMMA.64x128x16.F32.BF16", ..."""

    opcodes: tuple[str, ...]
    skips: tuple[tuple[int, int], ...] = ()  # jumps forward within it: from where, and to where

    def count(self, name: str) -> int:
        """How many instructions are of this kind: "HGMMA", "MUFU.EX2", "STL"."""
        return sum(_is(opcode, name) for opcode in self.opcodes)

    def places(self, name: str) -> list[int]:
        """Where they stand."""
        return [i for i, opcode in enumerate(self.opcodes) if _is(opcode, name)]

    @property
    def spills(self) -> int:
        """Accesses to local memory."""
        return self.count("LDL") + self.count("STL")


def _is(opcode: str, name: str) -> bool:
    return opcode == name or opcode.startswith(name + ".")


def _multiplies(opcode: str) -> bool:
    """Of 16 bits, or of 8."""
    return _is(opcode, "HGMMA") or _is(opcode, "QGMMA")


def disassemble(compiled: Any) -> str:
    """SASS of a kernel compiled for an NVIDIA GPU, each instruction with its bits, by Triton's own disassembler."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([str(TOOLS / "nvdisasm"), "-c", "-hex", str(binary)], capture_output=True, text=True, check=True)
    return done.stdout


def code_hash(text: str, kind: str) -> str:
    """A hash of the instructions in a kernel's SASS ("cuda") or assembly ("hip"): names and places of sources do not count."""
    code = "\n".join(_BITS.findall(text)) if kind == "cuda" else _NAMED.sub("", text)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def matrix_loops(sass: str) -> list[Loop]:
    """The innermost loops that hold warpgroup matrix instructions."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(opcodes)
            continue
        found = _INSTRUCTION.search(line)
        if not found:
            continue
        words = found.group(1).split()
        branch = _BRANCH.search(found.group(1))
        if branch:
            branches.append((len(opcodes), branch.group(1)))
        opcodes.append(words[1] if words[0].startswith("@") else words[0])
    jumps = [(place, labels[label]) for place, label in branches]
    loops = [(to, place + 1) for place, to in jumps if to <= place and any(map(_multiplies, opcodes[to : place + 1]))]
    inner = [s for s in loops if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in loops)]
    return [
        Loop(tuple(opcodes[a:b]), tuple((place - a, to - a) for place, to in jumps if a <= place < to < b)) for a, b in inner
    ]
