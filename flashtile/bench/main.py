"""The command `flashtile bench`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashtile.bench import plot as plots
from flashtile.bench import report
from flashtile.bench.cases import DIRECTIONS, SUITES, Direction, Suite, spelled, suite_named, with_dtype
from flashtile.bench.contest import Settings
from flashtile.bench.result import Result, read
from flashtile.bench.run import Order, in_directory, run
from flashtile.bench.worker import WorkerLostError
from flashtile.errors import InvalidProblem
from flashtile.output import prepare
from flashtile.problem.dtype import DType

OUTPUT = Path("bench-output")
FILE_COLUMNS = 220


class Passes(str, Enum):
    """Which directions are measured."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The passes themselves."""
        return DIRECTIONS if self is Passes.BOTH else tuple(d for d in DIRECTIONS if d == self.value)


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="Suites (see --list), or shapes of yours: 'attention(q=2x4096x16x128,kv=4096x16x128,bf16)'."),
    ] = None,
    direction: Annotated[Passes, typer.Option(help="Passes to measure; a backward is timed alone.")] = Passes.BOTH,
    provider: Annotated[
        list[str] | None, typer.Option("--provider", "-p", help="Only these: 'flex', 'sdpa', 'flashtile/*' (repeatable).")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help="Run every case in this element type.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each provider, in alternating order.")] = 5,
    budget: Annotated[float, typer.Option(min=1, help="Seconds; rounds, then cases are left out when they run short.")] = 240,
    base: Annotated[str | None, typer.Option(help="Compare with this commit, or checkout, in the same rotation.")] = None,
    commit: Annotated[str | None, typer.Option(help="Hash for the CSV, in the place of what git says.")] = None,
    also: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Python file with further PROVIDERS.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder or CSV; for --show, a .md or .png file.")] = OUTPUT,
    show: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Print this CSV as markdown, or draw it (-o X.png)."),
    ] = None,
    list_suites: Annotated[bool, typer.Option("--list", help="List the suites.")] = False,
) -> None:
    """Time flashtile against its peers: every provider checked against float64 first, then timed in rotation."""
    console = Console()
    if not console.is_terminal:  # a log or a pipe: lines as long as they are
        console = Console(width=FILE_COLUMNS)
    try:
        if list_suites:
            console.print(_listed())
        elif show is not None:
            _show(read(show), output, console)
        else:
            chosen = _chosen(suites or [], dtype)
            settings = Settings(direction.directions, tuple(provider or ()), rounds)
            csv = in_directory(output, [suite.name for suite in chosen])
            results = run(Order(chosen, settings, budget, base, also, commit), csv, lambda line: console.print(Text(line)))
            _finish(results, csv, console)
    except (InvalidProblem, ValueError, WorkerLostError) as error:
        typer.echo(f"flashtile bench: {error}", err=True)
        raise typer.Exit(2) from error


def _chosen(names: list[str], dtype: DType | None) -> tuple[Suite, ...]:
    if not names:
        known = ", ".join(s.name for s in SUITES)
        raise InvalidProblem(f"no suite is named; there are {known}. Or spell a problem: 'attention(q=...,kv=...,dtype)'.")
    own = [name for name in names if "(" in name]
    chosen = (*(suite_named(name) for name in dict.fromkeys(names) if name not in own), *([spelled(own)] if own else []))
    return chosen if dtype is None else tuple(with_dtype(suite, dtype) for suite in chosen)


def _listed() -> Table:
    listed = Table("suite", "cases", "what")
    for suite in SUITES:
        listed.add_row(suite.name, str(len(suite.cases)), suite.about)
    return listed


def _show(results: list[Result], output: Path, console: Console) -> None:
    if output == OUTPUT:
        typer.echo(report.markdown(results), nl=False)
        return
    if not output.suffix:  # matplotlib would add one
        raise InvalidProblem(f"output is '{output}'; for --show it must end in .md, or in a plot's format, as .png.")
    prepare(output)
    if output.suffix == ".md":
        output.write_text(report.markdown(results))
    else:
        plots.draw(results, output)
    console.print(Text(f"wrote {output}"))


def _finish(results: list[Result], csv: Path, console: Console) -> None:
    """Show the results, and draw them from the file just written."""
    saved = read(csv)
    report.show(saved, console)
    written = [csv]
    if any(result.tflops is not None for result in saved):
        plots.draw(saved, csv.with_suffix(".png"))
        written.append(csv.with_suffix(".png"))
    console.print(Text("wrote " + ", ".join(map(str, written))))
    if {result.suite for result in saved} == {"smoke"}:
        console.print(Text("smoke says that everything runs. Its sizes are too small to compare speeds: `flashtile bench "
                           "fa3-paper` does that on a GPU, `flashtile bench cpu` on a CPU."))  # fmt: skip
    guilty = sorted({r.provider for r in results if r.status in ("wrong", "failed")})
    if guilty:
        typer.echo(f"flashtile bench: wrong or failed: {', '.join(guilty)}", err=True)
        raise typer.Exit(1)
