"""Sections of docs/benchmarks.md: what the scripts in `benchmarks` measured, from their CSVs alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from flashtile.bench.result import read as read_bench
from tools import shapes
from tools.companion_tables import Row, provenance, read

FILES = {  # file -> what its rows are
    "varlen-h100": "Unequal lengths and lists of blocks, Hopper's kernels: `benchmarks/varlen.py`. `ratio` is of `of`.",
    "varlen-h200": "The same on an H200.",
    "varlen-portable-h100": "The same by the portable kernels.",
    "features-hopper-h100": "Costs of features, Hopper's kernels: `benchmarks/features.py`. Ratios: time over the plain one.",
    "features-hopper-h200": "The same on an H200.",
    "features-h100": "The same with the portable kernels.",
    "hopper-forward-h100": "Shares of the plain problem's FLOP/s, forward: `benchmarks/hopper_forward.py`.",
    "hopper-backward-h100": "The same of backwards, split and deterministic ones too: `benchmarks/hopper_backward.py`.",
    "cpu-epyc": "fp32 calls, a training step and memory beside PyTorch's own attention on one thread of a CPU: "
    "`benchmarks/cpu.py`. `ratio`: our time or memory over PyTorch's, so that above 1 we are slower; `bar`: the most that the "
    "script allows. `shape`: batch x queries x keys x heads of q x of k x head_dim; `both`: forward and backward.",
    "cpu-features-xeon": "Costs of features on a CPU, before fp32 ran PyTorch's own kernels. Ratios: time over plain SDPA.",
    "train-h100": "GPT-2 124M in training: `benchmarks/train.py`.",
    "host-h100": "Host time of a call: `benchmarks/host.py`.",
    "replay-h100": "Small problems under CUDA graph replay: `benchmarks/replay.py`.",
    "exported-h100": "Exported C beside llm.c's kernels, FlashAttention.C and PyTorch: `benchmarks/exported.py`.",
    "cached-h200": "Decoding from a key/value cache, under CUDA graph replay: `benchmarks/cached.py`. `of_copy`: a memcpy's "
    "time over ours, `of_best`: the best peer's.",
    "cached-hopper-h200": "The same by Hopper's kernel, beside the portable one (`triton` in a name) and with other tiles.",
    "cached-hopper-sums-h200": "Hopper's kernel since a block adds its parts up (lab, decoding 2): `benchmarks/cached.py`.",
    "cached-hopper-cells-h200": "The same at the next commit, with 64 x 8192: `benchmarks/cached.py`.",
    "cached-hopper-variants-h200": "Variants of the sum of parts (lab, decoding 4 and 5): `benchmarks/cached.py --sets`. The "
    "first row of a cell is a choice that is gone: 16 loads under way, where 8 are now (`MANY_LOADS=8`).",
    "cached-hopper-e4m3-h200": "Caches of e4m3 by Hopper's kernel, beside the portable one and bf16 (lab, decoding 6): "
    "`benchmarks/cached.py --backends triton hopper`.",
    "decode-launches-h200": "Short calls over a cache, without the second launch and with other splits (lab, decoding 7): "
    "plans changed by hand, the rotation of `benchmarks/cached.py`. `sum of`: heads, warps, columns of a program of the sum.",
    "cached-places-h200": "Splits by the portable kernel, since the sum has no more places than parts (lab, decoding 8): "
    "`benchmarks/cached.py --sets split=512 split=128`.",
    "cached-hopper-latent-h200": "Latent attention by Hopper's own kernel, beside the portable one (lab, decoding 17): "
    "`benchmarks/cached.py --models mla-128 mla-16 --backends triton`.",
    "cached-abreast-h200": "Variants of the sum of parts, and other splits (lab, decoding 10, 11 and 14): "
    "`benchmarks/cached.py --sets`. Rows of 99f04352 are of a patch: the first of a cell forms four sums "
    "abreast, of 128 columns, and keeps six tiles under way where a program is alone; `SUM_ELEMENTS=128` "
    "has 32 columns. That, with three tiles, is what the library does since, in the later rows, beside "
    "the old way, `ABREAST=1`.",
    "cached-hopper-short-h200": "Changes for short cells, and without those named; `ahead=0` is kept (lab, decoding 27).",
    "cached-hopper-whole-h200": "Whole items where lengths are alike, and 32 rows of queries, by all tiles beside "
    "FlashAttention-4 (lab, decoding 34 and 35). `first`: without the launch that adds up; `regs`, `elements`: its registers, "
    "and numbers of a program.",
    "decode-profile-h200": "Replays with one thing changed, and counters by Nsight Compute, on cold caches (lab, decoding 33).",
    "cached-queries-h200": "Several queries, lognormal lengths, a window, by the kernel before cached-hopper-turned-h200, "
    "which has newer rows of most: `benchmarks/cached.py`. SDPA is "
    "given a mask where items differ or several queries have a window, and of a window its keys alone.",
    "generation-h200": "transformers' `generate` of a Llama of 1B's shape with random weights and a static "
    "cache of `keys` places: `python -m benchmarks generation --sections generate --compile`. `of_sdpa`: "
    "tokens a second over those of transformers' own sdpa; `kernels`: which backend reads the cache.",
    "cached-role-h200": "Caches of e4m3 whose loading role converts (lab, decoding 12): `benchmarks/cached.py`. Rows "
    "of 88f6624e are of a tree with a patch (lab, decoding 16) that `late` and pages are free of.",
    "cached-hopper-turned-h200": "Keys as the rows of products (`turned` in a name), beside queries as rows (lab, decoding 18 "
    "and 19): `benchmarks/cached.py`, tiles of choice. Without a tile's name caches of e4m3 are turned, from b7f45bfc on all. "
    "Latents of b7f45bfc are of a tree with a change that the next commit made: values are added at once.",
    "cached-hopper-peers-h200": "Ours beside SDPA's kernels, FlashAttention-4 and flashinfer 0.7.4 in one rotation (lab, "
    "decoding 26 and 34): `benchmarks/cached.py --cells`. flashinfer's kernels: with tensor cores (`fa2`), without (`cores`), "
    "its Hopper prefill with one query (`fa3`), XQA; latents by its MLA wrapper. `of_best` is of all of them, `of_sdpa` of "
    "SDPA's two kernels.",
    "padded-h200": "Contiguous caches that are padded on the left, told by the row of their first key and by a mask: "
    "`python -m benchmarks padded`. `whole` is the same call without padding, of 1.14 times as many keys at 64 items.",
    "cached-repeats-h200": "Calls over a cache whose bits a thousand repeats do not change: `python -m "
    "benchmarks generation --sections repeats`.",
    "cached-host-h200": "The host's time of eager calls over a cache, since they are known again (bed0cba9) and before "
    "(99f04352), in turns on one machine, and without a copy of out (7421de1d; lab, decoding 21), two turns: `python -m "
    "benchmarks generation --sections host`. `of_sdpa_us`: over SDPA's flash.",
    "field-tests-caches-h200": "Tests of caches and sums through our names, flash-attention 3's, 4's (cute), flashinfer's and "
    "FlashMLA's: `benchmarks/field_tests.py`. Those of eccae7ed are flash-attention 2's. "
    "Of version 3 the tests of the cache and of sums alone ran.",
    "cached-e4m3-h200": "Caches of e4m3 by the portable kernel, in the rotation of cached-hopper-cells-h200.",
    "fp8-h200": "Keys and values of 8 bits, and e4m3 products, beside bf16: `benchmarks/fp8.py --sections speed`.",
    "fp8-gradients": "Errors of gradients beside e4m3, on a CPU: `benchmarks/fp8.py --sections gradients`.",
    "companions-h200": "The head of a language model: linear and cross-entropy, forward and backward, beside torch.compile: "
    "`benchmarks/companions.py --section head`. `stored`: with `logits_bytes` for all logits.",
    "stored-h200": "Caches of 8 bits beside bf16 (`of_bf16`), and latent attention, with every candidate tile (`of_first`: "
    "beside the one chosen then): `benchmarks/cached.py --caches bf16 e4m3 --tiles`.",
    "fp8-simulated": "Errors of e4m3 products, simulated in PyTorch: `benchmarks/fp8.py --sections simulated`.",
    "derivatives-h200": "Tangents, double backwards and statistics beside a forward and a backward: "
    "`benchmarks/derivatives.py`; of 16,384 tokens and 64 columns before tiles were chosen by time and rows loaded at once. "
    "Rows of 2fce4727 are before tangents had a kernel of Hopper's own.",
    "derivatives-tiles-h200": "Tiles of tangents, second derivatives and masses: `benchmarks/derivatives.py --tiles`.",
    "context-h200x2": "Causal attention over two GPUs, forward and backward: `python -m benchmarks.context --ranks 2`. "
    "`efficiency`: one GPU's time over twice that of two. "
    "Where a shape and a way have several rows, the last is the newest. Rows of 60c0d2e3 attend 16k tokens by 2 and 4 groups "
    "of heads, which are 1 since, because causal backwards of few heads end with one long program.",
    "builds-h200": "Two builds in turns, that of a row's commit beside c6ffcb5: `python -m benchmarks builds`. `of_base`: this "
    "one's time over the other's. `starts`: processes of each build; `spread`: how far the base's lie apart, or where it has "
    "one process that one's rounds. `costs-exact-delta`: with `Options(delta='exact')` beside none. `host`: microseconds of "
    "the host for a call, forward alone (`forward`) or with its backward (`both`).",
    "fuzz-h200": "Runs of `flashtile fuzz`, which draws whole problems and judges them against float64: `tools/fuzz_rows.py`. "
    "`close`: above what is allowed with these data, within it with most others; `new`: kernels that no row before had. "
    "At 56adf0c4 Hopper's kernels refused all of theirs, for a file of them did not parse. Later ones refuse backwards that "
    "the portable kernels take: of one query or one key, of `delta='exact'`, and of some biases.",
    "fuzz-cpu": "The same on a CPU, by one process beside other work.",
    "jax-attention-h100": "Attention in JAX: `benchmarks/jax_attention.py`.",
}  # fmt: skip
NOTES = {  # suite -> what its rows are; {peers} and {shapes} are told from the rows. Behind it what else must be known of them
    "cpu-xeon": "16 bits and fp32 beside PyTorch's own attention on a CPU: {shapes}. **Of fp32 these rows are old**: it runs "
    "PyTorch's own kernels since e473899, and [cpu-epyc](#cpu-epyc) measures that. 16-bit backwards sum delta in a pass of "
    "their own since 55efbd4, which nothing measures yet.",
    "fa3-paper-h100": "The portable kernels, which other GPUs run, beside {peers}: {shapes}. What an H100 runs by "
    "default is Hopper's own: [hopper-fa3-paper-h100](#hopper-fa3-paper-h100).",
    "fp32-llmc-h100": "fp32 by the portable kernels beside {peers}: {shapes} (GPT-2's shapes, llm.c).",
    "hopper-beside-cudnn-h100": "Hopper's kernels beside {peers}, shapes of several suites: {shapes}. Most are older than the "
    "suites' own rows, and of other rotations. [Goals](goals.md) takes each shape's newest row, here or there.",
    "hopper-cudnn-cross-h100": "Hopper's kernels beside {peers}: {shapes} (cuDNN's samples).",
    "hopper-cudnn-cross-h200": "The same on an H200: {shapes}.",
    "hopper-fa3-paper-h100": "Hopper's kernels beside {peers}: {shapes} (shapes of FlashAttention-3's paper). The first row of "
    "README's table of speed, and its figure.",
    "hopper-fa3-paper-h200": "The same on an H200: {shapes}.",
    "hopper-llmc-h100": "Hopper's kernels beside {peers}: {shapes} (GPT-2's shapes, llm.c).",
    "hopper-llmc-h200": "The same on an H200: {shapes}.",
    "hopper-mla-h100": "Hopper's kernels beside {peers}: {shapes} (DeepSeek). **These rows are old**: the forward of 192 "
    "columns takes tiles of 128 keys since 5515db7, which the next section has, on an H200.",
    "hopper-mla-h200": "The same on an H200: {shapes}.",
    "hopper-models-h200": "Hopper's kernels beside {peers}: training shapes of Llama 3, Qwen3, Gemma 3, GPT-OSS, DeepSeek V3 "
    "({shapes}). B is the batch, H heads of queries/keys, S tokens, D columns of a head: {legend}. "
    "[Forward and backward together](limits.md#training-shapes-of-models).",
    "hopper-triton-tutorial-h100": "Hopper's kernels beside {peers}: {shapes} (Triton's tutorial).",
    "hopper-triton-tutorial-h200": "The same on an H200: {shapes}.",
    "own-shapes-h200": "Shapes that no suite has, by `flashtile bench SPELLING`, beside {peers}: {shapes}. "
    "FlashAttention-4 was not installed.",
    "llmc-h100": "The portable kernels beside {peers}: {shapes} (GPT-2's shapes, llm.c).",
    "companions-h100": "Norms, losses, rotary embeddings and softmax beside torch.compile, Liger and others: "
    "`benchmarks/companions.py`.",
}  # fmt: skip
COLUMNS = {  # what a column means whose name does not say it
    "caches": "copies of the cache that calls walk in turn, so that keys come from memory",
    "least_us": "the fastest round",
    "of_copy": "the time of a memcpy of the same traffic over ours",
    "best": "the fastest other one",
    "of_best": "its time over ours",
    "of_contiguous": "our time for one contiguous cache over that for pages",
    "of_bf16": "our time for bf16 over that for 8 bits",
    "of_first": "the time of the library's choice over this variant's",
    "one_ms": "one GPU alone with the whole sequence",
    "together_ms": "each GPU with the whole at one time: what lies between is the machine's",
    "ranks_ms": "the slowest rank with its part",
    "peak_bytes": "what the busiest rank holds at once without the inputs",
}
MACHINE = ("device", "driver", "torch", "triton", "cudnn", "flash_attn", "python", "jax", "date", "commit")
LEFT_OUT = {"section", "losses"}  # a title, and a list of numbers in one cell


def contents(folder: Path, stems: Iterable[str]) -> str:
    """A line per section: what it is, device, days and commits."""
    lines = ["| section | what it is | device | measured | commits |", "| --- | --- | --- | --- | --- |"]
    for stem in stems:
        rows = [row for row in read(folder / f"{stem}.csv") if row["device"]]
        devices, days, commits = (sorted({row[name] for row in rows}) for name in ("device", "date", "commit"))
        span = " to ".join(dict.fromkeys((days[0][:10], days[-1][:10])))
        what = re.split(r": `|\. ", note(folder, stem))[0].removesuffix(".")
        lines.append(f"| [{stem}](#{stem}) | {what} | {', '.join(devices)} | {span} | {', '.join(commits)} |")
    return "\n".join(lines)


def note(folder: Path, stem: str) -> str:
    """What a file's rows are."""
    text = (NOTES | FILES)[stem]
    if "{shapes}" not in text:
        return text
    results = read_bench(folder / f"{stem}.csv")
    legend = shapes.legend(results) if "{legend}" in text else ""
    return text.format(peers=" and ".join(shapes.peers(results).rsplit(", ", 1)), shapes=shapes.told(results), legend=legend)


