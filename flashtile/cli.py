"""The command line: demo | bench | explain | export | tune | warm | fuzz. Each command imports what it needs when called."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from flashtile import __version__
from flashtile.errors import InvalidProblem, NotSupported

try:
    import typer
    from rich.console import Console
    from typer.core import TyperGroup
except ImportError as missing:
    raise SystemExit(f'flashtile\'s command line needs {missing.name}: pip install "flashtile[cli]"') from None

EXTRAS = {"torch": "torch", "triton": "torch", "matplotlib": "cli"}  # package -> the extra that brings it


class Commands(TyperGroup):
    """The command group, with errors raised on purpose, and those of files, turned into a message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """What the command returns."""
        try:
            return super().invoke(ctx)
        except (InvalidProblem, NotSupported) as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:  # of no path: a broken pipe
                raise
            typer.echo(f"{error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            typer.echo(f'This command needs {error.name}: pip install "flashtile[{EXTRAS[error.name]}]"', err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Exact attention, tile by tile.")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flashtile {__version__}")
        raise typer.Exit


@app.callback()
def flashtile(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact attention, tile by tile."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two runs.")] = 250,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of weights, batches and sample.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the plot and the sample.")] = Path("demo-output"),
) -> None:
    """Train a small GPT with flashtile and with torch's SDPA; compare losses, step time and memory."""
    # Read when torch is loaded. The profiler (memory) logs its starts and stops; threads that spin while they wait make a
    # busy machine several times slower.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main = import_module("flashtile.demo.main")
    setup = import_module("flashtile.demo.train").Setup(steps=steps, seed=seed)
    raise typer.Exit(0 if main.run_demo(setup, output) else 1)


@app.command()
def explain(
    spelling: Annotated[
        str, typer.Argument(help="A problem, such as 'attention(q=1x4096x16x128,kv=4096x16x128,bf16)', or 'cached(...)'.")
    ],
    device: Annotated[str | None, typer.Option(help="sm90, H100, cpu, ...; default: this machine's.")] = None,
) -> None:
    """Show which backend, kernels and tiles run a problem, why the others don't, and what it costs at least."""
    Console().print(import_module("flashtile.explanation").explain(spelling, device=device), soft_wrap=True)


@app.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for flashtile_attention.c and .h.")],
    problem: Annotated[
        list[str],
        typer.Option(help="'attention(...)' or 'cached(...)', its sizes standing for any, or NAME=...; may be repeated."),
    ] = [],  # noqa: B006 (typer's way to say "none")
    arch: Annotated[list[str], typer.Option(help="sm_80, sm_90, ...; may be repeated.")] = ["sm_80", "sm_90"],  # noqa: B006
    layout: Annotated[str, typer.Option(help="bshd, bhsd, or llmc: q, k and v in one tensor, as llm.c has them.")] = "bshd",
    jobs: Annotated[int | None, typer.Option(min=1, help="Kernels compiled at a time; default: one per core.")] = None,
) -> None:
    """Write C with compiled kernels in it: attention without Python, PyTorch and cuDNN. Needs no GPU."""
    main = import_module("flashtile.export.main")
    request = main.Request(tuple(problem), tuple(arch), layout)
    for path in main.export(request, output, jobs, lambda line: typer.echo(line, err=True)):
        typer.echo(path)


@app.command()
def tune(
    spellings: Annotated[list[str], typer.Argument(help="Problems to tune for.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("tuned.json"),
) -> None:
    """Measure tiles for problems on this machine's GPU and write down the fastest."""
    import_module("flashtile.tune").tune(spellings, output)


@app.command()
def warm(
    spellings: Annotated[list[str], typer.Argument(help="Problems, such as 'attention(q=1x4096x16x128,...)'.")] = [],  # noqa: B006
    suite: Annotated[list[str], typer.Option(help="A suite of `flashtile bench`; may be repeated.")] = [],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="sm90, H100, ...; default: this machine's GPU.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Kernels compiled at a time; default: one per core.")] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Forwards alone, for inference.")] = False,
) -> None:
    """Compile the kernels of problems ahead, so that first calls find them on disk. Needs no GPU."""
    explanation, cases = import_module("flashtile.explanation"), import_module("flashtile.bench.cases")
    asked = [*spellings, *(case.spell() for name in suite for case in cases.suite_named(name).cases)]
    place = explanation.device_named(device) or explanation.this_machine()
    rich = import_module("rich.progress")
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TextColumn("{task.description}"))
    with rich.Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:  # no thread beside forks
        bar = progress.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(bar, completed=done, total=total, description=what, refresh=True)

        warmed = import_module("flashtile.warm").warm(asked, place, jobs, report, backward=not forward)
    typer.echo(f"{warmed}, for {place.target}")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench(ctx: typer.Context) -> None:
    """Time a suite of shapes against other attentions; every result is checked before it is timed."""
    inner = typer.Typer(add_completion=False)
    inner.command()(import_module("flashtile.bench.main").bench)
    code = typer.main.get_command(inner)(ctx.args, prog_name="flashtile bench", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


@app.command()
def fuzz(
    budget: Annotated[float, typer.Option(help="Seconds. On a GPU the first minute of a process goes into compiling.")] = 60.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same cases, another one others.")] = 0,
    backend: Annotated[
        list[str], typer.Option(help="hopper, triton or cpu; may be repeated. Default: all that run here.")
    ] = [],  # noqa: B006
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core. They share the GPUs.")] = None,
    variants: Annotated[
        int | None, typer.Option(min=1, help="End after so many: problems that differ in sizes and data.")
    ] = None,
    cases: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sizes and data to try of each variant. Default: 300 on a GPU, 20 on a CPU. "
            "0: of 300 those that have a kernel which their process has not had, so that most kernels run in the time.",
        ),
    ] = None,
    without: Annotated[list[str], typer.Option(help="Leave out cases whose line holds this; may be repeated.")] = [],  # noqa: B006
    repeat: Annotated[
        list[str], typer.Option(help="Run this one case, a line that was printed, and draw none; may be repeated.")
    ] = [],  # noqa: B006
    replay: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Run the cases of such a file.")] = None,
    setup: Annotated[str, typer.Option(help="MODULE:FUNCTION that every process calls first.")] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Failures are added to it as they are found, a line of JSON each.")
    ] = Path("fuzz-output/failures.jsonl"),
    summary: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON of counts and kernels; a later session adds to it.")
    ] = None,
) -> None:
    """Is flashtile right here? Draw whole problems and judge every result against float64.

    The exit code is 1 if one is wrong, or if none ran.
    """
    main, console = import_module("flashtile.fuzz.main"), Console()
    lines = [*repeat, *(main.lines_of(replay) if replay is not None else ())]
    if lines or replay is not None:
        raise typer.Exit(1 if main.repeat(lines, console, backend[0] if backend else "", setup) else 0)
    request = main.Request(budget, seed, tuple(backend), jobs, variants, cases, tuple(without), setup, summary=summary)
    counts = main.fuzz(request, output, console)
    raise typer.Exit(1 if counts.wrong or not counts.judged else 0)
