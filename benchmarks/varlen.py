"""Varlen, padding and block masks on a GPU: poisoned cases, throughput beside the dense call, peers on the same problem.

    python benchmarks/varlen.py [--output FILE] [--budget 240] [--section poison varlen tiles build blocks] [--backend hopper]
        [--tokens 8192]

Sections, each with its share of the budget, each compiled in parallel processes and checked before it is timed:
  poison   NaN and Inf where nothing is visible (padding, holes, past cu_seqlens[-1]): results bitwise those of clean tensors
  varlen   64 lognormal lengths, mean 1k, at most 16k: TFLOP/s beside the same backend's dense call, SDPA on jagged tensors,
           FlexAttention with a document mask, FlashAttention-4's varlen call where it can be imported
  tiles    the same lengths on Hopper's forward with other tiles and schedules
  build    the block lists of 64k x 64k from a document predicate: milliseconds and peak memory
  blocks   random 128 x 128 blocks at 0, 50, 80, 95 % sparsity, of so many tokens each: out and gradients of a head against
           float64, then the speed-up over dense forward, backward and both, beside FlexAttention with the same blocks. What
           each query is sure to see is the first block or, "diagonal", its own; documents of 600 tokens have blocks that
           are visible in part
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from benchmarks.experiment import Experiment, main_of
from benchmarks.poisoned import DEVICE, KINDS, one_poisoned, starts, tokens
from benchmarks.processes import Failure, compile_ahead, in_processes
from benchmarks.record import Record, at_least_one, is_lost
from flashtile import Blocks, Document, Options
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.kernels.sm90.backend import BACKEND as HOPPER
from flashtile.kernels.sm90.host import choose_forward as choose
from flashtile.problem.attention import AttentionProblem
from flashtile.reference.attention import attention_reference
from flashtile.torch.execute.bound import Bound, device_of

HEADS, HEAD_DIM, BLOCK = 16, 128, 128
DENSE = 4096  # tokens of each item of the dense call that varlen is compared with
ROUNDS = 3  # bursts of each call, in rotation; the median is kept
POISONED_PER_KIND = 75


@dataclass
class Row:
    """One measurement, or one check."""

    section: str
    name: str
    direction: str = ""
    ms: float | None = None
    tflops: float | None = None
    ratio: float | None = None  # what of it, `of` says
    of: str = ""
    note: str = ""
    failure: str = ""


@dataclass
class Run:
    """What the sections share. `backend`: the one that is measured; None lets the library choose."""

    record: Record
    backend: str | None
    tokens: tuple[int, ...]  # of the section `blocks`
    ends: float = math.inf  # of the section, by time.monotonic

    def left(self) -> float:
        """Seconds until the section has to end."""
        return min(self.ends - time.monotonic(), self.record.left())

    @property
    def word(self) -> str:
        return self.backend or "chosen"


def lognormal_lengths(count: int = 64, mean: float = 1024.0, most: int = 16384, seed: int = 0) -> list[int]:
    """Lengths whose logarithm is normal with standard deviation 1, scaled to the mean and cut at the most."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.exp(torch.randn(count, generator=generator, dtype=torch.float64))
    return [max(1, min(most, round(n))) for n in (raw / raw.mean() * mean).tolist()]


def flops(lengths: list[int], causal: bool, backward: bool) -> float:
    """Matrix FLOPs on visible scores: 2 products forward, 5 backward."""
    pairs = sum(n * (n + 1) / 2 if causal else n * n for n in lengths)
    return 2.0 * pairs * HEADS * HEAD_DIM * (5 if backward else 2)


# -- timing -----------------------------------------------------------------------------------------------------------


