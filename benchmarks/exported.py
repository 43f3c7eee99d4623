"""Checks and times the functions that `flashtile export --layout llmc` makes, beside the front end and PyTorch's SDPA.

    python benchmarks/exported.py LIBRARY.so [--shapes 8x1024 6x4096 ...] [--dtypes bf16 ...] [--seconds N] [--output FILE]
        [--beside LLMC/dev/cuda FLASHATTENTIONC/src/llm.c]

The library is the emitted C, compiled as a shared object; it is used through ctypes. The dtype "tf32" is fp32 in a library
that was exported with this precision. Before anything is timed its results are held against float64 for random sizes and for
the timed ones, and the forward's against the front end's, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Ahead, Experiment, main_of
from benchmarks.llmc_kernels import Theirs
from benchmarks.record import Record, at_least_one, positive, sized
from flashtile.bench.rotation import rotate
from flashtile.bench.timing import burst_ms, calls_for, host_us
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.dispatch import plan_backward, plan_forward
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound, device_of
from flashtile.torch.execute.packing import QKV, PackedGradient

CODES = {"fp32": 0, "tf32": 0, "fp16": 1, "bf16": 2}  # flashtile_dtype
KINDS = {**TORCH_DTYPES, "tf32": torch.float32}
SHAPES = ("8x1024", "6x4096", "1x8192")
HEADS, HEAD_DIM = 12, 64
RESULTS = {"forward": ("out", "stats"), "backward": ("dinp", "scratch")}
LEAST_SIZES = 7  # random ones that are checked whatever time it takes
Tensors = dict[str, torch.Tensor]
Sizes = tuple[int, int, int, int]  # B, T, NH, C


class Exported:
    """The functions of the library, on PyTorch's tensors and current stream."""

    def __init__(self, path: str):
        self.library: Any = ctypes.CDLL(path)
        self.library.flashtile_last_error.restype = ctypes.c_char_p
        self.library.flashtile_status_text.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(
                f"{self.library.flashtile_status_text(status).decode()}: {self.library.flashtile_last_error().decode()}"
            )

    def bytes(self, dtype: str, sizes: Sizes) -> tuple[int, int]:
        """Of stats, of scratch."""
        stats, scratch = ctypes.c_size_t(), ctypes.c_size_t()
        self.call(
            "flashtile_attention_bytes", CODES[dtype], *map(ctypes.c_int64, sizes), ctypes.byref(stats), ctypes.byref(scratch)
        )
        return stats.value, scratch.value

    def forward(self, dtype: str, sizes: Sizes, t: Tensors) -> Callable[[], None]:
        function = self.library.flashtile_attention_forward
        given = (CODES[dtype], *_addresses(t, "out", "stats", "inp"), *map(ctypes.c_int64, sizes))
        return lambda: _check(function(*given, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))

    def backward(self, dtype: str, sizes: Sizes, t: Tensors) -> Callable[[], None]:
        function = self.library.flashtile_attention_backward
        given = (
            CODES[dtype], *_addresses(t, "dinp", "dout", "inp", "out", "stats", "scratch"),
            ctypes.c_size_t(t["scratch"].numel()), *map(ctypes.c_int64, sizes),
        )  # fmt: skip
        return lambda: _check(function(*given, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))


def _addresses(t: Tensors, *names: str) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t[name].data_ptr()) for name in names]


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"status {status}")