def section(path: Path) -> str:
    """What a script's file is, its rows by their `section`, and the machines and commits that they are of.

    A table of rows of several commits says which.
    """
    rows = read(path)
    known = [f"`{name}`: {COLUMNS[name]}" for name in rows[0] if name in COLUMNS and any(row[name] for row in rows)]
    parts = [FILES[path.stem], *([f"Columns: {'; '.join(known)}."] if known else [])]
    for title in dict.fromkeys(row.get("section", "") for row in rows):
        mine = [row for row in rows if row.get("section", "") == title]
        parts += [f"**{title}**"] if title else []
        hidden = {*MACHINE, *LEFT_OUT} - ({"commit"} if len({row["commit"] for row in mine}) > 1 else set())
        parts.append(_table(mine, [n for n in rows[0] if n not in hidden and any(row[n] for row in mine)]))
    machines = [{name: row.get(name, "") for name in MACHINE} | {"date": row["date"][:10]} for row in rows if row["device"]]
    return "\n\n".join([*parts, provenance(machines).replace("\n", "<br>\n")])


def jax(folder: Path) -> str:
    """Peers' times over ours in JAX, where both stood in one rotation: the table of docs/jax.md."""
    ways, ours = {"forward": "forward", "both": "forward and backward"}, "flashtile/auto"
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    rows = [row for row in read(folder / "jax-attention-h100.csv") if row["ms"]]
    for row in rows:
        cells.setdefault(tuple(row[name] for name in ("commit", "head_dim", "causal", "which")), {})[row["provider"]] = float(
            row["ms"]
        )
    found: dict[str, dict[str, list[float]]] = {}
    for (*_, way), cell in cells.items():
        for peer, ms in cell.items() if ours in cell and way in ways else ():
            found.setdefault(peer, {}).setdefault(way, []).append(ms / cell[ours])
    lines = ["| beside | " + " | ".join(ways.values()) + " |", "| --- | --- | --- |"]
    for peer, times in found.items():
        if peer != ours and all(len(times[way]) == len(found[ours][way]) for way in ways):  # others came in another rotation
            lines.append(f"| {peer} | " + " | ".join(f"{min(times[way]):.2f} to {max(times[way]):.2f}" for way in ways) + " |")
    return "\n".join([*lines, ""])