def timed(calls: dict[str, Callable[[], Any]], run: Run) -> dict[str, float]:
    """Milliseconds of each call, by name: bursts in rotation, the median. Ours that raises is a failed row."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        if run.left() < 0:
            run.record.leave(name)
            continue
        try:
            call()  # compiles
            counts[name] = calls_for(burst_ms(call, 3, DEVICE, 0.0), DEVICE)
        except Exception as error:
            left_out(run, name, error)
    found: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(ROUNDS):
        for name, count in counts.items():
            found[name].append(burst_ms(calls[name], count, DEVICE))
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def left_out(run: Run, name: str, error: Exception) -> None:
    """Say that a peer cannot; ours that cannot is a failed row."""
    if is_peer(name) and not is_lost(error):
        print(f"    {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    else:
        run.record.fail(error, name=name)


def is_peer(name: str) -> bool:
    return name.startswith(("sdpa", "flex", "fa4"))


def directions(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The forward, the backward of a graph that is kept, and both, as calls without arguments."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    kept: dict[str, Any] = {}

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def backward() -> None:
        if not kept:
            kept["out"] = attend(*leaves)
            kept["dout"] = torch.randn_like(kept["out"])
        torch.autograd.grad(kept["out"], leaves, kept["dout"], retain_graph=True)

    def both() -> None:
        out = attend(*leaves)
        if "other" not in kept:
            kept["other"] = torch.randn_like(out)
        torch.autograd.grad(out, leaves, kept["other"])

    return {"fwd": forward, "bwd": backward, "both": both}


def worst(mine: torch.Tensor, truth: torch.Tensor) -> float:
    return (mine.double() - truth).abs().max().item()


# -- poison -----------------------------------------------------------------------------------------------------------


def poison(run: Run) -> Iterator[Row]:
    """Random lengths and holes; everything outside of them is NaN, Inf or -Inf."""
    jobs = [(kind, seed, run.backend) for seed in range(POISONED_PER_KIND) for kind in KINDS]
    failed: dict[str, list[str]] = {kind: [] for kind in KINDS}
    done = dict.fromkeys(KINDS, 0)
    for (kind, seed, _), made in in_processes(one_poisoned, jobs, run.ends):
        done[kind] += 1
        if made is not False:
            failed[kind].append(f"seed {seed}: {made.text if isinstance(made, Failure) else 'other results'}")
    for kind in KINDS:
        if done[kind] < POISONED_PER_KIND:
            run.record.leave(f"{POISONED_PER_KIND - done[kind]} of poison {kind}")
        text = "; ".join(failed[kind])[:500]
        yield Row("poison", kind, ratio=len(failed[kind]), of=f"failures of {done[kind]}", failure=text)


# -- varlen -----------------------------------------------------------------------------------------------------------


PEERS = ("sdpa nested", "flex document", "fa4 varlen")
Contestant = tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[int]]  # the function, its q, k, v, and its lengths


def varlen_names(word: str) -> tuple[str, ...]:
    return (f"flashtile/{word} varlen", f"flashtile/{word} dense {DENSE}", *PEERS)


def contestant(name: str, causal: bool, backend: str | None, lengths: list[int], qkv: list[torch.Tensor]) -> Contestant:
    """One of `varlen_names`; it may compile."""
    ends, longest, ours = starts(lengths), max(lengths), Options(backend=backend)
    if name in PEERS:
        make = {"sdpa nested": sdpa_nested, "flex document": flex_document, "fa4 varlen": fa4_varlen}[name]
        return make(ends, longest, lengths, causal), qkv, lengths
    if name.endswith("varlen"):
        return lambda q, k, v: flashtile.attention_varlen(q, k, v, ends, causal=causal, options=ours), qkv, lengths
    batch = max(1, round(sum(lengths) / DENSE))
    dense = [tokens(batch, DENSE, HEADS, HEAD_DIM) for _ in range(3)]
    return lambda q, k, v: flashtile.attention(q, k, v, causal=causal, options=ours), dense, [DENSE] * batch


def warm_varlen(name: str, causal: bool, backend: str | None, direction: str) -> None:
    lengths = lognormal_lengths()
    attend, inputs, _ = contestant(
        name, causal, backend, lengths, [tokens(sum(lengths), HEADS, HEAD_DIM) for _ in range(3)]
    )  # fmt: skip
    directions(attend, inputs)[direction]()
    torch.cuda.synchronize()


def varlen(run: Run) -> Iterator[Row]:
    lengths = lognormal_lengths()
    total, ends = sum(lengths), starts(lengths)
    print(f"  {len(lengths)} items, {total} tokens, longest {max(lengths)}, shortest {min(lengths)}", flush=True)
    qkv, names = [tokens(total, HEADS, HEAD_DIM) for _ in range(3)], varlen_names(run.word)
    jobs = [(name, causal, run.backend, way) for way in ("fwd", "bwd") for causal in (True, False) for name in names]
    compile_ahead(warm_varlen, jobs, run.left(), 0.4)
    for causal in (True, False):
        calls: dict[str, Contestant] = {}
        for name in names:
            try:
                calls[name] = contestant(name, causal, run.backend, lengths, qkv)
            except Exception as error:
                left_out(run, name, error)
        check_varlen(calls, ends, lengths, causal, run)
        for direction in ("fwd", "bwd"):
            made = {name: directions(attend, inputs)[direction] for name, (attend, inputs, _) in calls.items()}
            found = timed(made, run)
            rates = {n: flops(calls[n][2], causal, direction == "bwd") / ms / 1e9 for n, ms in found.items()}
            dense = rates.get(names[1])
            for name, ms in found.items():
                ratio = rates[name] / dense if dense else None
                mask = "causal" if causal else "full"
                yield Row("varlen", f"{name}, {mask}", direction, ms, rates[name], ratio, "TFLOP/s of our dense call")


def check_varlen(calls: dict[str, Contestant], ends: torch.Tensor, lengths: list[int], causal: bool, run: Run) -> None:
    """Our output beside float64 on the shortest items, and the peers' beside ours; what is wrong is not timed."""
    mine: torch.Tensor | None = None
    for name, (attend, inputs, _) in list(calls.items()):
        try:
            out = attend(*inputs)
            if mine is None:
                for i in sorted(range(len(lengths)), key=lambda i: lengths[i])[:5]:
                    part = slice(int(ends[i]), int(ends[i + 1]))
                    off = worst(out[part], attention_reference(*(t[None, part] for t in inputs), causal=causal)[0][0])
                    if not off < 2e-2:
                        raise ArithmeticError(f"item {i} is off by {off:.3g}")
                mine = out
            elif is_peer(name):
                off = worst(out.reshape(mine.shape), mine.double())
                if not off < 3e-2:
                    raise ArithmeticError(f"off by {off:.3g}")
        except Exception as error:
            left_out(run, name, error)
            del calls[name]
            if mine is None:  # nothing to hold the others against
                return


