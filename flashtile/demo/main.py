"""What `flashtile demo` does: train twice, compare, measure memory, plot, write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flashtile.demo.memory import naive_bytes, peak_bytes
from flashtile.demo.model import Attend, attend_flashtile, attend_naive, attend_sdpa
from flashtile.demo.train import Setup, Text, Trainer, sample
from flashtile.output import prepare

OURS, THEIRS, NAIVE = "flashtile", "torch SDPA", "naive"
CONTESTANTS: dict[str, Attend] = {OURS: attend_flashtile, THEIRS: attend_sdpa, NAIVE: attend_naive}
AGREEMENT = 1e-3  # nats per character, at every step
NAIVE_LIMIT_BYTES = 2**30  # longer sequences are left out of the naive column
LENGTHS = {"cpu": (512, 1024, 2048, 4096, 8192), "cuda": (1024, 2048, 4096, 8192, 16384, 32768)}

Memory = dict[str, dict[int, int]]  # contestant -> seqlen -> bytes


def run_demo(setup: Setup, output: Path, lengths: Sequence[int] | None = None, console: Console | None = None) -> bool:
    """Whether the two loss curves agree. Writes demo.png and sample.txt into `output`."""
    console = console or Console()
    plot, story = output / "demo.png", output / "sample.txt"
    prepare(plot, story)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    text = Text()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    console.print(f"A GPT of {setup.layers} layers learns Python's help topics, {len(text.text):,} characters.")
    console.print(f"Running on {where}.")
    runs = _train(text, setup, device, console)
    difference = max(abs(a - b) for a, b in zip(runs[OURS].losses, runs[THEIRS].losses, strict=True))
    agree = difference <= AGREEMENT
    console.print(_training_table(runs))
    verdict = "[green]they agree" if agree else "[red]they do not agree"
    console.print(f"Largest difference of the loss curves: {difference:.1e}, bound {AGREEMENT:g}: {verdict}[/].")
    memory = _memory(lengths or LENGTHS[device.type], device, console)
    console.print(_memory_table(memory))
    written = sample(runs[OURS].model, text, setup, device)
    console.print("\nThe model writes:\n", style="bold")
    console.print(written, markup=False, highlight=False)
    story.write_text(written, encoding="utf-8")
    _plot(runs, memory, plot)
    console.print("\nWhat the figures mean\n", style="bold")
    for line in _meaning(runs, memory, difference, agree, device):
        console.print(f"- {line}", highlight=False)
    console.print(f"\nWrote {plot} and {story}.")
    return agree


def _meaning(runs: dict[str, Trainer], memory: Memory, difference: float, agree: bool, device: torch.device) -> Iterator[str]:
    """The demo's results in sentences."""
    if agree:
        yield (f"Both models learned the same: their losses never differ by more than {difference:.1e}. Two exact attentions "
               "differ by rounding at most.")  # fmt: skip
    else:
        yield f"The losses differ by {difference:.1e}, which rounding does not explain. Please report it as a wrong number."
    share = runs[OURS].step_ms / runs[THEIRS].step_ms
    yield (f"A training step took {share:.2f} times as long as with {THEIRS}, all of the model included. Attention is a small "
           "part of so small a model, and a busy machine moves both.")  # fmt: skip
    if device.type == "cpu":
        yield ("On a CPU flashtile is not made to be faster: where PyTorch's own attention computes the same, it calls that. "
               "Its kernels for GPUs are (docs/benchmarks.md).")  # fmt: skip
    longest = max(memory[NAIVE])
    times = memory[NAIVE][longest] / memory[OURS][longest]
    naive, ours = (f"seqlen^{_exponent(memory[name]):.1f}" for name in (NAIVE, OURS))
    yield (f"At {longest:,} tokens the formula as it stands holds {times:.0f} times the memory of flashtile's tiles. It "
           f"grows as {naive}, and that of the tiles as {ours}.")  # fmt: skip


def _train(text: Text, setup: Setup, device: torch.device, console: Console) -> dict[str, Trainer]:
    """Both contestants, trained in lockstep."""
    runs = {name: Trainer(CONTESTANTS[name], text, setup, device) for name in (OURS, THEIRS)}
    columns = (
        TextColumn("training both"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=setup.steps, loss=float("nan"))
        for _ in range(setup.steps):
            losses = [trainer.step() for trainer in runs.values()]
            progress.update(task, advance=1, loss=losses[0])
    return runs


def _training_table(runs: dict[str, Trainer]) -> Table:
    table = Table("", *runs, title="Training")
    steps = len(runs[OURS].losses)
    table.add_row("loss at step 1, nats per character", *(f"{run.losses[0]:.6f}" for run in runs.values()))
    table.add_row(f"loss at step {steps}", *(f"{run.losses[-1]:.6f}" for run in runs.values()))
    table.add_row("step time, median", *(f"{run.step_ms:.1f} ms" for run in runs.values()))
    return table


def _memory(lengths: Sequence[int], device: torch.device, console: Console) -> Memory:
    memory: Memory = {name: {} for name in CONTESTANTS}
    with console.status("Measuring memory"):
        for name, attend in CONTESTANTS.items():
            for seqlen in lengths:
                if name != NAIVE or naive_bytes(seqlen) <= NAIVE_LIMIT_BYTES:
                    memory[name][seqlen] = peak_bytes(attend, seqlen, device)
    return memory


def _memory_table(memory: Memory) -> Table:
    table = Table("seqlen", *memory, title="Peak extra memory of one attention, forward + backward")
    for seqlen in memory[OURS]:
        cells = (sizes.get(seqlen) for sizes in memory.values())
        table.add_row(f"{seqlen}", *("left out" if size is None else f"{size / 2**20:.1f} MiB" for size in cells))
    table.add_section()
    table.add_row("grows as", *(f"seqlen^{_exponent(sizes):.2f}" for sizes in memory.values()))
    return table


def _exponent(sizes: dict[int, int]) -> float:
    """Slope of log(bytes) over log(seqlen) between the two longest sequences measured."""
    (n0, b0), (n1, b1) = list(sizes.items())[-2:]
    return log2(b1 / b0) / log2(n1 / n0)


def _plot(runs: dict[str, Trainer], memory: Memory, path: Path) -> None:
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        left.plot(range(1, len(run.losses) + 1), run.losses, style, label=name, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss, nats per character", title="Same seed, two attentions: the same training")
    bars = middle.bar(list(runs), [run.step_ms for run in runs.values()], 0.5, color=["C0", "C1"])
    middle.bar_label(bars, fmt="%.0f ms")
    middle.set(ylabel="median time of a step, ms", title="Speed of the whole training step")
    for (name, sizes), style in zip(memory.items(), ("o-", "s--", "^:"), strict=True):
        right.loglog(list(sizes), [size / 2**20 for size in sizes.values()], style, label=name, base=2)
    right.set(xlabel="seqlen", ylabel="peak extra memory, MiB", title="Memory of one attention, forward and backward")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    for axes, corner in ((left, "upper right"), (right, "upper left")):
        axes.legend(loc=corner)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=140)
