"""Times `flashtile.jax` beside JAX's own attentions on a GPU, in one rotation, after a check against float32.

    python benchmarks/jax_attention.py [--jax-triton attention.py] [--providers flashtile/auto tokamax/mosaic ...]
        [--limit SECONDS] [--budget SECONDS] [--output FILE]

Cells: bf16, batch 4, 4096 tokens, head_dim 64 with 32 heads and 128 with 16, causal and full; forward, backward alone from
what the forward kept, and forward with backward. Everything is compiled first, in parallel processes, and what is not
compiled in `--limit` seconds is named and not timed. Where PyTorch is installed flashtile from PyTorch takes its turns on the
same arrays, in the same process, and of both front ends the kernels' own time is measured too: it is to be the same.

--jax-triton times the fused backward that jax-triton had before it was split: its jax_triton/pallas/ops/attention.py of
commit 4f97b83, on the Pallas of the JAX that is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Experiment, main_of
from benchmarks.processes import Failure, in_processes
from benchmarks.record import Record, at_least_one, positive, provenance

CELLS = [(head_dim, causal) for head_dim in (64, 128) for causal in (True, False)]
BATCH, SEQLEN, TOLERANCE = 4, 4096, 1.5e-2  # of the norm, against float32 attention of a part
PASSES = {"forward": 2, "backward": 5, "both": 7}  # products of 2 x queries x keys x head_dim operations
OURS = ("flashtile/auto", "flashtile/split", "flashtile/fused")
FRONT_ENDS = ("flashtile/auto", "flashtile/torch")
ORIGINAL = "jax-triton/fused"
PEERS = ("tokamax/mosaic", "tokamax/triton", "tokamax/cudnn", "pallas/mha", "jax.nn/cudnn", "jax.nn/xla")
# What the split backward is held against, and how many times as fast it is to be.
SPLIT_BARS = {ORIGINAL: 4.0, "pallas/mha": 4.0, "jax.nn/xla": 2.0}
ALONE = (*FRONT_ENDS, *OURS, *SPLIT_BARS)  # whose backward is timed alone, too
TUNED = ("tokamax/cudnn", "jax.nn/cudnn", "jax.nn/xla")  # XLA times variants as it compiles: not beside other processes
KERNELS_S = 20.0  # kept for what the profiler measures, which comes last
BURST, BURST_MS = 40, 60.0  # calls between two waits: at most so many, and no more than take so long


@dataclass(frozen=True)
class Calls:
    """A provider's passes on a cell's arrays; `wait` returns once what a call returned is there."""

    passes: dict[str, Callable[[], Any]]
    wait: Callable[[Any], Any]


def heads(head_dim: int) -> int:
    return 2048 // head_dim


def flops(head_dim: int, causal: bool, which: str) -> float:
    one = 2 * BATCH * heads(head_dim) * SEQLEN * SEQLEN * head_dim / (2 if causal else 1)
    return one * PASSES[which]


def function_of(name: str, head_dim: int, causal: bool, jax_triton: str | None) -> Callable[..., Any]:
    """A provider's attention of (q, k, v)."""
    import jax

    from flashtile.jax import dot_product_attention

    library, _, variant = name.partition("/")
    if library == "flashtile":
        implementation = None if variant == "auto" else "triton"
        return lambda q, k, v: dot_product_attention(q, k, v, is_causal=causal, backward=variant, implementation=implementation)
    if library == "jax.nn":
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=variant)  # pyright: ignore
    if library == "tokamax":
        import tokamax  # pyright: ignore

        return lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation=variant)
    if library == "jax-triton":
        assert jax_triton is not None
        module = loaded(jax_triton)
        return lambda q, k, v: module.mha(q, k, v, sm_scale=head_dim**-0.5, causal=causal)
    from jax.experimental.pallas.ops.gpu.attention import mha

    return lambda q, k, v: mha(q, k, v, None, sm_scale=head_dim**-0.5, causal=causal)


