"""Varlen, padding and block masks on a GPU: poisoned cases, throughput beside the dense call, peers on the same problem.

    python benchmarks/varlen.py [--output FILE] [--seconds 150] [--section poison varlen tiles build blocks] [--backend hopper]

Sections, each bounded in seconds, each checked before it is timed:
  poison   NaN and Inf where nothing is visible (padding, holes, past cu_seqlens[-1]): results bitwise those of clean tensors
  varlen   64 lognormal lengths, mean 1k, at most 16k: TFLOP/s beside the same backend's dense call, SDPA on jagged tensors,
           FlexAttention with a document mask, FlashAttention-4's varlen call where it can be imported
  tiles    the same lengths on Hopper's forward with other tiles and schedules
  build    the block lists of 64k x 64k from a document predicate: milliseconds and peak memory
  blocks   random 128 x 128 blocks at 0, 50, 80, 95 % sparsity: speed-up over dense, beside FlexAttention with the same blocks
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from flashtile import Blocks, Document, KeyPadding, Options
from flashtile.bench.machine import facts
from flashtile.bench.timing import burst_ms, calls_for
from flashtile.reference.attention import attention_reference

HEADS, HEAD_DIM, BLOCK = 16, 128, 128
ROUNDS = 3  # bursts of each call, in rotation; the median is kept
POISONED_PER_KIND = 75
DEVICE = torch.device("cuda", 0)
BACKEND: list[str | None] = ["triton"]  # that is measured; None lets the library choose


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


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def lognormal_lengths(count: int = 64, mean: float = 1024.0, most: int = 16384, seed: int = 0) -> list[int]:
    """Lengths whose logarithm is normal with standard deviation 1, scaled to the mean and cut at the most."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.exp(torch.randn(count, generator=generator, dtype=torch.float64))
    return [max(1, min(most, round(n))) for n in (raw / raw.mean() * mean).tolist()]


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def flops(lengths: list[int], causal: bool, backward: bool) -> float:
    """Matrix FLOPs on visible scores: 2 products forward, 5 backward."""
    pairs = sum(n * (n + 1) / 2 if causal else n * n for n in lengths)
    return 2.0 * pairs * HEADS * HEAD_DIM * (5 if backward else 2)


# -- timing -----------------------------------------------------------------------------------------------------------


