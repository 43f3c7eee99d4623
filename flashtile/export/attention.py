"""Attention problems as C functions: batch, lengths and heads are given at run time, all else is the problem's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Literal

from flashtile.dispatch import BACKENDS, first_of
from flashtile.errors import InvalidProblem, NotSupported
from flashtile.export import schedule
from flashtile.export.entry import Entry, Sizes
from flashtile.kernels.device.score import form_of
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.kernels.sm90.host import choose_forward as choose
from flashtile.kernels.sm90.host.tile_forward import SHORT, sees_halves
from flashtile.plan.backend import Gradients
from flashtile.plan.buffers import place_of
from flashtile.plan.call import Buffer, Plan
from flashtile.plan.device import H100, Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant
from flashtile.triton_glue.compile import contiguous

Direction = Literal["forward", "backward"]
Layout = Literal["bshd", "bhsd", "llmc"]
LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "llmc")
TOKENS = ("q", "k", "v", "out")  # tensors with an axis of tokens and one of heads; their gradients are named d...
GPU_BACKENDS = tuple(b for b in BACKENDS if b.name != "cpu")

# Lengths that meet every decision of the planners: the smallest, multiples of every tile's size and none, each also from the
# length on at which fp32 is multiplied otherwise (kernels/portable/tile.py: wants_parts).
LENGTHS = (1, 2, 48, 96, 100, 192, 256, 1040, 1056, 1088, 1100, 1152, 4096)
DRAWN = 2000  # sizes besides, where a modifier's gradient has ways of its own for products of them


def check_exported(p: AttentionProblem, spelling: str, lengths: bool = False) -> None:
    """Raise NotSupported for what no C function has; lengths: whether items of unlike lengths are known to it."""
    reasons: list[str] = []
    if p.lengths.ragged and not lengths:
        reasons.append("items differ in length")
    if p.where or p.blocks is not None:
        reasons.append("the mask has predicates or block lists")
    if any(c.index is not None for spec in p.score for c in spec.kind.captured):
        reasons.append("a captured tensor's shape has nothing to do with the sizes")
    if reasons:
        raise NotSupported(spelling, {"export": reasons})


def at_sizes(p: AttentionProblem, batch: int, seqlen_q: int, seqlen_k: int, heads_kv: int) -> AttentionProblem:
    """The problem, and the tensors that it captures, of other sizes; heads that share keys stay as many."""
    scores = (batch, heads_kv * p.group, seqlen_q, seqlen_k)
    score = tuple(
        replace(spec, tensors=tuple(
            replace(t, shape=tuple(1 if c.broadcast and n == 1 else size for n, size in zip(t.shape, scores, strict=False)))
            for c, t in zip(spec.kind.captured, spec.tensors, strict=True)
        ))
        for spec in p.score
    )  # fmt: skip
    sink = None if p.sink is None else replace(p.sink, shape=scores[1:2])
    return replace(
        p, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=scores[1], heads_kv=heads_kv, score=score, sink=sink
    )


@dataclass(frozen=True)
class AttentionExport:
    """A problem, whose sizes stand for any, in a layout.

    bshd: (batch, seqlen, heads, head_dim) tensors, dense; bhsd: (batch, heads, seqlen, head_dim) likewise; llmc: q, k, v in
    one tensor (batch, seqlen, 3, heads, head_dim), of one length, and so are their gradients.
    """

    problem: AttentionProblem
    layout: Layout
    variant: Variant = "auto"

    def __post_init__(self) -> None:
        p = self.problem
        check_exported(p, p.spell())
        if self.layout == "llmc" and (p.group != 1 or p.head_dim != p.head_dim_v or p.seqlen_q != p.seqlen_k):
            raise InvalidProblem(
                f"layout is 'llmc' and the problem {p.spell()}; its q, k and v must have equal heads, head_dim and length."
            )

    @property
    def sizes(self) -> tuple[str, ...]:
        return ("batch", "seqlen", "heads") if self.layout == "llmc" else ("batch", "seqlen_q", "seqlen_k", "heads_kv")

    def at(self, sizes: Sizes) -> AttentionProblem:
        """The problem of these sizes."""
        seqlen_q, seqlen_k = (sizes["seqlen"],) * 2 if self.layout == "llmc" else (sizes["seqlen_q"], sizes["seqlen_k"])
        return at_sizes(self.problem, sizes["batch"], seqlen_q, seqlen_k, sizes[self.sizes[-1]])

    def strides(self, buffer: Buffer, sizes: Sizes) -> tuple[int, ...]:
        """Those of a tensor of the plan. What is scratch, or has no axis of tokens, is dense."""
        if buffer.role == "scratch" or buffer.name.removeprefix("d") not in TOKENS:
            return contiguous(buffer.shape)
        batch, seqlen, heads, width = buffer.shape
        if self.layout == "bhsd":
            b, h, s, d = contiguous((batch, heads, seqlen, width))
            return b, s, h, d
        if self.layout == "llmc" and buffer.name.removeprefix("d") != "out":
            return seqlen * 3 * heads * width, 3 * heads * width, width, 1
        return contiguous(buffer.shape)

    def broadcast(self, name: str) -> tuple[bool, ...]:
        """Which axes of a captured tensor are of one element in the problem as it was spelled."""
        i, j = place_of(name)
        spec = self.problem.score[i]
        return tuple(spec.kind.captured[j].broadcast and n == 1 for n in spec.tensors[j].shape)

    @property
    def scheduled(self) -> bool:
        """Whether some forward's tile is chosen for the sizes that come: Hopper's."""
        return not HOPPER.unsupported(self.problem, H100)

    def scheduled_in(self, direction: Direction) -> bool:
        return self.scheduled and direction == "forward"

    def derived(self, direction: Direction) -> tuple[str, ...]:
        return ("sm_count", *schedule.DERIVED) if self.scheduled_in(direction) else ("sm_count",)

    def derive(self, name: str, direction: Direction) -> str:
        """C that fills in the derived sizes."""
        first = len(self.sizes)
        text = f"    sizes[{first}] = gpu->sm_count;\n"
        if not self.scheduled_in(direction):
            return text + "    return FLASHTILE_OK;\n"
        batch, seqlen_q, seqlen_k, heads = (0, 1, 1, 2) if self.layout == "llmc" else (0, 1, 2, 3)
        return text + (
            f"    if (gpu->arch == 90)\n"
            f"        return schedule_forward(&{name}_schedule, sizes[{batch}], sizes[{heads}] * {self.problem.group}, "
            f"sizes[{seqlen_q}], sizes[{seqlen_k}],\n"
            f"                                gpu->sm_count, &sizes[{first + 1}], &sizes[{first + 2}]);\n"
            f"    sizes[{first + 1}] = sizes[{first + 2}] = 0;\n"
            f"    return FLASHTILE_OK;\n"
        )

    def samples(self, direction: Direction, device: Device) -> list[dict[str, int]]:
        """Sizes at which plans are made."""
        lengths = {*LENGTHS, *self._band_lengths(), *self.long()}
        keys = sorted({*lengths, *self.short()})
        pairs = [(n, n) for n in keys] if self.layout == "llmc" else list(product(sorted(lengths), keys))
        found: list[dict[str, int]] = []
        drawn = DRAWN if direction == "backward" and any(spec.wants_grad for spec in self.problem.score) else 0
        for batch, seqlen_q, seqlen_k, heads in chain(_ordered(pairs), _drawn(drawn)):
            given = (batch, seqlen_q, heads) if self.layout == "llmc" else (batch, seqlen_q, seqlen_k, heads)
            found += self.complete(direction, dict(zip(self.sizes, given, strict=True)), device)
        return found

    def complete(self, direction: Direction, sizes: Sizes, device: Device) -> list[dict[str, int]]:
        """Sizes that a caller gives, with all that the run-time may find for them; none where no problem has them."""
        given = {**{name: sizes[name] for name in self.sizes}, "sm_count": device.sm_count}
        try:
            problem = self.at(given)
        except InvalidProblem:
            return []
        if not self.scheduled_in(direction):
            return [given]
        choices = schedule.feasible(problem) if device.arch == 90 else [1]
        return [{**given, **dict(zip(schedule.DERIVED, (choice, 6), strict=True))} for choice in choices]

    def short(self) -> Iterator[int]:
        """Numbers of keys that are one whole tile of Hopper's forward, which then is another, as with fewer."""
        if self.scheduled:
            yield from (launch.block_k for launch in schedule.launches(self.at(dict.fromkeys(self.sizes, 1))).values())

    def long(self) -> Iterator[int]:
        """Lengths from which on Hopper's forward is another, where it ever is: a multiple of every tile's size, and none."""
        if not self.scheduled:
            return
        short, long = (self.at(dict.fromkeys(self.sizes, n)) for n in (SHORT - 1, SHORT + 1))
        launches = schedule.launches(short).values()
        if any(sees_halves(short, launch, form_of(short)) != sees_halves(long, launch, form_of(long)) for launch in launches):
            yield from (SHORT - 1, -(-(SHORT + 1) // 384) * 384, SHORT + 52)

    def _band_lengths(self) -> Iterator[int]:
        for bound in (self.problem.mask.left, self.problem.mask.right):
            if bound is not None:
                yield from (n for n in (bound, bound + 1, bound + 2) if n > 0)


def _ordered(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(batch, seqlen_q, seqlen_k, heads): fewer and more of them than a GPU has SMs, a few for each, and much work whatever the
    lengths.

    Ordinary lengths come first, for the first sample of a plan names it.
    """
    for batch, heads in ((3, 5), (1, 1), (40, 5), (200, 5), (4096, 4096)):
        for seqlen_q, seqlen_k in sorted(pairs, key=lambda pair: (pair != (4096, 4096), pair)):
            yield batch, seqlen_q, seqlen_k, heads


def _drawn(count: int) -> Iterator[tuple[int, int, int, int]]:
    """The same at random, from 1 to 8,192: small ones, whole tiles and any others."""
    dice = random.Random(0)
    for _ in range(count):
        batch, heads = (dice.choice((1, 2, 3, round(2 ** dice.uniform(0, 13)))) for _ in range(2))
        seqlen_q, seqlen_k = (
            dice.choice((1, 2, 128 * round(2 ** dice.uniform(0, 6)), round(2 ** dice.uniform(0, 13)))) for _ in range(2)
        )
        yield batch, seqlen_q, seqlen_k, heads


def entries(name: str, export: AttentionExport) -> list[Entry]:
    """Forward and backward of a problem."""
    spelling = export.problem.spell()

    def forward(sizes: Sizes, device: Device) -> Plan:
        problem = export.at(sizes)
        device = replace(device, sm_count=sizes["sm_count"])
        backend = first_of(GPU_BACKENDS, lambda each: each.unsupported(problem, device), problem, device)
        if backend is not HOPPER:
            return backend.forward(problem, device)
        for number, launch in schedule.launches(problem).items():
            if sizes["choice"] == number:
                moved = launch if number <= len(choose.options(problem)[0]) else replace(launch, swizzle=sizes["swizzle"])
                return HOPPER.forward(problem, device, moved)
        raise AssertionError(f"no launch has the number {sizes['choice']}")

    def backward(sizes: Sizes, device: Device) -> Plan:
        problem = export.at(sizes)
        device = replace(device, sm_count=sizes["sm_count"])
        gradients = Gradients(dlse=problem.returns_lse)
        # Hopper's own, where it has to be repeatable or is split, takes an order from the sizes at compile time.
        fixed = problem.deterministic or export.variant == "split"
        backends = tuple(b for b in GPU_BACKENDS if b is not HOPPER) if fixed else GPU_BACKENDS
        backend = first_of(backends, lambda each: each.unsupported(problem, device, export.variant), problem, device)
        return backend.backward(problem, device, gradients, export.variant)

    def entry(direction: Direction, plan: Callable[[Sizes, Device], Plan]) -> Entry:
        whole = f"{name}_{direction}"
        return Entry(
            name=whole,
            spelling=spelling,
            direction=direction,
            sizes=export.sizes,
            derived=export.derived(direction),
            plan=plan,
            strides=export.strides,
            broadcast=export.broadcast,
            samples=partial(export.samples, direction),
            complete=partial(export.complete, direction),
            derive=export.derive(whole, direction),
            schedule=export.problem if export.scheduled_in(direction) else None,
        )

    return [entry("forward", forward), entry("backward", backward)]