def loaded(path: str) -> Any:
    """The module that is in a file."""
    spec = importlib.util.spec_from_file_location("jax_triton_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A provider's passes, jitted; `kept` returns what its backward alone takes."""
    import jax

    def kept(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(function, q, k, v)

    def backward(pull: Any, dout: Any) -> Any:
        return pull(dout)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(dout)

    made = {"both": both, "forward": function, **(dict(backward=backward, kept=kept) if name in ALONE else {})}
    return {which: jax.jit(program) for which, program in made.items()}


def compiled(head_dim: int, causal: bool, name: str, which: str, jax_triton: str | None) -> float:
    """Compile a provider's program of a cell, or `all`, for this GPU; JAX keeps it on disk. Returns the seconds."""
    import jax
    import jax.numpy as jnp

    jax.devices("cuda")  # raises where there is none
    begun = time.perf_counter()
    array = jax.ShapeDtypeStruct((BATCH, SEQLEN, heads(head_dim), head_dim), jnp.bfloat16)
    made = programs(name, function_of(name, head_dim, causal, jax_triton))
    for each in made if which == "all" else (which,):
        given: tuple[Any, ...] = (array,) * (4 if each == "both" else 3)
        if each == "backward":
            given = (jax.eval_shape(made["kept"], *given)[1], array)
        made[each].lower(*given).compile()
    return time.perf_counter() - begun


def compile_all(names: Iterable[str], jax_triton: str | None, limit_s: float, record: Record) -> set[tuple[Any, ...]]:
    """(head_dim, causal, provider) of all that is compiled in time."""
    jobs = [
        (*cell, name, which, jax_triton)
        for name in names
        # our passes share kernels
        for which in (["all"] if name in OURS else programs(name, lambda: None))
        for cell in CELLS
    ]
    waiting, refused, begun = set(jobs), set[tuple[Any, ...]](), time.monotonic()
    for job, made in in_processes(compiled, jobs, begun + min(limit_s, record.left())):
        waiting.remove(job)
        head_dim, causal, name, which, _ = job
        if isinstance(made, Failure):
            refused.add((head_dim, causal, name))
            refuse(record, head_dim, causal, name, made.text)
        else:
            print("compiled", head_dim, causal, name, which, f"in {made:.1f} s", flush=True)
    for job in sorted(waiting):
        record.leave(f"{' '.join(map(str, job[:4]))} (not compiled in {time.monotonic() - begun:.0f} s)")
    print(f"compiled ahead: {len(jobs) - len(waiting)} of {len(jobs)} jobs in {time.monotonic() - begun:.0f} s", flush=True)
    return {job[:3] for job in jobs} - refused - {job[:3] for job in waiting}


def refuse(record: Record, head_dim: int, causal: bool, name: str, text: str) -> None:
    """Say that a provider does not run: a failure if it is ours."""
    if name.startswith("flashtile"):
        record.fail(text, head_dim=head_dim, causal=causal, provider=name)
    else:
        print(f"{head_dim} {causal} {name}: {text}"[:400], flush=True)


def by_torch(causal: bool, arrays: Iterable[Any]) -> Calls:
    """The passes of flashtile from PyTorch, on the memory of JAX's arrays."""
    import torch

    import flashtile

    q, k, v, dout = (torch.from_dlpack(array) for array in arrays)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    kept = flashtile.attention(q, k, v, causal=causal)

    def forward() -> Any:
        with torch.no_grad():
            return flashtile.attention(q, k, v, causal=causal)

    def backward() -> Any:
        return torch.autograd.grad(kept, leaves, dout, retain_graph=True)

    def both() -> Any:
        out = flashtile.attention(q, k, v, causal=causal)
        return out, *torch.autograd.grad(out, leaves, dout)

    return Calls({"forward": forward, "backward": backward, "both": both}, lambda _: torch.cuda.synchronize())


def by_jax(name: str, function: Callable[..., Any], arrays: tuple[Any, ...]) -> Calls:
    """The passes of a provider's attention of JAX's arrays."""
    import jax

    q, k, v, dout = arrays
    made = programs(name, function)
    passes = {"forward": lambda: made["forward"](q, k, v), "both": lambda: made["both"](q, k, v, dout)}
    if "kept" in made:
        _, pull = made["kept"](q, k, v)
        passes["backward"] = lambda: made["backward"](pull, dout)
    return Calls(passes, jax.block_until_ready)


def measure(
    head_dim: int, causal: bool, names: Iterable[str], jax_triton: str | None, rounds: int, until: float, record: Record
) -> None:
    """The rows of a cell, by the clock."""
    import jax
    import jax.numpy as jnp

    arrays = arrays_of(head_dim)
    *part, dpart = (x[:1, :, :1].astype(jnp.float32) for x in arrays)
    with jax.default_matmul_precision("highest"):
        exact = programs("exact", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))
        truth = [jax.device_get(x) for x in exact["both"](*part, dpart)]
    found: dict[str, Calls] = {}
    for name in names:
        if time.monotonic() > until:
            record.leave(f"{head_dim} {causal} {name}")
            continue
        try:
            begun = time.perf_counter()
            if name == "flashtile/torch":
                calls = by_torch(causal, arrays)
            else:
                calls = by_jax(name, function_of(name, head_dim, causal, jax_triton), arrays)
            made = {which: call() for which, call in calls.passes.items()}
            calls.wait(made)
            taken = time.perf_counter() - begun
            off = max(largest_error(made["both"], truth), largest_error((made["forward"], *made.get("backward", ())), truth))
            if not off <= TOLERANCE:
                raise ArithmeticError(f"off by {off:.1e} of the norm")
        except Exception as error:
            refuse(record, head_dim, causal, name, f"{type(error).__name__}: {error}")
            continue
        print(f"{head_dim} {causal} {name}: ready in {taken:.1f} s, off by {off:.1e}", flush=True)
        found[name] = calls
    for which in PASSES:
        times = rotate(which, {name: calls for name, calls in found.items() if which in calls.passes}, rounds, until)
        for name, taken_ms in times.items():
            add(record, head_dim, causal, which, name, taken_ms)


def arrays_of(head_dim: int) -> tuple[Any, ...]:
    """q, k, v and dout of the cells of a head_dim."""
    import jax
    import jax.numpy as jnp

    shape = (BATCH, SEQLEN, heads(head_dim), head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.block_until_ready(jax.random.normal(key, shape).astype(jnp.bfloat16)) for key in keys)


def largest_error(made: Iterable[Any], truth: list[Any]) -> float:
    """The largest error, in the norm, of out alone or with dq, dk and dv; of the first item's first head."""
    import numpy as np

    def norm_of_error(m: Any, t: Any) -> float:
        first = m[:1, :, :1]
        first = first.detach().float().cpu().numpy() if hasattr(first, "detach") else np.asarray(first, np.float32)
        return float(np.linalg.norm(first - t) / np.linalg.norm(t))

    return max(norm_of_error(m, t) for m, t in zip(made, truth, strict=False))


def rotate(which: str, found: dict[str, Calls], rounds: int, until: float) -> dict[str, list[float]]:
    """Milliseconds of a pass by the clock, by provider, one burst of each per round, forth and back in turn."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    counts: dict[str, int] = {}
    for turn in range(rounds):
        for name, calls in list(found.items())[:: -1 if turn % 2 else 1]:
            calls.wait(calls.passes[which]())
            if name not in counts:  # the first calls after others were compiled are late
                counts[name] = max(2, min(BURST, int(BURST_MS / min(burst_ms(calls, which, 4) for _ in range(3)))))
            taken[name].append(burst_ms(calls, which, counts[name]))
        if turn and time.monotonic() > until:
            break
    return taken


def burst_ms(calls: Calls, which: str, count: int) -> float:
    """Milliseconds of a call by the clock, of so many one after another."""
    begun, made = time.perf_counter(), None
    for _ in range(count):
        made = calls.passes[which]()
    calls.wait(made)
    return (time.perf_counter() - begun) * 1000 / count


def measure_kernels(head_dim: int, causal: bool, rounds: int, record: Record) -> None:
    """The rows of a cell that say how long kernels of both front ends ran, by the profiler, in one rotation."""
    arrays = arrays_of(head_dim)
    ours = by_jax(FRONT_ENDS[0], function_of(FRONT_ENDS[0], head_dim, causal, None), arrays)
    front_ends = dict(zip(FRONT_ENDS, (ours, by_torch(causal, arrays)), strict=True))
    for which in PASSES:
        taken: dict[str, list[float]] = {name: [] for name in front_ends}
        for _ in range(rounds):
            for name, calls in front_ends.items():
                taken[name].append(kernels_ms(calls, which))
        for name, times in taken.items():
            row = dict(head_dim=head_dim, causal=causal, which=which, provider=name)
            record.add(dict(**row, kernels_ms=round(median(times), 4), least_kernels_ms=round(min(times), 4)))
            print(f"{head_dim:>4} {causal!s:5} {which:8} {name:18} {median(times):>9.4f} ms in kernels", flush=True)


def kernels_ms(calls: Calls, which: str) -> float:
    """Milliseconds in which kernels of a call ran, of a burst. Raises RuntimeError where the profiler sees none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    calls.wait(calls.passes[which]())
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        burst_ms(calls, which, BURST)
    profiler: Any = traced.profiler
    events = [e for e in profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    if not events:
        raise RuntimeError("the profiler sees no kernels")
    return sum(e.duration_ns() for e in events) * 1e-6 / BURST


def add(record: Record, head_dim: int, causal: bool, which: str, name: str, times: list[float]) -> None:
    """The row of a provider's times in milliseconds."""
    ms = median(times)
    speed = flops(head_dim, causal, which) / ms * 1e-9
    cell = dict(head_dim=head_dim, causal=causal, which=which, provider=name)
    record.add(dict(**cell, ms=round(ms, 4), least_ms=round(min(times), 4), tflops=round(speed, 1)))
    print(f"{head_dim:>4} {causal!s:5} {which:8} {name:18} {ms:>9.4f} ms {speed:>7.1f} TFLOP/s", flush=True)


def report(rows: list[dict[str, Any]]) -> None:
    """Per cell: times of the others over ours; the split backward's lead; JAX's kernels beside PyTorch's."""
    by, kernels = (
        {(r["head_dim"], r["causal"], r["which"], r["provider"]): r[unit] for r in rows if unit in r}
        for unit in ("ms", "kernels_ms")
    )
    for cell in CELLS:
        for which in PASSES:
            ours = by.get((*cell, which, "flashtile/auto"))
            others = [(name, by[(*cell, which, name)]) for name in PEERS if (*cell, which, name) in by]
            if ours is not None and others:
                told = ", ".join(f"{name} {ms / ours:.2f}" for name, ms in others)
                print(*cell, which, "over auto:", told, flush=True)
            jax_ms, torch_ms = (kernels.get((*cell, which, name)) for name in FRONT_ENDS)
            if jax_ms and torch_ms:
                print(*cell, which, f"kernels' time, JAX over PyTorch: {jax_ms / torch_ms:.3f}", flush=True)
        split = by.get((*cell, "backward", "flashtile/split"))
        for name, bar in SPLIT_BARS.items():
            theirs = by.get((*cell, "backward", name))
            if split and theirs:
                print(*cell, f"split backward: {theirs / split:.2f} x {name}'s, of {bar:g}", flush=True)


def gpu(parser: argparse.ArgumentParser) -> dict[str, str]:
    """JAX's GPU; ends with a usage error where there is none."""
    import jax

    try:
        return {"device": jax.devices("cuda")[0].device_kind}
    except RuntimeError as error:
        parser.error(f"JAX sees no GPU here: {error}")


class JaxAttention(Experiment[tuple[int, bool]]):
    """A cell is a head dim, full or causal: by the clock, then by the profiler where both front ends are asked for."""

    output, budget_s, gpu = "benchmarks/results/jax-attention.csv", 180, False  # JAX asks for the GPU
    everything: ClassVar = (*OURS, FRONT_ENDS[1], ORIGINAL, *PEERS)
    cache: ClassVar[tempfile.TemporaryDirectory[str] | None] = None  # of what JAX compiles, for all processes
    compiled: set[tuple[Any, ...]]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        known = list(cls.everything)
        parser.add_argument("--jax-triton", type=Path, metavar="FILE", help="jax-triton's attention.py, timed too")
        parser.add_argument(
            "--providers", nargs="+", choices=known, default=known, help="these alone; the rest take their time"
        )
        parser.add_argument("--rounds", type=at_least_one, default=6)
        parser.add_argument("--limit", type=positive, default=70.0, help="seconds for compiling; 70")

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int | None:
        if chosen.jax_triton and not chosen.jax_triton.exists():
            parser.error(f"{chosen.jax_triton} is not there")
        cls.cache = tempfile.TemporaryDirectory()
        os.environ |= {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes, and PyTorch, need memory too
            "JAX_COMPILATION_CACHE_DIR": cls.cache.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        chosen.device = gpu(parser)
        return None

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        self.original = str(chosen.jax_triton.resolve()) if chosen.jax_triton else None
        there = {ORIGINAL: self.original is not None, FRONT_ENDS[1]: importlib.util.find_spec("torch") is not None}
        self.names = [n for n in self.everything if n in chosen.providers and there.get(n, True)]
        self.both_front_ends = set(FRONT_ENDS) <= set(self.names)

    def about(self) -> dict[str, str]:
        return {**self.chosen.device, **{name: importlib.metadata.version(name) for name in ("jax", "triton")}}

    def machine(self) -> dict[str, str]:
        return provenance(self.chosen.commit)

    @contextmanager
    def begin(self, record: Record) -> Iterator[None]:
        jobs = [n for n in self.names if n not in (*TUNED, FRONT_ENDS[1])]
        slow_first = sorted(jobs, key=lambda n: n in OURS)
        self.compiled = compile_all(slow_first, self.original, self.chosen.limit, record)
        yield

    def cells(self) -> list[tuple[int, bool]]:
        return list(CELLS)

    def place(self, cell: tuple[int, bool]) -> dict[str, Any]:
        return dict(head_dim=cell[0], causal=cell[1], provider="all")

    def measure(self, cell: tuple[int, bool], record: Record, until: float) -> None:
        here = [n for n in self.names if n in (*TUNED, FRONT_ENDS[1]) or (*cell, n) in self.compiled]
        kept_s = KERNELS_S / len(CELLS) if self.both_front_ends else 0.0
        measure(*cell, here, self.original, self.chosen.rounds, until - kept_s, record)
        if self.both_front_ends:
            with record.attempt(**{**self.place(cell), "provider": "kernels of both front ends"}):
                measure_kernels(*cell, min(3, self.chosen.rounds), record)

    def report(self, record: Record) -> None:
        report(record.rows)


def main() -> int:
    return main_of(JaxAttention)


if __name__ == "__main__":
    sys.exit(main())
