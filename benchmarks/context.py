"""Attention over ranks beside one GPU: how much of n GPUs' speed n ranks reach, and beside torch's context_parallel.

python -m benchmarks.context --ranks 2                       starts two processes of this host
torchrun --nproc_per_node 2 -m benchmarks.context            joins those that there are

Of each sequence and window, forward and backward together: one process's time T1 on rank 0, while the others wait, and Tn of
every provider, the slowest rank's, in one rotation; medians over rounds. efficiency is T1 / (n Tn). together_ms is T1 of the
slowest rank while every one runs the whole: what lies between is the machine's. Shards are causal, in zigzag unless the
provider says contiguous, or documents, which is zigzag of each; of a window "allgather" fetches the halo alone. --packed adds
documents of unequal lengths, none above a quarter, beside one process's `attention_varlen`; --dropout chances, whose bits are
one process's. torch's SDPA gets the keys of all heads, since its context_parallel takes no grouped ones; it has causal order
alone, as has ring-flash-attn, which must be installed, and runs on flashtile's passes where flash_attn is not. Its llama3 has
contiguous shards, packed documents too, and gathers a head of keys at a time. Errors of out, dq, dk and dv are relative RMS
against one process's float32 of the same values, of at most CHECKED tokens; beside them one process's own. peak_bytes is what
the busiest rank holds at once, without the inputs; memory is that and the inputs, divided by what a rank cannot do without
(`needed_bytes`).

Rows are there after a cell's first round, and are written anew after each; what no time is left for by any rank's clock is
not begun. A time-out from outside must leave room for the start: two processes took 11 s of an H200's host to begin.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, spawn

import flashtile
import flashtile.compat
from benchmarks.experiment import Experiment, main_of, run_experiment
from benchmarks.record import STARTED, Record, at_least_one, sized
from flashtile.distributed import Context, attention, attention_varlen, shard, unshard

REPEATS, CHECKED = 4, 4096
WRONG = 5.0  # times one process's error: more than bf16 sums over 16 ranks cost (3.7), less than a wrong key does
METHODS = ("ulysses", "allgather", "allgather contiguous", "allgather documents", "ring")
TORCH = tuple(f"torch {rotate} {backend}" for rotate in ("allgather", "alltoall") for backend in ("cudnn", "flash"))
RING, LLAMA3 = "ring-flash-attn zigzag", "ring-flash-attn llama3"
PROVIDERS = (*METHODS, *TORCH, RING, LLAMA3)
NAMES = ("out", "dq", "dk", "dv")
Tensors = tuple[torch.Tensor, ...]
Step = Callable[[], Tensors]
SHARES = (0.25, 0.11, 0.25, 0.09, 0.25, 0.05)  # of a packed sequence, its documents'


@dataclass(frozen=True)
class Form:
    """What is asked besides causal order."""

    window: tuple[int, int] | None = None
    packed: bool = False
    dropout: float | None = None

    def told(self) -> dict[str, Any]:
        """Columns of a row."""
        return {
            "window": "" if self.window is None else self.window[0],
            "packed": "packed" if self.packed else "",
            "dropout": "" if self.dropout is None else self.dropout,
        }

    def starts(self, seqlen: int) -> list[int]:
        """Where documents begin, and the last one ends."""
        return [0, *(round(seqlen * sum(SHARES[: i + 1])) for i in range(len(SHARES)))] if self.packed else [0, seqlen]

    def tensor(self, whole: torch.Tensor) -> torch.Tensor:
        """The same of a tensor (batch, seqlen, ...), where it lies."""
        return torch.tensor(self.starts(whole.shape[1]), dtype=torch.int32, device=whole.device)

    def call(self, home: Callable[..., torch.Tensor], packed: Callable[..., torch.Tensor], seqlen: int, **how: Any) -> Any:
        """The function of q, k and v, of (batch, seqlen, heads, head_dim); home, packed: `attention` and `attention_varlen`."""
        how |= {"causal": True, "window": self.window}
        if self.dropout is not None:
            how["dropout"] = flashtile.Dropout(self.dropout, 59)
        if not self.packed:
            return lambda *qkv: home(*qkv, **how)

        starts = cache(
            lambda device: torch.tensor(self.starts(seqlen), dtype=torch.int32, device=device)
        )  # once, as loaders do

        def of_documents(*qkv: torch.Tensor) -> torch.Tensor:
            at, longest = starts(qkv[0].device), round(seqlen * max(SHARES)) + 1
            given = [t.squeeze(0) for t in qkv]  # whose gradients, unlike those of t[0], are no copies
            return packed(*given, at, at, max_seqlen_q=longest, max_seqlen_k=longest, **how)[None]

        return of_documents


def inputs(shape: str, seqlen: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """q, k, v and the gradient of out, alike on every rank. shape: batch x heads_q x heads_kv x head_dim."""
    batch, heads, heads_kv, head_dim = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    return tuple(
        torch.randn(batch, seqlen, n, head_dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for n in (heads, heads_kv, heads_kv, heads)
    )


def step(call: Callable[..., torch.Tensor], leaves: Tensors, dout: torch.Tensor) -> Step:
    """Forward and backward of `call`: (out, dq, dk, dv)."""

    def run() -> Tensors:
        out = call(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


def layout_of(name: str) -> Any:
    """How a provider's shards lie."""
    if name == LLAMA3:
        return "contiguous"
    return next((layout for layout in ("contiguous", "documents") if name.endswith(f" {layout}")), "zigzag")