def costs(folder: Path) -> str:
    """Times of features on an H100, ours and the others', full and causal: the table of docs/features.md."""
    rows = [row for row in read(folder / "features-hopper-h100.csv") if row["section"] == "costs" and row["both_ms"]]
    ms = {(row["name"], row["causal"]): f"{float(row['forward_ms']):.2f}, {float(row['both_ms']):.2f}" for row in rows}
    lines = ["| with | mask | flashtile | FlexAttention | PyTorch's SDPA |", "| --- | --- | --- | --- | --- |"]
    for name in ("plain", "softcap", "sink", "dropout", "bias", "bias, gradient"):
        for causal, mask in (("False", "full"), ("True", "causal")):
            cells = [ms.get((f"{who}{name}", causal), "-") for who in ("", "flex ", "sdpa ")]
            lines.append(f"| {name} | {mask} | {' | '.join(cells)} |")
    told = sorted({(row["date"][:10], row["commit"]) for row in rows})
    days = ", ".join(f"{day} ({commit})" for day, commit in told)
    return "\n".join([*lines, "", f"Measured on {' and '.join(sorted({row['device'] for row in rows}))}: {days}.", ""])


def shares(folder: Path) -> str:
    """What features leave of a plain forward's FLOP/s on an H100: a table of docs/limits.md."""
    rows = {row["row"]: row for row in read(folder / "hopper-forward-h100.csv")}
    found = {name: f"{float(row['of_base']):.2f}" for name, row in rows.items() if row["of_base"]}
    costs = (row for row in read(folder / "features-hopper-h100.csv") if row["name"] == "dropout" and row["forward_ratio"])
    for row in costs:  # of head_dim 128
        found[f"dropout-128-{'causal' if row['causal'] == 'True' else 'full'}"] = f"{1 / float(row['forward_ratio']):.2f}"
    found["softcap and lse-128-full"] = found["softcap-128-with-lse"]
    columns = [(depth, mask) for depth in (64, 96, 128, 256) for mask in ("full", "causal")]
    lines = ["| forward with | " + " | ".join(f"{depth}, {mask}" for depth, mask in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for name in ("softcap", "softcap and lse", "alibi", "dropout", "head_dim"):
        cells = [found.get(f"{name}-{depth}-{mask}", "-") for depth, mask in columns]
        lines.append(f"| {'head_dim 96' if name == 'head_dim' else name} | {' | '.join(cells)} |")
    lines += ["", f"A window of 1,024 keys in 16k reaches {window(folder)} of the FLOP/s of 1,024 full keys.", ""]
    return "\n".join(lines)


def window(folder: Path) -> str:
    """The FLOP/s of a forward with a window on an H100, over those of one of as many keys without a mask."""
    rows = {row["row"]: row for row in read(folder / "hopper-forward-h100.csv")}
    seen, full = (float(rows[name]["tflops"]) for name in ("window-1024-16k", "plain-128-1k"))
    return f"{seen / full:.2f}"


def cpu_sizes(folder: Path) -> str:
    """Our speed beside PyTorch's of calls on a CPU, forward and backward, by queries and keys: a table of docs/limits.md."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in read(folder / "cpu-epyc.csv"):
        if (row["section"], row["what"]) == ("calls", "both"):
            queries, keys = map(int, row["shape"].split("x")[1:3])
            found.setdefault((queries, keys), []).append(1 / float(row["ratio"]))
    sizes = [(f"{size[0]:,} x {size[1]:,}", f"{min(found[size]):.2f}x", f"{max(found[size]):.2f}x") for size in sorted(found)]
    lines = ["| queries x keys | least | most |", "| --- | --- | --- |", *(f"| {' | '.join(size)} |" for size in sizes)]
    return "\n".join([*lines, ""])


def cpu_times(folder: Path) -> str:
    """What some calls take on a CPU, forward and backward: a sentence of docs/limits.md."""
    rows = read(folder / "cpu-epyc.csv")
    told = list[str]()
    for shape in ("1x64x64x2x2x32", "1x1024x1024x4x4x64", "1x2048x2048x4x2x64"):
        (row,) = [r for r in rows if (r["section"], r["what"], r["shape"], r["causal"]) == ("calls", "both", shape, "True")]
        _, tokens, _, heads, _, depth = map(int, shape.split("x"))
        told.append(f"{float(row['ours_us']) / 1e3:.3g} ms for {tokens:,} tokens ({heads} heads of {depth})")
    return f"causal, {', '.join(told)}"


def cpu_window(folder: Path) -> str:
    """A window's forward and backward on a CPU beside PyTorch's without one: a sentence of docs/limits.md."""
    by = {(r["dtype"], r["causal"], r["name"]): float(r["both_ratio"]) for r in read(folder / "cpu-features-xeon.csv")}
    return " and ".join(f"{by[dtype, 'False', 'window']:.2f} times in {dtype}" for dtype in ("fp32", "bf16"))


def first_calls(folder: Path) -> str:
    """Seconds of first calls with an empty and with a filled disk cache: a sentence of docs/reference/environment.md."""

    def seconds(card: str, state: str) -> str:
        rows = [row for row in read(folder / f"hopper-checks-{card}.csv") if row["section"] == "first"]
        found = [float(row[f"{state}_{way}_s"]) for row in rows for way in ("forward", "backward")]
        return f"{min(found):.2g} to {max(found):.2g} s"

    cards = (("h100", "an H100"), ("h200", "an H200"))
    return " and ".join(f"{seconds(card, 'cold')} on {name} ({seconds(card, 'warm')} from disk)" for card, name in cards)


def builds(folder: Path) -> str:
    """What builds that were started several times take of the time of an earlier one's: a part of docs/limits.md."""
    rows = [row for row in read(folder / "builds-h200.csv") if int(row["starts"]) > 1]
    told = {(row["cell"], row["pass"]): f"{float(row['of_base']):.3f}" for row in rows}
    *others, worst = sorted((row for row in rows if row["unit"] == "host_us"), key=lambda row: float(row["of_base"]))
    least, most = (f"{float(row['of_base']):.3f}" for row in (others[0], others[-1]))
    starts = " and ".join(sorted({row["starts"] for row in rows}))
    of = {name: " and ".join(told[f"costs-{name}", which] for which in ("forward", "backward")) for name in ("bias", "dropout")}
    return fill(
        f"On an H200 forward and backward with a bias take {of['bias']} of their time at c6ffcb5, with dropout {of['dropout']} "
        f"(causal; medians of {starts} processes a build). A bias' passes note which rows have scores of 10^3 and "
        "more, and launches behind them compute these again: one behind a forward, two behind a backward. The host's time of "
        "a small call is "
        f"{least} to {most} of c6ffcb5's in {len(others)} cases, and {float(worst['of_base']):.3f} in one, where c6ffcb5's own "
        f"processes lie {float(worst['spread']):.3f} apart ([rows](benchmarks/others.md#builds-h200)).",
        120,
    )


def latent(folder: Path) -> str:
    """What a query of each request takes over latent keys in pages of 64: a table of docs/limits.md, newest rows."""
    cells = dict[tuple[str, int, int], Row]()
    chosen = re.compile(r"flashtile/64( hopper 64x64 stages=2 slack=8)?")  # the second has been the default since 933ce6c6
    rows = [row for stem in ("latent", "turned") for row in read(folder / f"cached-hopper-{stem}-h200.csv")]
    for row in sorted(rows, key=lambda row: (row["date"], len(row["provider"]))):
        if row["model"].startswith("mla-") and chosen.fullmatch(row["provider"]):
            cells[row["heads_q"], int(row["batch"]), int(row["keys"])] = row
    lines = ["| heads | items x keys | us | TFLOP/s | of a copy's speed |", "| --- | --- | --- | --- | --- |"]
    for (heads, items, keys), row in sorted(cells.items(), key=lambda cell: (-int(cell[0][0]), *cell[0][1:])):
        us, tflops, share = (float(row[name]) for name in ("us", "tflops", "of_copy"))
        lines.append(f"| {heads} | {items} x {keys:,} | {us:.0f} | {tflops:.0f} | {share:.2f} |")
    return "\n".join([*lines, ""])


def documents(folder: Path) -> str:
    """FlexAttention's time of packed documents, by a mask, over ours of `attention_varlen` on an H100."""
    rows = [row for row in read(folder / "varlen-h100.csv") if row["section"] == "varlen" and row["ms"]]
    ms = {(row["name"], row["direction"]): float(row["ms"]) for row in rows}
    told = list[str]()
    for way, name in (("fwd", "forward"), ("bwd", "backward")):
        ratios = sorted(
            ms[f"flex document, {mask}", way] / ms[f"flashtile/hopper varlen, {mask}", way] for mask in ("causal", "full")
        )
        told.append(f"{name} {ratios[0]:.2f} to {ratios[1]:.2f}")
    return ", ".join(told)


def ranks(folder: Path) -> str:
    """How fast all-gather over two GPUs is beside others, by length: their least time over ours, of the newest rotation."""
    newest = dict[tuple[int, str], dict[str, float]]()
    for row in read(folder / "context-h200x2.csv"):
        kind = row["provider"].partition(" ")[0]
        if kind in ("allgather", "torch", "ring-flash-attn") and not (row["window"] or row["packed"] or row["dropout"]):
            cell = newest.setdefault((int(row["seqlen"]), row["commit"]), {})
            cell[kind] = min(cell.get(kind, float("inf")), float(row["ranks_ms"]))
    rotations = {length: cell for (length, _), cell in newest.items() if "torch" in cell}  # the file's last of each length
    told = list[str]()
    for name, peer in (
        ("torch", "torch's `context_parallel`"),
        ("ring-flash-attn", "ring-flash-attn's functions over our passes"),
    ):
        ratios = [
            f"{cell[name] / cell['allgather']:.2f} ({length:,} tokens)" for length, cell in rotations.items() if name in cell
        ]
        told.append(f"{', '.join(ratios)} times the speed of {peer}")
    return "; ".join(told)


def pairs(folder: Path) -> str:
    """How many combinations of features were right on an H100: a sentence of docs/features.md."""
    right = [[row["problem"] for row in rows] for rows in _right_pairs(folder)]
    three = [sum(all(name in problem for name in ("alibi(", "softcap(", "dropout=")) for problem in rows) for rows in right]
    return (
        f"{len(right[0]):,} by the portable kernels and {len(right[1]):,} by Hopper's; ALiBi, a softcap and dropout meet in "
        f"{three[0]} and {three[1]} of them"
    )


def trained_pairs(folder: Path) -> str:
    """In how many of these a window, ALiBi, a sink and dropout met, backward too, and documents with them."""
    names = (r"band=\d+:", r"alibi\(", "sink=", "dropout=")
    four, documents = list[int](), list[int]()
    for rows in _right_pairs(folder):
        trained = [row["problem"] for row in rows if row["backward"] != "none"]
        met = [problem for problem in trained if all(re.search(name, problem) for name in names)]
        four.append(len(met))
        documents.append(sum("document(" in problem for problem in met))
    return (
        f"{four[0]} calls by the portable kernels and {four[1]} by Hopper's, with documents in {documents[0]} and "
        f"{documents[1]} of these"
    )


def _right_pairs(folder: Path) -> list[list[Row]]:
    """The rows of drawn combinations on an H100 that were right, by the portable kernels and by Hopper's."""
    return [
        [row for row in read(folder / f"{stem}-h100.csv") if row["section"] == "pairs" and not row["failure"]]
        for stem in ("pairs", "pairs-hopper")
    ]


def head_rows(folder: Path) -> dict[str, Row]:
    """linear_cross_entropy and its peer by provider, on an H200."""
    return {row["provider"]: row for row in read(folder / "companions-h200.csv") if row["section"] == "head"}


def head(folder: Path) -> str:
    """What linear_cross_entropy takes, by default and with all logits kept, beside torch.compile."""
    rows = head_rows(folder)
    ours, stored, theirs = (
        f"{float(rows[who]['ms']):.1f} ms and {int(rows[who]['peak_mb']):,} MiB"
        for who in ("flashtile", "flashtile/stored", "compiled")
    )
    return f"{ours}; with all logits kept {stored}; torch.compile's {theirs}"


WATCHED = ("max_logit", "entropy", "Mass(last=64)")  # forwards with one of these are timed beside plain ones


def _watched(folder: Path) -> dict[tuple[str, str], list[float]]:
    """What statistics add to a forward on an H200, in percent of it: (shape, mask) -> one number of each."""
    runs = dict[tuple[str, str, str], dict[str, float]]()  # plain forwards of other runs are not what stands beside them
    for row in read(folder / "derivatives-h200.csv"):
        runs.setdefault((row["shape"], row["mask"], row["commit"]), {})[row["what"]] = float(row["ms"] or "nan")
    names = [f"forward with {what}" for what in WATCHED]
    watched = {key[:2]: ms for key, ms in runs.items() if set(names) <= set(ms)}
    return {key: [100 * (ms[name] / ms["forward"] - 1) for name in names] for key, ms in watched.items()}


def statistics(folder: Path) -> str:
    """A table of docs/limits.md: what statistics add to a forward."""
    lines = ["| head_dim, tokens | mask | `max_logit` | `entropy` | `Mass(last=64)` |", "| --- | --- | --- | --- | --- |"]
    for (shape, mask), shares in _watched(folder).items():
        _, tokens, _, depth = shape.split("x")
        lines.append(f"| {depth}, {int(tokens):,} | {mask} | " + " | ".join(f"{_percent(share)} %" for share in shares) + " |")
    return "\n".join([*lines, ""])


def statistics_range(folder: Path) -> str:
    """The same in a few words, the least and the most of each: of an answer."""
    ends = [f"{_percent(min(some))} to {_percent(max(some))} %" for some in zip(*_watched(folder).values(), strict=True)]
    return f"{ends[0]}, {ends[1]} and {ends[2]}"


def _percent(share: float) -> str:
    return f"{share:.0f}" if share >= 0.95 else f"{share:.1f}"


def _table(rows: Sequence[Row], names: Sequence[str]) -> str:
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " --- |" * (len(names) - 1)]
    cells = ([row[name] if name == "commit" else _cell(row[name]) for name in names] for row in rows)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _cell(text: str) -> str:
    """A number with four digits, other text in one line, as a table has it."""
    try:
        return f"{float(text):.4g}" if "." in text else str(int(text))
    except ValueError:
        return " ".join(text.replace("|", "\\|").split())