def timed(calls: dict[str, Callable[[], Any]], deadline: float) -> dict[str, float]:
    """Milliseconds of each call, by name: bursts in rotation, the median; those that raise are left out and said."""
    counts: dict[str, int] = {}
    for name, call in calls.items():
        if time.monotonic() > deadline:
            print(f"    {name}: no time left", flush=True)
            continue
        try:
            call()  # compiles
            counts[name] = calls_for(burst_ms(call, 3, DEVICE, 0.0), DEVICE)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(ROUNDS):
        for name, count in counts.items():
            found[name].append(burst_ms(calls[name], count, DEVICE))
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def directions(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The forward, and the backward of a graph that is kept, as calls without arguments."""
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

    return {"fwd": forward, "bwd": backward}


def worst(mine: torch.Tensor, truth: torch.Tensor) -> float:
    return (mine.double() - truth).abs().max().item()


# -- poison -----------------------------------------------------------------------------------------------------------


def poison(deadline: float) -> Iterator[Row]:
    """Random lengths and holes; everything outside of them is NaN, Inf or -Inf."""
    kinds = ["varlen", "varlen-causal", "varlen-used-softcap", "padded-causal", "padded-keys", "holes", "documents"]
    for kind in kinds:
        failed, done = 0, 0
        for seed in range(POISONED_PER_KIND):
            if time.monotonic() > deadline:
                break
            failed += not one_poisoned(kind, seed)
            done += 1
        yield Row("poison", kind, ratio=failed, of=f"failures of {done}", note="" if done == POISONED_PER_KIND else "no time")


def one_poisoned(kind: str, seed: int) -> bool:
    """Whether the results of a poisoned case are bitwise those of the clean one."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    value = (math.nan, math.inf, -math.inf)[seed % 3]
    options = Options(backend=BACKEND[0], deterministic=True)
    how: dict[str, Any] = {"options": options, "return_lse": True}
    if kind.startswith("varlen"):
        lengths = (torch.rand(6, generator=draw) ** 3 * 500).long().tolist()
        total, rows = sum(lengths) + 70, torch.zeros(sum(lengths) + 70, dtype=torch.bool)
        rows[: sum(lengths)] = True
        how.update(cu_seqlens_q=starts(lengths), causal="causal" in kind)
        if "used" in kind:
            used = [int(n * torch.rand(1, generator=draw).item()) for n in lengths]
            how.update(seqused_k=torch.tensor(used, device=DEVICE, dtype=torch.int32), score=(flashtile.Softcap(20.0),))
            keys = torch.zeros_like(rows)
            for first, count in zip(starts(lengths).tolist(), used, strict=False):
                keys[first : first + count] = True
        else:
            keys = rows
        shape_q, shape_k, function = (total, 4, 64), (total, 2, 64), flashtile.attention_varlen
    else:
        batch, seqlen = 3, 200 + int(torch.randint(0, 200, (1,), generator=draw))
        rows, keys = torch.ones(batch, seqlen, dtype=torch.bool), torch.ones(batch, seqlen, dtype=torch.bool)
        used = torch.randint(0, seqlen + 1, (batch,), generator=draw)
        inside = torch.arange(seqlen) < used[:, None]
        if kind == "padded-causal":
            rows = keys = inside
            how.update(seqused_q=used.to(DEVICE, torch.int32), seqused_k=used.to(DEVICE, torch.int32), causal=True)
        elif kind == "padded-keys":
            keys = inside
            how["seqused_k"] = used.to(DEVICE, torch.int32)
        elif kind == "holes":
            keys = torch.rand(batch, seqlen, generator=draw) < 0.5
            how["mask"] = KeyPadding(keys.to(DEVICE))
        else:  # keys of a document that no query has
            ids = torch.randint(0, 5, (batch, seqlen), generator=draw).to(torch.int32)
            keys = ids < 3
            how["mask"] = Document((ids % 3).to(DEVICE), ids.to(DEVICE))
        shape_q, shape_k, function = (batch, seqlen, 4, 64), (batch, seqlen, 2, 64), flashtile.attention
    rows, keys = rows.to(DEVICE), keys.to(DEVICE)
    q, k, v, dout = tokens(*shape_q), tokens(*shape_k), tokens(*shape_k), tokens(*shape_q)
    results: list[list[torch.Tensor]] = []
    for dirty in (False, True):
        leaves = [t.clone() for t in (q, k, v)]
        arriving = dout.clone()
        if dirty:
            leaves[0][~rows] = value
            leaves[1][~keys] = value
            leaves[2][~keys] = value
            arriving[~rows] = value
        leaves = [t.requires_grad_() for t in leaves]
        out, lse = function(*leaves, **how)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, arriving)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- varlen -----------------------------------------------------------------------------------------------------------