@contextmanager
def made(name: str, given: Tensors, form: Form) -> Generator[Step]:
    """A provider's step with this rank's shards."""
    if name == RING:
        if form != Form():
            raise NotImplementedError("ring-flash-attn's zigzag knows no windows and no dropout, and is given no documents")
        *leaves, dout = (shard(t, Context(layout="zigzag")).requires_grad_(i < 3) for i, t in enumerate(given))
        zigzag = ring_flash_attn().zigzag_ring_flash_attn_func
        yield step(lambda *qkv: zigzag(*qkv, causal=True), tuple(leaves), dout)
        return
    if name == LLAMA3:
        if form not in (Form(), Form(packed=True)):
            raise NotImplementedError("ring-flash-attn's llama3 is measured without windows and dropout")
        *leaves, dout = (shard(t, Context()).requires_grad_(i < 3) for i, t in enumerate(given))
        starts = form.tensor(given[0])
        home = ring_flash_attn()
        about = home.llama3_flash_attn_prepare_cu_seqlens(starts, True, dist.get_rank(), dist.get_world_size())
        where = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"), about, strict=True))
        llama3 = home.llama3_flash_attn_varlen_func
        call = lambda *qkv: llama3(*(t.squeeze(0) for t in qkv), **where, heads_k_stride=1, causal=True)[None]  # noqa: E731
        yield step(call, tuple(leaves), dout)
        return
    if name not in TORCH:
        context = Context(method=name.split()[0], layout=layout_of(name), check="first")  # pyright: ignore[reportArgumentType]
        if context.layout == "documents" and not form.packed:
            raise NotImplementedError("layout 'documents' is measured with packed documents alone")
        starts = form.tensor(given[0])
        *leaves, dout = (shard(t, context, cu_seqlens=starts).requires_grad_(i < 3) for i, t in enumerate(given))
        yield step(form.call(attention, attention_varlen, given[0].shape[1], context=context), tuple(leaves), dout)
        return
    if form != Form():
        raise NotImplementedError("torch's context_parallel knows no windows, packed documents or dropout")
    home = importlib.import_module("torch.distributed.tensor.experimental._attention")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _, rotate, backend = name.split()
    home.set_rotate_method(rotate)
    group = given[0].shape[2] // given[1].shape[2]
    buffers = [t.repeat_interleave(group if i in (1, 2) else 1, 2).transpose(1, 2).contiguous() for i, t in enumerate(given)]
    mesh = init_device_mesh(given[0].device.type, (dist.get_world_size(),))
    kernel = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION
    with home.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        leaves = tuple(t.requires_grad_() for t in buffers[:3])
        run = step(lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True), leaves, buffers[3])

        def in_our_layout() -> Tensors:
            out, dq, *rest = (t.transpose(1, 2) for t in run())
            return out, dq, *(t.unflatten(2, (-1, group)).sum(3) for t in rest)

        with sdpa_kernel(kernel):
            yield in_our_layout


