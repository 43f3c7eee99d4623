"""Finds matrix operands whose address depends on which way the code was reached, in a kernel's machine code.

Hopper's matrix instructions read shared memory through descriptors in uniform registers. A loop's descriptors are made of the
place of its buffers, and of nothing that an earlier loop, which may be skipped, has done; ptxas 12.8 forgets it at times
(`_triton.assembler`). So every uniform register gets a number for what it was computed from, along all paths. Where paths join
with different numbers, other than at the head of a loop, and a descriptor is made of that, its operand is suspicious. Kernels
that count pipeline stages across loops, as the warp-specialised ones, do so rightly and are no case for this.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import cast

_LABEL = re.compile(r"^\s*(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_NAME = re.compile(r"(?<![A-Z0-9_])(UR\d+|UP\d)(?!\d)")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_DESCRIPTOR = re.compile(r"[HQ]GMMA\S*\s+\S+?,\s*(R\d+,\s*)?gdesc\[UR(\d+)\]")
_DESTINATION = re.compile(r"UR\d+|URZ|UP\d|UPT|P\d|PT")

Value = int  # the number of a way to compute something
State = dict[str, Value]


def suspicious_operands(sass: str) -> list[str]:
    """Places of matrix instructions, "6620 UR10", with a descriptor that differs by the way to them."""
    code = _Code(sass)
    return list(dict.fromkeys(f"{code.places[i]:x} {name}" for i, name in code.suspicions()))


class _Code:
    """A kernel's instructions in blocks, and what its uniform registers hold at the end of each."""

    def __init__(self, sass: str):
        self.places: list[int] = []
        self.texts: list[str] = []
        labels: dict[str, int] = {}
        for line in sass.splitlines():
            label, found = _LABEL.match(line), _INSTRUCTION.search(line)
            if label:
                labels[label.group(1)] = len(self.texts)
            elif found:
                self.places.append(int(found.group(1), 16))
                self.texts.append(found.group(2))
        self.numbers: dict[tuple[object, ...], Value] = {}
        self.ways: list[tuple[object, ...]] = []
        self._cut_blocks(labels)
        self._follow()

    def _cut_blocks(self, labels: dict[str, int]) -> None:
        """Blocks by their first instruction, their ends and predecessors, in an order that loops' heads come first in."""
        leaves = [i + 1 for i, text in enumerate(self.texts) if re.search(r"\b(BRA|EXIT|RET)\b", text)]
        starts = sorted({0, *labels.values(), *leaves} - {len(self.texts)})
        self.ends = dict(zip(starts, [*starts[1:], len(self.texts)], strict=True))
        following: dict[int, list[int]] = {}
        for start, end in self.ends.items():
            guard, _, rest = self.texts[end - 1].rpartition("@")[2].partition(" ")
            text = rest if "@" in self.texts[end - 1] else f"{guard} {rest}"
            target = _TARGET.search(text) if text.startswith("BRA") else None
            ends_here = text.startswith(("BRA", "EXIT", "RET"))
            goes_on = not ends_here or "@" in self.texts[end - 1] or bool(re.match(r"BRA\S*\s+!?U?P\d", text))
            following[start] = ([labels[target.group(1)]] if target else []) + ([end] if goes_on and end in self.ends else [])
        self.heads: set[int] = set()
        self.before: dict[int, list[int]] = defaultdict(list)
        self.order: list[int] = []
        entered: dict[int, bool] = {0: True}  # False: left again
        ways = [(0, iter(following[0]))]
        while ways:
            block, rest = ways[-1]
            target = next(rest, None)
            if target is None:
                entered[block] = False
                self.order.insert(0, block)
                ways.pop()
                continue
            self.before[target].append(block)
            if target not in entered:
                entered[target] = True
                ways.append((target, iter(following[target])))
            elif entered[target]:
                self.heads.add(target)

    def _follow(self) -> None:
        self.after: dict[int, State] = {}
        changed = True
        while changed:
            changed = False
            for block in self.order:
                state = self._joined(block)
                for i in range(block, self.ends[block]):
                    self._run(i, state)
                if self.after.get(block) != state:
                    self.after[block], changed = state, True

    def _joined(self, block: int) -> State:
        """What registers hold where a block begins."""
        states = [self.after[b] for b in self.before[block] if b in self.after]
        state: State = {}
        for name in {name for s in states for name in s}:
            held = {s.get(name, self._number("unset", name)) for s in states}
            state[name] = held.pop() if len(held) == 1 else self._number("joined", block, name)
        return state

    def _number(self, *way: object) -> Value:
        """The number of a way to compute something; numbers among its parts stand behind a None."""
        if way not in self.numbers:
            self.numbers[way] = len(self.ways)
            self.ways.append(way)
        return self.numbers[way]

    def _run(self, i: int, state: State) -> None:
        """The effect of an instruction on uniform registers and predicates."""
        text, guard = self.texts[i], None
        if text.startswith("@"):
            guard, text = text.split(None, 1)
        opcode, _, rest = text.partition(" ")
        operands = [x.strip() for x in re.split(r",(?![^\[(]*[\])])", rest)]
        if not opcode.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX", "CREDUX")):
            state.pop(operands[0], None)
            if opcode == "MOV" and not guard and _NAME.fullmatch(operands[1]):  # kept in a thread's register for a while
                state[operands[0]] = state.get(operands[1], self._number("unset", operands[1]))
            return
        count = 1
        while count < len(operands) and re.fullmatch(r"U?P[\dT]", operands[count]) and opcode.startswith("U"):
            count += 1
        if opcode.startswith("ULDC") or not _DESTINATION.fullmatch(operands[0]):
            count = 1
        wide = ".64" in opcode or ".WIDE" in opcode
        sources = operands[count:]
        if opcode.startswith("UMOV") and _NAME.fullmatch(sources[0]):
            value = state.get(sources[0], self._number("unset", sources[0]))
        elif opcode.startswith("S2UR"):
            value = self._number("special", sources[0])
        elif not opcode.startswith("U"):  # of a thread's own registers, which are followed where they keep a uniform one
            value = state.get(sources[-1].removesuffix(".reuse"), self._number("here", i))
        else:
            value = self._number(opcode, *(self._source(x, wide, state) for x in sources))
        for place, name in enumerate(operands[:count]):
            for half in range(2 if wide and name.startswith("UR") else 1):
                whole = f"UR{int(name[2:]) + half}" if half else name
                part = self._number("part", place, half, None, value) if place or half else value
                if guard:
                    other = state.get(whole, self._number("unset", whole))
                    part = self._number("either", self._source(guard[1:], False, state), None, part, other)
                if whole not in ("URZ", "UPT", "PT"):
                    state[whole] = part

    def _source(self, text: str, wide: bool, state: State) -> Value:
        """The number of an operand: its text without registers, and what these hold."""
        names = _NAME.findall(text)
        names += [f"UR{int(n[2:]) + 1}" for n in names if wide and n.startswith("UR")]
        return self._number(_NAME.sub("", text), None, *(state.get(n, self._number("unset", n)) for n in names))

    def suspicions(self) -> Iterator[tuple[int, str]]:
        known: dict[Value, bool] = {}

        def suspect(value: Value) -> bool:
            """Whether what a register holds depends on paths that joined outside of a loop's head."""
            if value not in known:
                known[value] = False  # of a loop on itself: decided by its other parts
                kind, *parts = self.ways[value]
                if kind == "joined":
                    block, name = cast("tuple[int, str]", parts)
                    held = [self.ways[self.after[b][name]][0] for b in self.before[block] if name in self.after[b]]
                    known[value] = block not in self.heads and "here" not in held  # what a thread has kept may well be the same
                elif kind not in ("unset", "special", "here"):
                    values = parts if None not in parts else parts[parts.index(None) + 1 :]
                    known[value] = any(suspect(part) for part in values if isinstance(part, int))
            return known[value]

        for block in self.order:
            state = self._joined(block)
            for i in range(block, self.ends[block]):
                found = _DESCRIPTOR.search(self.texts[i])
                if found:
                    first = int(found.group(2))  # of four: the left operand's two, unused where that is in registers
                    for name in (f"UR{first + n}" for n in range(2 if found.group(1) else 0, 4)):
                        if name in state and suspect(state[name]):
                            yield i, name
                self._run(i, state)