def varlen(deadline: float) -> Iterator[Row]:
    lengths = lognormal_lengths()
    total, ends, longest = sum(lengths), starts(lengths), max(lengths)
    print(f"  {len(lengths)} items, {total} tokens, longest {longest}, shortest {min(lengths)}", flush=True)
    q, k, v = (tokens(total, HEADS, HEAD_DIM) for _ in range(3))
    ours, word = Options(backend=BACKEND[0]), BACKEND[0] or "chosen"
    for causal in (True, False):
        calls: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[int]]] = {}
        calls[f"flashtile/{word} varlen"] = (
            lambda q, k, v, causal=causal: flashtile.attention_varlen(q, k, v, ends, causal=causal, options=ours),
            [q, k, v], lengths,
        )  # fmt: skip
        batch = max(1, round(total / 4096))
        calls[f"flashtile/{word} dense 4096"] = (
            lambda q, k, v, causal=causal: flashtile.attention(q, k, v, causal=causal, options=ours),
            [tokens(batch, 4096, HEADS, HEAD_DIM) for _ in range(3)], [4096] * batch,
        )  # fmt: skip
        for name, make in (("sdpa nested", sdpa_nested), ("flex document", flex_document), ("fa4 varlen", fa4_varlen)):
            try:
                calls[name] = (make(ends, longest, lengths, causal), [q, k, v], lengths)
            except Exception as error:
                print(f"    {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        yield from check_varlen(calls, ends, lengths, causal)
        for direction in ("fwd", "bwd"):
            made = {name: directions(attend, inputs)[direction] for name, (attend, inputs, _) in calls.items()}
            found = timed(made, deadline)
            rates = {n: flops(calls[n][2], causal, direction == "bwd") / ms / 1e9 for n, ms in found.items()}
            dense = rates.get(f"flashtile/{word} dense 4096")
            for name, ms in found.items():
                ratio = rates[name] / dense if dense else None
                mask = "causal" if causal else "full"
                yield Row("varlen", f"{name}, {mask}", direction, ms, rates[name], ratio, "TFLOP/s of our dense call")


def check_varlen(calls: dict[str, Any], ends: torch.Tensor, lengths: list[int], causal: bool) -> Iterator[Row]:
    """Our output beside float64 on the shortest items, and the peers' beside ours; a wrong one is not timed."""
    attend, inputs, _ = next(iter(calls.values()))
    mine = attend(*inputs)
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i])[:5]:
        part = slice(int(ends[i]), int(ends[i + 1]))
        truth, _ = attention_reference(*(t[None, part] for t in inputs), causal=causal)
        assert worst(mine[part], truth[0]) < 2e-2, f"item {i} is wrong"
    for name in [n for n in calls if not n.startswith("flashtile")]:
        try:
            error = worst(calls[name][0](*inputs).reshape(mine.shape), mine.double())
        except Exception as failure:
            error, reason = math.inf, f"{type(failure).__name__}: {str(failure)[:150]}"
            print(f"    {name}: {reason}", flush=True)
        if not error < 3e-2:
            yield Row("varlen", name, note=f"left out, off by {error:.3g}")
            del calls[name]


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


def tiles(deadline: float) -> Iterator[Row]:
    """Hopper's forward under other launches, each checked against the chosen one's result."""
    from dataclasses import replace

    from flashtile.kernels.hopper.backend import BACKEND as HOPPER
    from flashtile.kernels.hopper.choose import choose_forward
    from flashtile.spec.attention import AttentionProblem
    from flashtile.torch.run import Bound, device_of

    lengths = lognormal_lengths()
    total, ends, longest = sum(lengths), starts(lengths), max(lengths)
    for head_dim in (128, 64):
        q, k, v = (tokens(1, total, HEADS, head_dim) for _ in range(3))
        given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        sizes = f"q={len(lengths)}x{longest}x{HEADS}x{head_dim},kv={longest}x{HEADS}x{head_dim}"
        for mask in ("", ",band=:0"):
            problem = AttentionProblem.parse(f"attention({sizes},bf16{mask},varlen={total}x{total})")
            base = choose_forward(problem, device_of(DEVICE))
            launches = [base, *(replace(base, swizzle=n) for n in (1, 4) if n != base.swizzle)]
            launches += [replace(base, resident=True, swizzle=n) for n in (16, 4)]
            launches += [replace(base, groups=2, stages=4, split_max=False, loader_warps=4)] if head_dim == 64 else []
            calls: dict[str, Callable[[], Any]] = {}
            expected: torch.Tensor | None = None
            for launch in launches:
                bound = Bound(HOPPER.forward(problem, device_of(DEVICE), launch), given, DEVICE)
                out = bound.run(dict(given))["out"]
                expected = out if expected is None else expected
                if worst(out, expected.double()) > 1e-2:
                    yield Row("tiles", launch.spell(), note="left out: another result")
                else:
                    calls[launch.spell()] = lambda bound=bound, given=given: bound.run(dict(given))
            for name, ms in timed(calls, deadline).items():
                rate = flops(lengths, bool(mask), False) * head_dim / HEAD_DIM / ms / 1e9
                yield Row("tiles", f"{head_dim}{mask} {name}", "fwd", ms, rate)


# -- blocks -----------------------------------------------------------------------------------------------------------


def build(deadline: float) -> Iterator[Row]:
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
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = timed({"build": make}, deadline)["build"]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    yield Row("build", "document 64k x 64k", ms=ms, ratio=peak, of="MiB at the peak", note=f"{wrong} blocks wrong")


