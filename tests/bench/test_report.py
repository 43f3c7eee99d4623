"""CSV to rows, tables and plots, from a file alone."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from flashtile.bench import plot, report
from flashtile.bench.cases import DIRECTIONS, suite_named
from flashtile.bench.result import COLUMNS, Result, Writer, describe, read, speed

SPEEDS = {
    "flashtile/triton/split": 1.0,
    "flashtile/triton/fused": 1.2,
    "base/triton/split": 0.8,
    "flex": 0.96,
    "sdpa/flash": 0.6,
}


def made(suite: str = "fa3-paper") -> list[Result]:
    rows: list[Result] = []
    for problem in suite_named(suite).cases:
        for direction in DIRECTIONS:
            about = describe(suite, problem)
            for provider, factor in SPEEDS.items():
                ms = 1.0 / factor
                rows.append(Result(
                    **about, direction=direction, provider=provider, status="ok", ms=ms, ms_low=ms, ms_high=ms,
                    tflops=speed(problem, direction, ms), error=1e-3, host_us=20.0 if direction == "forward" else None,
                    host_step_us=None if direction == "forward" else 70.0, device="Test GPU", torch="2.13", date="2026-01-02",
                ))  # fmt: skip
            rows.append(
                Result(**about, direction=direction, provider="fa4", status="wrong", reason="dq | is off", error=float("nan"))
            )
            rows.append(Result(**about, direction=direction, provider="sdpa/math", status="refused", reason="holds 8 GiB"))
    return rows


@pytest.fixture
def saved(tmp_path):
    writer = Writer(tmp_path / "out" / "results.csv")
    for row in made():
        writer.add([row])
    return writer.path


def test_rows_survive_the_csv(saved) -> None:
    rows = read(saved)
    assert len(rows) == len(made())
    for got, meant in zip(rows, made(), strict=True):
        if meant.status == "wrong":
            assert got.error != got.error
            got, meant = replace(got, error=None), replace(meant, error=None)
        for name in COLUMNS:
            value = getattr(meant, name)
            assert getattr(got, name) == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
        assert got.problem.spell() == got.spelling


def test_a_foreign_csv_is_refused(tmp_path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"lacks the columns .*spelling.*must be written by flashtile bench"):
        read(tmp_path / "x.csv")


def test_a_row_that_was_cut_off_is_refused_wherever(saved) -> None:
    first, *rest = saved.read_text().splitlines()
    row = rest[0]
    places = [i for i, letter in enumerate(row) if letter == ","]
    for place in [*places, *(i + 2 for i in places[:-1])]:
        saved.write_text(f"{first}\n{row[:place]}")
        with pytest.raises(ValueError, match=r"cannot be read as a CSV written by flashtile bench"):
            read(saved)


def test_speeds_have_the_best_bold_and_the_ratio(saved) -> None:
    grid = report.speeds(read(saved))
    assert grid.header == ("case", "pass", *SPEEDS, "fa4", "ours / best peer")  # who refused everything has no column
    assert len(grid.rows) == 36
    for row in grid.rows:
        assert [cell.best for cell in row].index(True) == grid.header.index("flashtile/triton/fused")
        assert row[-1].text == "1.25x"
        assert row[grid.header.index("fa4")].text == "WRONG"
    assert grid.rows[0][0].text == "B16 H32 S1024 D64 causal bf16"


def test_means_and_base_ratios(saved) -> None:
    means = report.means(read(saved))
    assert means.header == ("ours", "best peer", "flex", "sdpa/flash")
    fastest = next(row for row in means.rows if row[0].text == "fastest of ours, fwd")
    assert [cell.text for cell in fastest[1:4]] == [f"{r}x ({r} to {r}, 18 cases)" for r in ("1.25", "1.25", "2.00")]
    base = report.base_ratios(read(saved))
    assert base.header == ("case", "pass", "flashtile/triton/split")
    assert base.rows[0][2].text == base.rows[-1][2].text == "1.25x"
    assert base.rows[-1][0].text == "geometric mean"


def test_markdown_and_terminal_say_the_same(saved) -> None:
    results = read(saved)
    text = report.markdown(results)
    assert text.count("\n| B16 H32 S1024 D64 causal bf16 | fwd |") == 3  # speed, base, host time
    assert "| fa4 | wrong | 36 | dq \\| is off |" in text
    assert "Test GPU; torch 2.13; 2026-01-02" in text
    console = Console(width=300, record=True, file=StringIO())
    report.show(results, console)
    shown = console.export_text()
    for cell in ("WRONG", "1.25x", "holds 8 GiB", "host time per call"):
        assert cell in shown


@pytest.mark.parametrize("suite", ["jax-split", "cudnn-cross"])
def test_plot_has_a_panel_per_depth_mask_and_direction(suite, tmp_path, monkeypatch) -> None:
    writer = Writer(tmp_path / "r.csv")
    writer.add(made(suite))
    titles: list[str] = []
    draw_panel = plot._draw_panel
    monkeypatch.setattr(plot, "_draw_panel", lambda *args: titles.append(args[-1]) or draw_panel(*args))
    plot.draw(read(writer.path), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    panels = {(p.head_dim, p.mask) for p in suite_named(suite).cases}
    assert len(titles) == len(set(titles)) == 2 * len(panels)


def test_nothing_timed_is_no_plot(tmp_path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.draw([row for row in made("smoke") if row.status != "ok"], tmp_path / "p.png")


def test_a_small_ratio_is_not_nothing() -> None:
    """A CPU under load gives such ones in the smoke suite: no "0.00x"."""
    slow = [replace(r, tflops=r.tflops / 3000) if r.side == "own" and r.tflops else r for r in made()]
    text = report.markdown(slow)
    told = [cell.text for row in report.means(slow).rows for cell in row]
    assert not any("0.00x" in text or "(0.00 " in text or "to 0.00," in text for text in told)
    assert "| 0.0004x |" in text
    assert report.means(made()).rows[0][1].text.startswith("1.25x (1.25 to 1.25, ")
