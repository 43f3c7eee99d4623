"""Finds registers that are written before an earlier instruction has read them, in a kernel's machine code.

Instructions without a fixed latency (loads, stores, special functions) read their registers when their unit comes to it. The
assembler gives them one of six barriers, for which whoever writes such a register must wait. ptxas 12.8 and 12.9 leave out such
waits at times: a load then takes half of another's address. They did behind a proxy fence between warpgroup products and the
wait for them (docs/lab/hopper-checks.md).

Instructions of one unit read in their order, so that a wait for a later one is one for all before it. Only code without a label
in between is followed, and only writers of a fixed latency are looked at, but for those whose predicate says that no thread
does both: what is found is wrong, what is not may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LABEL = re.compile(r"^\s*\.L\w+:")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_REGISTER = re.compile(r"(?<![A-Z0-9_])R(\d+)(\.64|\.U64)?")
_PREDICATE = re.compile(r"!?U?P[\dT]")
_BARRIERS = 6  # a seventh number stands for none

# What writes none of the registers that it names first.
_READERS = re.compile(
    r"ST|RED\b|RED\.|BRA|BRX|BAR|BSSY|BSYNC|CALL|CCTL|EXIT|FENCE|FSETP|HSETP|DSETP|ISETP|MEMBAR|NANOSLEEP|NOP|PLOP|R2P|R2UR|REDUX|"
    r"RET|SYNCS|U|VOTE|WARP|YIELD"
)
_LEAVES = ("BRA", "BRX", "EXIT", "RET.REL.NODEC")
_SPECIAL = re.compile(r"MUFU|F2I|I2F|F2F|POPC|FLO|BREV")
_ANY_LATENCY = re.compile(r"MUFU|LD|ST|SHFL|ATOM|RED\b|RED\.")  # even without a barrier of their own


@dataclass(frozen=True)
class Instruction:
    """With the barriers that it sets, when it has written and when it has read, and those that it waits for."""

    place: int
    guard: str  # the predicate that it needs, or none
    opcode: str
    operands: tuple[str, ...]
    written: int
    read: int
    waits: tuple[int, ...]

    @property
    def unit(self) -> str:
        return "special" if _SPECIAL.match(self.opcode) else "memory"

    @property
    def is_late(self) -> bool:
        """Whether it reads and writes when its unit comes to it."""
        return min(self.written, self.read) < _BARRIERS or bool(_ANY_LATENCY.match(self.opcode))

    def follows(self, unit: str, guard: str) -> bool:
        """Whether it writes behind what an earlier instruction of a unit reads anyway: it waits in the same queue, or no thread
        of that one's guard does it.
        """
        queued = _SPECIAL.match(self.opcode) is not None and unit == "special"
        return queued or guard == opposite(self.guard)

    @property
    def destination(self) -> set[int]:
        """The registers that it writes."""
        first = next((n for n, x in enumerate(self.operands) if not _PREDICATE.fullmatch(x)), len(self.operands))
        found = _REGISTER.match(self.operands[first]) if first < len(self.operands) else None
        if found is None or _READERS.match(self.opcode):
            return set()
        return _span(int(found.group(1)), self.opcode)

    @property
    def sources(self) -> set[int]:
        """The registers that it reads."""
        reads = set[int]()
        stores = self.opcode.startswith(("ST", "RED", "ATOM"))
        rest = [x for x in self.operands if not _PREDICATE.fullmatch(x)][bool(self.destination) :]
        for operand in rest:
            for found in _REGISTER.finditer(operand):
                number = int(found.group(1))
                reads |= {number, number + 1} if found.group(2) else {number}
                if stores and not operand.startswith(("[", "desc")):
                    reads |= _span(number, self.opcode)
        return reads


def overwritten_operands(sass: str) -> list[str]:
    """Places of instructions, "9650 IADD3 R8", that write a register which an earlier one may not have read yet."""
    found: list[str] = []
    pending: list[tuple[str, int, set[int], str]] = []  # unit, number, sources and guard of what may still have to read
    last: list[dict[str, int]] = [{} for _ in range(_BARRIERS)]  # by barrier the last instruction of each unit that set it
    for number, instruction in enumerate(_instructions(sass)):
        if instruction is None:
            pending, last = [], [{} for _ in range(_BARRIERS)]
            continue
        for barrier in instruction.waits:
            done, last[barrier] = last[barrier], {}
            pending = [late for late in pending if late[1] > done.get(late[0], -1)]
        if instruction.is_late:
            if instruction.read < _BARRIERS:
                pending.append((instruction.unit, number, instruction.sources, instruction.guard))
            for barrier in {instruction.written, instruction.read} - {_BARRIERS, _BARRIERS + 1}:
                last[barrier][instruction.unit] = number
        elif any(instruction.destination & reads and not instruction.follows(unit, guard) for unit, _, reads, guard in pending):
            found.append(f"{instruction.place:x} {instruction.opcode} {instruction.operands[0]}")
        named = {x.lstrip("!") for x in instruction.operands}  # another value may stand there from here on
        pending = [(unit, n, reads, "" if guard.lstrip("!") in named else guard) for unit, n, reads, guard in pending]
    return found


def opposite(guard: str) -> str:
    """The guard of whoever does not do what this one guards; of no guard one that nothing has."""
    return guard[1:] if guard.startswith("!") else f"!{guard}"


def _span(first: int, opcode: str) -> set[int]:
    """The registers from `first` on that an opcode takes."""
    if opcode.startswith(("LDSM", "STSM")):
        count = int((re.search(r"\.([124])(?:\.|$)", opcode) or ["", "1"])[1])
    else:
        wide = ".64" in opcode or ".WIDE" in opcode or opcode.startswith("CS2R")
        count = 4 if ".128" in opcode else 2 if wide else 1
    return set(range(first, first + count))


def _instructions(sass: str) -> Iterator[Instruction | None]:
    """What `sass.disassemble` says, None where other code begins. Products are left out: they have their own waits."""
    lines = sass.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if _LABEL.match(line):
            yield None
        code, word = _INSTRUCTION.search(line), _WORD.search(below)
        if code is None or word is None:
            continue
        place, guard, opcode, operands = int(code.group(1), 16), code.group(2) or "", code.group(3), code.group(4)
        control = int(word.group(1), 16) >> 41
        waits = tuple(n for n in range(_BARRIERS) if control >> 11 >> n & 1)
        if opcode.startswith("DEPBAR"):
            barrier = re.search(r"SB(\d), 0x0\b", operands)
            waits = (int(barrier.group(1)),) if barrier else ()
            opcode = "NOP"
        if not opcode.startswith(("HGMMA", "QGMMA")):
            split = tuple(x.strip() for x in re.split(r",(?![^\[(]*[\])])", operands))
            yield Instruction(place, guard, opcode, split, control >> 5 & 7, control >> 8 & 7, waits)
        if opcode in _LEAVES and "@" not in line:
            yield None


__all__ = ["Instruction", "overwritten_operands"]