def blocks(deadline: float) -> Iterator[Row]:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    seqlen, options = 8192, Options(backend=BACKEND[0])
    rows = seqlen // BLOCK
    q, k, v = (tokens(1, seqlen, HEADS, HEAD_DIM) for _ in range(3))
    calls: dict[str, Callable[..., torch.Tensor]] = {"dense": lambda q, k, v: flashtile.attention(q, k, v, options=options)}
    kept = {"dense": 1.0}
    compiled = torch.compile(flex_attention)
    for sparsity in (0.0, 0.5, 0.8, 0.95):
        generator = torch.Generator().manual_seed(1)
        table = torch.rand((rows, rows), generator=generator) >= sparsity
        table[:, 0] = True
        mask = Blocks.from_block_mask(table.to(DEVICE), seqlen, seqlen)
        count = table.sum(1).to(DEVICE, torch.int32)[None, None]
        index = (~table).to(torch.int8).argsort(dim=1, stable=True).to(DEVICE, torch.int32)[None, None]
        nothing = torch.zeros_like(count)
        flex = BlockMask.from_kv_blocks(nothing, index, count, index, BLOCK_SIZE=BLOCK)
        names = f"flashtile {sparsity:.0%}", f"flex {sparsity:.0%}"
        calls[names[0]] = lambda q, k, v, mask=mask: flashtile.attention(q, k, v, mask=mask, options=options)
        calls[names[1]] = lambda q, k, v, flex=flex: compiled(
            *(t.transpose(1, 2) for t in (q, k, v)), block_mask=flex
        ).transpose(1, 2)
        for name in names:
            kept[name] = table.float().mean().item()
        part = slice(0, 256)
        keep = table.to(DEVICE).repeat_interleave(BLOCK, 1)[torch.arange(256, device=DEVICE) // BLOCK]
        scores = (q[0, part, 0].double() @ k[0, :, 0].double().T) / math.sqrt(HEAD_DIM)
        truth = torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ v[0, :, 0].double()
        for name in names:
            try:
                error = worst(calls[name](q, k, v)[0, part, 0], truth)
            except Exception as failure:
                error = math.inf
                print(f"    {name}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
            if not error < 2e-2:
                yield Row("blocks", name, note=f"left out, off by {error:.3g}")
                del calls[name]
    for direction in ("fwd", "bwd"):
        found = timed({name: directions(attend, [q, k, v])[direction] for name, attend in calls.items()}, deadline)
        for name, ms in found.items():
            rate = flops([seqlen], False, direction == "bwd") * kept[name] / ms / 1e9
            ideal = found["dense"] * kept[name] / ms if "dense" in found else None
            yield Row("blocks", name, direction, ms, rate, ideal, "the ideal speed-up over dense")


SECTIONS = {"poison": poison, "varlen": varlen, "tiles": tiles, "build": build, "blocks": blocks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="for each section")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--backend", choices=["triton", "hopper", "chosen"], default="triton")
    chosen = parser.parse_args()
    BACKEND[0] = None if chosen.backend == "chosen" else chosen.backend
    about, made = facts(DEVICE), list[Row]()
    print(about, flush=True)
    for name in chosen.section:
        begun = time.monotonic()
        print(name, flush=True)
        try:
            for row in SECTIONS[name](begun + chosen.seconds):
                made.append(row)
                print("  ", *(v if not isinstance(v, float) else f"{v:.4g}" for v in vars(row).values()), flush=True)
                if chosen.output:
                    write(chosen.output, made, about)
        except Exception as error:
            made.append(Row(name, "failed", note=f"{type(error).__name__}: {str(error)[:300]}"))
            print("  ", made[-1].note, flush=True)
            if chosen.output:
                write(chosen.output, made, about)
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    failures = [row for row in made if row.name == "failed" or (row.section == "poison" and row.ratio)]
    return 1 if failures else 0


def write(path: Path, rows: list[Row], about: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*Row.__dataclass_fields__, "machine"])
        writer.writeheader()
        writer.writerows({**vars(row), "machine": str(about)} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