def draw(exported: Exported, dtype: str, sizes: Sizes) -> Tensors:
    """All tensors of llm.c's functions; those that will be written hold NaN."""
    b, t, heads, c = sizes
    kind, size = KINDS[dtype], (b, t, heads, c // heads)
    stats, scratch = exported.bytes(dtype, sizes)
    made = {"inp": torch.randn((b, t, 3, *size[2:]), device="cuda").to(kind), "dout": torch.randn(size, device="cuda").to(kind)}
    for name, like in (("out", made["dout"]), ("dinp", made["inp"])):
        made[name] = torch.full_like(like, float("nan"))
    for name, count in (("stats", stats), ("scratch", scratch)):
        made[name] = torch.full((max(count, 16),), 0xFF, dtype=torch.uint8, device="cuda")  # NaN in every float format
    return made


def problem_of(dtype: str, sizes: Sizes) -> AttentionProblem:
    b, t, heads, c = sizes
    d = c // heads
    words = "fp32,band=:0,tf32" if dtype == "tf32" else f"{dtype},band=:0"
    return AttentionProblem.parse(f"attention(q={b}x{t}x{heads}x{d},kv={t}x{heads}x{d},{words})")


def front_end(problem: AttentionProblem, t: Tensors) -> tuple[Callable[[], Tensors], Callable[[], Tensors]]:
    """Forward and backward as the front end executes them, on the same packed tensor."""
    device = torch.device("cuda", 0)
    inputs = dict(zip("qkv", t["inp"].unbind(2), strict=True))
    forward = Bound(plan_forward(problem, device_of(device)), inputs, device)
    made = forward.run(dict(inputs))
    kept = {**inputs, "dout": t["dout"], **{name: made[name] for name in ("out", "lse", "stats") if name in made}}
    backward = Bound(plan_backward(problem, device_of(device)), kept, device, (PackedGradient(QKV.packs[0], t["inp"]),))
    return lambda: forward.run(dict(inputs)), lambda: backward.run(dict(kept))


def sdpa(problem: AttentionProblem, t: Tensors) -> tuple[str, Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of SDPA's cuDNN backend, or its memory-efficient one in fp32, on separate tensors."""
    wide = problem.dtype.value == "fp32"
    name, backend = ("sdpa/efficient", SDPBackend.EFFICIENT_ATTENTION) if wide else ("sdpa/cudnn", SDPBackend.CUDNN_ATTENTION)
    q, k, v = leaves = [part.transpose(1, 2).detach().requires_grad_() for part in t["inp"].unbind(2)]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_alone() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    out, dout = forward(), t["dout"].transpose(1, 2)
    return name, forward_alone, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def judge(exported: Exported, dtype: str, sizes: Sizes) -> Tensors:
    """The tensors of a problem that both functions answered. Raises ArithmeticError where they are wrong by float64, or the
    forward is not the front end's bit by bit."""
    problem = problem_of(dtype, sizes)
    t = draw(exported, dtype, sizes)
    exported.forward(dtype, sizes, t)()
    exported.backward(dtype, sizes, t)()
    parts = dict(zip("qkv", t["inp"].unbind(2), strict=True))
    yardstick = Yardstick(problem, {**parts, "dout": t["dout"]})
    errors = {"out": yardstick.error("out", t["out"])}
    errors |= {f"d{n}": yardstick.error(f"d{n}", part) for n, part in zip("qkv", t["dinp"].unbind(2), strict=True)}
    most = tolerance(problem)
    right = errors["out"] < most[0] and all(errors[n] < most[1] for n in ("dq", "dk", "dv"))
    same = torch.equal(front_end(problem, t)[0]()["out"], t["out"])
    if not (right and same):
        raise ArithmeticError(f"WRONG {errors}, bitwise the front end's: {same}")
    return t


def allocating(make: Callable[..., Any], dtype: str, sizes: Sizes, t: Tensors, direction: str) -> Callable[[], None]:
    """A call that allocates what it writes, as the front end's does: where memory lies changes times by some per cent."""
    return lambda: make(dtype, sizes, {**t, **{name: torch.empty_like(t[name]) for name in RESULTS[direction]}})()


def random_sizes() -> Iterator[Sizes]:
    """A few odd ones, then random ones without end."""
    dice = random.Random(0)
    for b, t, heads in ((1, 1100, 3), (2, 1024, 12), (40, 64, 12), (3, 257, 5), (1, 128, 1), (2, 1, 12), (1, 1, 1)):
        yield b, t, heads, heads * HEAD_DIM
    while True:
        heads = dice.randint(1, 16)
        yield dice.randint(1, 6), dice.randint(1, 1500), heads, heads * HEAD_DIM


def check(exported: Exported, dtypes: list[str], seconds: float, record: Record) -> None:
    """Check random sizes until time is up; a row for each dtype and, where one is wrong, for that."""
    end, checked = time.monotonic() + seconds, 0
    for sizes in random_sizes():
        if record.left() < 0 or (checked >= LEAST_SIZES and time.monotonic() > end):
            break
        checked += 1
        for dtype in dtypes:
            with record.attempt(problem=problem_of(dtype, sizes).spell(), direction="check"):
                judge(exported, dtype, sizes)
    print(f"checked {checked} random sizes of {', '.join(dtypes)}", flush=True)
    record.add(dict(problem=f"{checked} random sizes of {' '.join(dtypes)}", direction="check"))


def warm(dtype: str, sizes: Sizes, which: int) -> None:
    """Compile the front end's forward, or its backward, of a problem."""
    b, t, heads, c = sizes
    size = (b, t, heads, c // heads)
    tensors = {"inp": torch.randn((b, t, 3, *size[2:]), device="cuda").to(KINDS[dtype])}
    tensors["dout"] = torch.randn(size, device="cuda").to(KINDS[dtype])
    (forward, backward) = front_end(problem_of(dtype, sizes), tensors)
    (forward, backward)[which]()


def measure(
    exported: Exported, theirs: Theirs | None, dtype: str, shape: str, rounds: int, until: float, record: Record
) -> None:
    """Rows of one shape, forward and backward; those of `theirs` where it is fp32 or tf32."""
    b, length = (int(n) for n in shape.split("x"))
    sizes = (b, length, HEADS, HEADS * HEAD_DIM)
    problem, device = problem_of(dtype, sizes), torch.device("cuda", 0)
    t = judge(exported, dtype, sizes)
    own, (peer, *passes) = front_end(problem, t), sdpa(problem, t)
    beside = theirs.calls(*(t[n] for n in ("inp", "dout", "out", "dinp"))) if theirs and CODES[dtype] == 0 else {}
    for i, direction in enumerate(("forward", "backward")):
        make = exported.forward if direction == "forward" else exported.backward
        ours = {"exported": make(dtype, sizes, t), "exported, new memory": allocating(make, dtype, sizes, t, direction)}
        calls = {**ours, "front end": own[i], peer: passes[i], **beside.get(direction, {})}
        counts = {name: calls_for(burst_ms(call, 3, device), device) for name, call in calls.items()}
        times = rotate(
            list(calls), rounds, lambda name: burst_ms(calls[name], counts[name], device),  # noqa: B023
            lambda: time.monotonic() < until,
        )  # fmt: skip
        for name, taken in times.items():
            ms = median(taken)
            row = dict(
                problem=problem.spell(), direction=direction, provider=name, ms=round(ms, 4), least_ms=round(min(taken), 4),
                most_ms=round(max(taken), 4), tflops=round(problem.flops(direction) / ms / 1e9, 1),  # pyright: ignore
                host_us=round(host_us(calls[name], ms), 1), speedup=round(ms / median(times["exported"]), 3),
            )  # fmt: skip
            print(row, flush=True)
            record.add(row)


class ExportedLibrary(Experiment[tuple[str, str]]):
    """A cell is a dtype and a shape. Before them come random sizes, which are checked and not timed."""

    output, budget_s, ahead_share = "bench-output/exported.csv", 180, 0.4

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("library", type=Path)
        parser.add_argument("--shapes", nargs="+", type=sized(2), default=SHAPES, help="BxT")
        parser.add_argument("--dtypes", nargs="+", choices=list(CODES), default=["fp32", "fp16", "bf16"])
        parser.add_argument("--seconds", type=positive, default=20.0, help="of random checks")
        parser.add_argument("--rounds", type=at_least_one, default=8)
        parser.add_argument(
            "--beside", nargs=2, type=Path, metavar=("LLMC", "FLASHATTENTIONC"), help="sources of their fp32 kernels, timed too"
        )

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if not chosen.library.exists():
            parser.error(f"{chosen.library} is not there")
        return None

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        torch.manual_seed(0)
        torch.zeros(1, device="cuda")  # makes a context current, which the library wants to find when it is loaded
        self.exported = Exported(str(chosen.library.resolve()))
        self.theirs = Theirs(*chosen.beside) if chosen.beside else None

    def cells(self) -> list[tuple[str, str]]:
        return [(dtype, shape) for dtype in self.chosen.dtypes for shape in self.chosen.shapes]

    def ahead(self) -> Ahead:
        timed = [(dtype, (*map(int, shape.split("x")), HEADS, HEADS * HEAD_DIM)) for dtype, shape in self.cells()]
        odd = [(dtype, sizes) for sizes in islice(random_sizes(), LEAST_SIZES) for dtype in self.chosen.dtypes]
        return warm, [(*cell, 1) for cell in timed] + [(*cell, 0) for cell in odd]

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        check(self.exported, self.chosen.dtypes, self.chosen.seconds, record)
        yield

    def place(self, cell: tuple[str, str]) -> dict[str, str]:
        return dict(problem=self.name(cell), direction="both")

    def name(self, cell: tuple[str, str]) -> str:
        return " ".join(cell)

    def measure(self, cell: tuple[str, str], record: Record, until: float) -> None:
        measure(self.exported, self.theirs, *cell, self.chosen.rounds, until, record)


def main() -> int:
    return main_of(ExportedLibrary)


if __name__ == "__main__":
    sys.exit(main())