def ring_flash_attn() -> Any:
    """The package of that name, whose hooks into transformers are left out, on flash_attn or, without one, on our passes."""
    if importlib.util.find_spec("flash_attn") is None:
        flashtile.compat.install("flash_attn")
    hooks: Any = ModuleType("ring_flash_attn.adapters")
    hooks.substitute_hf_flash_attn = hooks.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", hooks)
    return importlib.import_module("ring_flash_attn")


def timed(run: Step, device: torch.device) -> float:
    """Milliseconds of a step on this rank."""
    run()
    wait(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        run()
    wait(device)
    return (time.perf_counter() - began) / REPEATS * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def held(run: Step, device: torch.device) -> float:
    """The most bytes that a step holds at once, besides what was there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        made = run()
        found = torch.cuda.max_memory_allocated(device) - before
        del made
        return found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        made = run()
    profiler: Any = record.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)


def needed_bytes(name: str, given: Tensors, ranks: int) -> float:
    """What a rank cannot do without: its share of q, k, v, out and their gradients, and what the method must gather beside
    them, with sums in float32. 0 of another library's methods, which are not ours to judge.
    """
    q, k, v, out = (t.nbytes / ranks for t in given)
    wide = 4 / given[0].itemsize
    gathered = {
        "allgather": ranks * (k + v) * (1 + wide),
        "ulysses": 2 * (q + out + (k + v) * max(ranks // given[1].shape[2], 1)),
        "ring": 2 * (k + v) * (1 + wide) + (q + out) * wide,
    }
    method = name.split()[0]
    return 2 * (q + k + v + out) + gathered[method] if method in gathered and name not in TORCH else 0


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    told = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def alone(given: Tensors, form: Form, **how: Any) -> Step:
    """One process's step with the whole sequence."""
    leaves = tuple(t.detach().requires_grad_() for t in given[:3])
    return step(form.call(flashtile.attention, flashtile.attention_varlen, given[0].shape[1], **how), leaves, given[3])


def errors(name: str, given: Tensors, form: Form) -> dict[str, float]:
    """Relative RMS of a provider, and of one process, against one process's float32."""
    true = alone(tuple(t.float() for t in given), form, options=flashtile.Options(precision="ieee"))()
    with made(name, given, form) as run:
        starts, context = form.tensor(given[0]), Context(layout=layout_of(name))
        ours = [unshard(t.contiguous(), context, cu_seqlens=starts) for t in run()]
    found: dict[str, float] = {}
    for prefix, tensors in (("error", ours), ("error_of_one", alone(given, form)())):
        for of, mine, exact in zip(NAMES, tensors, true, strict=True):
            found[f"{prefix}_{of}"] = float((mine.double() - exact.double()).norm() / exact.double().norm())
    for of in NAMES:
        ours_of, ones = found[f"error_{of}"], found[f"error_of_one_{of}"]
        if not ours_of <= WRONG * ones + 1e-6:
            raise ValueError(f"{of} is wrong: relative RMS {ours_of:.3g}, one process's {ones:.3g}")
    return found


def measure(
    names: list[str], given: Tensors, form: Form, rounds: int, left: Callable[[], float]
) -> Generator[dict[str, dict[str, Any]]]:
    """Of each provider, after every round: median times by then and their ratio, of turns one after the other, and the memory
    that a step takes. Rounds end when no time is left, but for the first.
    """
    device, whole = given[0].device, alone(given, form)
    one: list[float] = []
    together: list[float] = []
    many: dict[str, list[float]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0.0)
    for turn in range(rounds):
        if turn and left() <= 0:
            return
        dist.barrier()
        one.append(slowest(timed(whole, device) if dist.get_rank() == 0 else 0.0, device))
        if not together:
            together.append(slowest(timed(whole, device), device))
        for name in names:
            with made(name, given, form) as run:
                dist.barrier()
                many[name].append(slowest(timed(run, device), device))
                if not peak[name]:
                    peak[name] = slowest(held(run, device), device)
        first, ranks, plain = median(one), dist.get_world_size(), form in (Form(), Form(dropout=form.dropout))
        own = sum(t.nbytes for t in given)
        yield {
            name: {
                "one_ms": first,
                "together_ms": together[0],
                "ranks_ms": median(times),
                "efficiency": first / (ranks * median(times)),
                "peak_bytes": peak[name],
                "memory": (peak[name] + own / ranks) / needed if (needed := needed_bytes(name, given, ranks)) and plain else "",
            }
            for name, times in many.items()
        }


class Ranks(Experiment[tuple[int, Form]]):
    """A cell is a sequence's length and what is asked of it; every rank measures it, and the first writes the rows."""

    output, budget_s, gpu = "bench-output/context.csv", 600, False

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        many = [16384, 65536, 131072]
        parser.add_argument("--ranks", type=at_least_one, default=2, help="processes to start, without torchrun")
        parser.add_argument("--seqlens", nargs="+", type=at_least_one, default=many, help="of the whole sequence")
        parser.add_argument("--shape", type=sized(4), default="1x32x8x128", help="batch x heads of q x heads of k x head_dim")
        parser.add_argument("--windows", nargs="*", type=at_least_one, default=[], help="also with windows of so many keys")
        parser.add_argument("--packed", action="store_true", help="also with packed documents")
        parser.add_argument("--forms", action="store_true", help="only what --windows, --packed and --dropout add")
        parser.add_argument("--dropout", nargs="*", type=float, default=[], help="also with such chances of dropout")
        parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
        parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
        parser.add_argument("--rounds", type=at_least_one, default=5)

    @classmethod
    def check(cls, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        if "RANK" in os.environ:  # torchrun's
            return rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), chosen, "env://")
        with tempfile.TemporaryDirectory() as folder:
            meet = f"file://{Path(folder) / 'meet'}"
            try:
                spawn(rank_main, (chosen.ranks, chosen, meet), nprocs=chosen.ranks)
            except ProcessExitedException as ended:
                return ended.exit_code or 1
        return 0

    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))

    def cells(self) -> list[tuple[int, Form]]:
        forms = [Form()] * (not self.chosen.forms)
        forms += [*(Form((n, 0)) for n in self.chosen.windows), *[Form(packed=True)] * self.chosen.packed]
        forms += [Form(dropout=p) for p in self.chosen.dropout]
        return [(seqlen, form) for seqlen in self.chosen.seqlens for form in forms]

    def place(self, cell: tuple[int, Form]) -> dict[str, Any]:
        about = {"ranks": dist.get_world_size(), "shape": self.chosen.shape, "dtype": self.chosen.dtype, "seqlen": cell[0]}
        return about | cell[1].told()

    def measure(self, cell: tuple[int, Form], record: Record, until: float) -> None:
        chosen, device, (seqlen, form) = self.chosen, self.device(), cell
        short, given = (inputs(chosen.shape, n, getattr(torch, chosen.dtype), device) for n in (min(seqlen, CHECKED), seqlen))
        right: dict[str, dict[str, float]] = {}
        for name in chosen.providers:
            self.tell(f"{name}, {seqlen} tokens, {form}: checks {short[0].shape[1]} tokens, and compiles")
            with record.attempt(provider=name, **self.place(cell)):  # all ranks meet an error alike, or end in a time-out
                right[name] = errors(name, short, form)
        self.tell(f"{seqlen} tokens, {form}: compiles and is timed")
        first, rows = len(record.rows), list[dict[str, Any]]()
        for found in measure(list(right), given, form, chosen.rounds, lambda: self.left(record)):
            rows = [{"provider": name, **self.place(cell), **of, **right[name]} for name, of in found.items()]
            record.put(first, rows)
        if dist.get_rank() == 0:
            for row in rows:
                print(*(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()), flush=True)

    def tell(self, what: str) -> None:
        """Say what is waited for from now on."""
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - STARTED:.0f} s] {what}", file=sys.stderr, flush=True)

    def left(self, record: Record) -> float:
        """Seconds that every rank has left."""
        return -slowest(-record.left(), self.device())

    def run(self, record: Record) -> None:
        """Every cell for which all ranks have time: they go on together."""
        for cell in self.cells():
            if self.left(record) > 0:
                self.measure(cell, record, record.ends)
            else:
                record.leave(self.name(cell))


def rank_main(rank: int, ranks: int, chosen: Any, meet: str) -> int:
    """What every rank does: the exit status."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    elif ranks > 1:
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    if rank:
        chosen.output = Path(os.devnull)
    status = run_experiment(Ranks(chosen), chosen)
    if rank == 0 and status:
        raise SystemExit(status)
    dist.destroy_process_group()
    return 0


def main() -> int:
    return main_of(Ranks)


if __name__ == "__main__":
    sys.exit(main())