def sdpa_nested(ends: torch.Tensor, longest: int, lengths: list[int], causal: bool) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        jagged = [
            torch.nested.nested_tensor_from_jagged(t, ends.long(), max_seqlen=longest, min_seqlen=min(lengths)).transpose(1, 2)
            for t in (q, k, v)
        ]
        return F.scaled_dot_product_attention(*jagged, is_causal=causal).transpose(1, 2).values()

    return attend


def flex_document(ends: torch.Tensor, longest: int, lengths: list[int], causal: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    total = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), torch.tensor(lengths, device=DEVICE))

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = ids[q] == ids[k]
        return same & (q >= k) if causal else same

    mask = torch.compile(create_block_mask)(visible, None, None, total, total, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(*(t[None].transpose(1, 2) for t in (q, k, v)), block_mask=mask).transpose(1, 2)[0]


def fa4_varlen(ends: torch.Tensor, longest: int, lengths: list[int], causal: bool) -> Callable[..., torch.Tensor]:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = function(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=causal
        )
        return made[0] if isinstance(made, tuple) else made

    return attend


TILED = [(head_dim, mask) for head_dim in (128, 64) for mask in ("", ",band=:0")]
MOST_TILES = 6


def tile_calls(head_dim: int, mask: str) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    """Hopper's forward under the chosen launch, then under others, by its spelling."""
    lengths = lognormal_lengths()
    total, ends, longest = sum(lengths), starts(lengths), max(lengths)
    q, k, v = (tokens(1, total, HEADS, head_dim) for _ in range(3))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    sizes = f"q={len(lengths)}x{longest}x{HEADS}x{head_dim},kv={longest}x{HEADS}x{head_dim}"
    problem = AttentionProblem.parse(f"attention({sizes},bf16{mask},varlen={total}x{total})")
    base = choose.choose_forward(problem, device_of(DEVICE))
    launches = [base, *(replace(base, swizzle=n) for n in (1, 4, 16) if n != base.swizzle)]
    known = (replace(one, resident=True, swizzle=base.swizzle) for one, _ in choose.options(problem)[choose.is_causal(problem)])
    launches += [launch for launch in known if launch != base]
    launches += [replace(base, groups=2, stages=4, loader_warps=4)] if head_dim == 64 else []
    bounds = {launch.spell(): Bound(HOPPER.forward(problem, device_of(DEVICE), launch), given, DEVICE) for launch in launches}
    return [(name, lambda bound=bound: bound.run(dict(given))["out"]) for name, bound in bounds.items()]


def warm_tile(head_dim: int, mask: str, number: int) -> None:
    for _, call in tile_calls(head_dim, mask)[number : number + 1]:
        call()
    torch.cuda.synchronize()


def tiles(run: Run) -> Iterator[Row]:
    """Hopper's forward under other launches, each checked against the chosen one's result."""
    compile_ahead(warm_tile, [(*tiled, number) for tiled in TILED for number in range(MOST_TILES)], run.left(), 0.5)
    for head_dim, mask in TILED:
        calls: dict[str, Callable[[], Any]] = {}
        expected: torch.Tensor | None = None
        for name, call in tile_calls(head_dim, mask):
            with run.record.attempt(section="tiles", name=f"{head_dim}{mask} {name}"):
                out = call()
                expected = out if expected is None else expected
                if not worst(out, expected.double()) <= 1e-2:
                    raise ArithmeticError("another result")
                calls[name] = call
        for name, ms in timed(calls, run).items():
            rate = flops(lognormal_lengths(), bool(mask), False) * head_dim / HEAD_DIM / ms / 1e9
            yield Row("tiles", f"{head_dim}{mask} {name}", "fwd", ms, rate)


# -- blocks -----------------------------------------------------------------------------------------------------------


def build(run: Run) -> Iterator[Row]:
    seqlen = 65536
    ids = (torch.arange(seqlen, device=DEVICE) // 3000).to(torch.int32)

    def make() -> Blocks:
        return Blocks.build(Document(ids), seqlen, seqlen)

    made = make()
    expected = torch.zeros_like(made.state)
    first, last = ids[::BLOCK], ids[BLOCK - 1 :: BLOCK]
    meets = (first[:, None] <= last[None]) & (last[:, None] >= first[None])
    whole = (first == last)[:, None] & (first == last)[None] & (first[:, None] == first[None])
    expected[0, 0] = meets.to(torch.int8) + whole.to(torch.int8)
    wrong = int((made.state != expected).sum())
    failure = f"{wrong} blocks wrong" if wrong else ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for ms in timed({"build": make}, run).values():
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        yield Row("build", "document 64k x 64k", ms=ms, ratio=peak, of="MiB at the peak", failure=failure)


DOCUMENT = 600
TABLES = ("0%", "50%", "80%", "95%", "80% diagonal", "95% diagonal")


def block_table(name: str, seqlen: int) -> torch.Tensor:
    """Which blocks of keys each block of queries sees, the first one, or its own, always: bool (blocks, blocks)."""
    rows, generator = seqlen // BLOCK, torch.Generator().manual_seed(1)
    table = torch.rand((rows, rows), generator=generator) >= float(name.split("%")[0]) / 100
    if name.endswith("diagonal"):
        return table.fill_diagonal_(True)
    table[:, 0] = True
    return table


def document_ids(seqlen: int) -> torch.Tensor:
    return (torch.arange(seqlen, device=DEVICE) // DOCUMENT).to(torch.int32)


def seen_scores(name: str, seqlen: int) -> torch.Tensor:
    """Which scores a mask of these names shows: bool (seqlen, seqlen)."""
    if name == "documents":
        return document_ids(seqlen)[:, None] == document_ids(seqlen)
    return block_table(name, seqlen).to(DEVICE).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def block_call(name: str, backend: str | None, seqlen: int) -> Callable[..., torch.Tensor]:
    """ "dense", "flashtile documents", "flashtile 50%" or "flex 50%"."""
    options = Options(backend=backend)
    if name == "dense":
        return lambda q, k, v: flashtile.attention(q, k, v, options=options)
    who, _, mask_name = name.partition(" ")
    if mask_name == "documents":
        listed = Blocks.build(Document(document_ids(seqlen)), seqlen, seqlen)
        return lambda q, k, v: flashtile.attention(q, k, v, mask=listed, options=options)
    table = block_table(mask_name, seqlen)
    if who == "flashtile":
        mask = Blocks.from_block_mask(table.to(DEVICE), seqlen, seqlen)
        return lambda q, k, v: flashtile.attention(q, k, v, mask=mask, options=options)
    import torch._functorch.config as donates
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    donates.donated_buffer = False  # `directions` keeps the graph
    compiled = torch.compile(flex_attention)
    count = table.sum(1).to(DEVICE, torch.int32)[None, None]
    index = (~table).to(torch.int8).argsort(dim=1, stable=True).to(DEVICE, torch.int32)[None, None]
    flex = BlockMask.from_kv_blocks(torch.zeros_like(count), index, count, index, BLOCK_SIZE=BLOCK)
    return lambda q, k, v: compiled(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=flex).transpose(1, 2)


def warm_blocks(name: str, backend: str | None, seqlen: int, direction: str) -> None:
    inputs = [tokens(1, seqlen, HEADS, HEAD_DIM) for _ in range(3)]
    directions(block_call(name, backend, seqlen), inputs)[direction]()
    torch.cuda.synchronize()


def worst_of_a_head(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor, keep: torch.Tensor
) -> float:
    """The largest error of a head's out, dq, dk and dv, each relative to its largest element."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves)
    mine = [out, *torch.autograd.grad(out, leaves, dout)]
    exact = [t[0, :, 1].detach().double().requires_grad_() for t in inputs]
    scores = (exact[0] @ exact[1].T / math.sqrt(HEAD_DIM)).masked_fill(~keep, -math.inf)
    truth = torch.softmax(scores, -1) @ exact[2]
    truths = [truth, *torch.autograd.grad(truth, exact, dout[0, :, 1].double())]
    return max(worst(a[0, :, 1].detach(), b.detach()) / b.abs().max().item() for a, b in zip(mine, truths, strict=True))


def blocks(run: Run) -> Iterator[Row]:
    named = ("dense", "flashtile 50%", "flashtile documents", "flex 50%")
    jobs = [(name, run.backend, seqlen, way) for seqlen in run.tokens for name in named for way in ("fwd", "bwd")]
    compile_ahead(warm_blocks, jobs, run.left(), 0.5)
    for seqlen in run.tokens:
        yield from blocks_of(run, seqlen)


def blocks_of(run: Run, seqlen: int) -> Iterator[Row]:
    """The rows of a sequence length."""
    q, k, v, dout = (tokens(1, seqlen, HEADS, HEAD_DIM) for _ in range(4))
    calls, kept = {"dense": block_call("dense", run.backend, seqlen)}, {"dense": 1.0}
    for mask_name in ("documents", *TABLES):
        keep = seen_scores(mask_name, seqlen)
        for name in (f"flashtile {mask_name}", *(f"flex {mask_name}" for _ in range(mask_name != "documents"))):
            kept[name] = keep.float().mean().item()
            try:
                call = block_call(name, run.backend, seqlen)
                error = worst_of_a_head(call, [q, k, v], dout, keep)
                print(f"    {seqlen} {name}: out and gradients are off by {error:.3g} of their largest elements", flush=True)
                if not error < 2e-2:
                    raise ArithmeticError(f"off by {error:.3g}")
                calls[name] = call
            except Exception as failure:
                left_out(run, name, failure)
    for direction, passes in (("fwd", (False,)), ("bwd", (True,)), ("both", (False, True))):
        found = timed({name: directions(attend, [q, k, v])[direction] for name, attend in calls.items()}, run)
        for name, ms in found.items():
            rate = sum(flops([seqlen], False, backward) for backward in passes) * kept[name] / ms / 1e9
            ideal = found["dense"] * kept[name] / ms if "dense" in found else None
            yield Row("blocks", name, direction, ms, rate, ideal, "the ideal speed-up over dense", f"{seqlen} tokens")


SECTIONS = {"poison": poison, "varlen": varlen, "tiles": tiles, "build": build, "blocks": blocks}


class Varlen(Experiment[str]):
    """A cell is a section."""

    output, budget_s = "bench-output/varlen.csv", 240

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
        parser.add_argument("--backend", choices=["triton", "hopper", "chosen"], default="chosen")
        parser.add_argument("--tokens", nargs="+", type=at_least_one, default=[8192, 32768], help="of the section blocks")

    def cells(self) -> list[str]:
        return self.chosen.section

    def place(self, cell: str) -> dict[str, str]:
        return dict(section=cell, name="the section")

    def measure(self, cell: str, record: Record, until: float) -> None:
        backend = None if self.chosen.backend == "chosen" else self.chosen.backend
        run = Run(record, backend, tuple(self.chosen.tokens), until)
        print(cell, flush=True)
        for row in SECTIONS[cell](run):
            record.add({**vars(row), "backend": run.word})
            print("  ", *(v if not isinstance(v, float) else f"{v:.4g}" for v in vars(row).values()), flush=True)


def main() -> int:
    return main_of(Varlen)


if __name__ == "__main__":
    sys.exit(main())
