"""README and the pages for users are short and plain: lines that fit, sentences that end, figures of one card."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flashtile.bench.cases import suite_named
from flashtile.bench.result import read as read_bench
from tools import error_table, front_page, script_tables, shapes
from tools.companion_tables import read

ROOT = Path(__file__).parent.parent
LINES, COLUMNS, WORDS = 140, 160, 40
GUIDES = ("answers", "tutorials", "how-to", "explanation", "reference", ".")
GENERATED = {"benchmarks.md", "goals.md"}  # the lab's pages are records, one entry an experiment
FOUND = (path for kind in GUIDES for path in sorted((ROOT / "docs" / kind).glob("*.md")) if path.name not in GENERATED)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    *(path.relative_to(ROOT).as_posix() for path in FOUND),
]
MEASURED_ON = {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}


def prose(text: str) -> str:
    """The text without code, tables, pictures and headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(\||!\[|#|<!--).*$", "", text, flags=re.MULTILINE)


def sentences(text: str) -> list[str]:
    """What ends with a full stop, a colon at the end of a line, or a paragraph or an item of a list."""
    told = re.sub(r"\]\([^)]*\)|<!--.*?-->", "", prose(text))
    return [part for part in re.split(r"(?<=[.?!])\s+|(?<=:)\s*\n|\n\s*\n|\n\s*(?:[-*]|\d+\.) ", told) if part.strip()]


def test_readme_is_one_page_that_begins_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= LINES
    first = lines.index("```")
    assert lines[first : first + 4] == ["```", "make demo", "make test", "```"]
    above = sentences("\n".join(lines[1:first]))
    assert [sentence.strip().endswith(".") for sentence in above] == [True], "one sentence, that says what the library is"


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit(page: str) -> None:
    wide = [line for line in prose((ROOT / page).read_text()).splitlines() if len(line) > COLUMNS]
    assert wide == []


@pytest.mark.parametrize("page", PAGES)
def test_sentences_end(page: str) -> None:
    long = [sentence for sentence in sentences((ROOT / page).read_text()) if len(sentence.split()) > WORDS]
    assert long == []


def test_the_test_of_prose_can_fail() -> None:
    text = "# T\n\n```python\n" + "x " * 99 + "\n```\n| " + "x " * 99 + "|\n\n- One. Two\n- " + "word " * 41 + "\n"
    assert [len(sentence.split()) for sentence in sentences(text)] == [2, 1, 41]


def test_every_figure_of_readme_is_of_the_card_that_it_names() -> None:
    folder = ROOT / "benchmarks" / "results"
    stems = [*front_page.SUITES, front_page.FIGURE, "varlen", "companions", "fa3-paper", "hopper-forward", "features-hopper"]
    devices = {row["device"] for stem in (*stems, "field-tests") for row in read(folder / f"{stem}-{front_page.CARD}.csv")}
    assert devices - {""} == {"NVIDIA H100 80GB HBM3"}, "rows that were refused name no device"
    assert "on one NVIDIA H100 80GB:" in (ROOT / "README.md").read_text()


def of(told: str, rows: Sequence[Mapping[str, str]]) -> None:
    """What a text says of head dims, tokens, dtypes and masks is what rows of a CSV have that were timed."""
    timed = [row for row in rows if row["tflops"]]
    (depths,) = re.findall(r"head_dim (\d+(?:(?:, | with values of )\d+)*)", told)
    assert set(re.findall(r"\d+", depths)) == {row[name] for row in timed for name in ("head_dim", "head_dim_v")}
    lengths = [int(n.replace(",", "").replace("k", "")) * (1024 if n.endswith("k") else 1)
               for n in re.findall(r"[\d,]+k?(?= to | tokens| queries| keys)", told)]  # fmt: skip
    had = sorted({int(row[name]) for row in timed for name in ("seqlen_q", "seqlen_k")})
    assert {min(lengths), max(lengths)} == {had[0], had[-1]}
    assert set(re.findall(r"fp16|bf16|fp32", told.rpartition(" tokens")[2])) <= {row["dtype"] for row in timed}
    assert {row["dtype"] for row in timed} <= set(re.findall(r"fp16|bf16|fp32", told))
    masks = {{"yes": "causal", "no": "full"}[row["causal"]] for row in timed}
    assert set(re.findall(r"causal|full", told.rpartition(";")[2])) == masks


def test_what_tables_say_of_a_suite_is_what_its_rows_have() -> None:
    folder = ROOT / "benchmarks" / "results"
    for stem in front_page.SUITES:
        of(front_page.called(folder, stem).rpartition(" (")[0], read(folder / f"{stem}-{front_page.CARD}.csv"))
    contents = "".join(path.read_text() for path in (ROOT / "docs" / "benchmarks").glob("*.md"))
    suites = [path for path in sorted(folder.glob("*.csv")) if path.read_text().startswith("suite,")]
    assert len(suites) > 10
    for path in suites:
        rows = read(path)
        (told,) = re.findall(rf"^## {path.stem}\n\n(.*)$", contents, re.MULTILINE)
        (shape,) = re.findall(r"head_dim [^.()]*", told)
        of(shape.rstrip(), rows)
        for provider in {row["provider"] for row in rows if row["tflops"] and not row["provider"].startswith("flashtile/")}:
            assert "The same" in told or "PyTorch's own" in told or shapes.PEERS[provider] in told, provider


def test_what_is_said_of_own_shapes_is_what_their_rows_have(tmp_path: Path) -> None:
    file = ROOT / "benchmarks" / "results" / f"{shapes.OWN_SHAPES}.csv"
    rows = [row for row in read(file) if row["tflops"]]
    best: dict[tuple[str, str, bool], float] = {}  # of a shape, a pass, and ours or theirs
    for row in rows:
        place = row["spelling"], row["direction"], row["provider"].startswith("flashtile/")
        best[place] = max(best.get(place, 0.0), float(row["tflops"]))
    table = shapes.own_table(file.parent)
    told = [line for line in table.splitlines() if line.startswith("| 80 | `B4 H25 S4096 D80 causal bf16` |")]
    cells = (tuple(best["attention(q=4x4096x25x80,kv=4096x25x80,bf16,band=:0)", way, own] for own in (True, False))
             for way in ("forward", "backward"))  # fmt: skip
    expected = " | ".join(f"{ours:.0f}, {ours / theirs:.2f}x cuDNN" for ours, theirs in cells)
    assert told == [f"| 80 | `B4 H25 S4096 D80 causal bf16` | {expected} |"]
    assert table.count("`") == 2 * len({row["spelling"] for row in rows})
    written, header, *lines = tmp_path / file.name, *file.read_text().splitlines(keepends=True)
    written.write_text("".join([header, *(line.replace(",4096,4096,", ",4096,77,") for line in lines if ",96,96," in line)]))
    few = shapes.own_shapes(tmp_path, few=True)
    assert few.startswith("head_dim 96: forward ")
    ratios = [best[spelling, "forward", True] / best[spelling, "forward", False] for spelling, way, own in best
              if own and way == "forward" and "x96," in spelling]  # fmt: skip
    assert f"forward {min(ratios):.2f}x to {max(ratios):.2f}x," in few
    assert shapes.own_shapes(tmp_path, few=False) == "not measured"


def test_the_same_on_an_h200_has_no_shape_that_the_h100_has_not() -> None:
    folder = ROOT / "benchmarks" / "results"
    same = [stem for stem, text in script_tables.NOTES.items() if text.startswith("The same on an H200")]
    assert len(same) > 3
    for stem in same:
        here, there = (
            {row["spelling"] for row in read(folder / f"{name}.csv")} for name in (stem, stem.replace("h200", "h100"))
        )
        assert here == there, stem


def test_the_test_of_a_suite_s_words_can_fail() -> None:
    row = dict(head_dim="64", head_dim_v="64", seqlen_q="1024", seqlen_k="1024", dtype="fp16", causal="yes", tflops="1")
    right = "head_dim 64; 1k tokens; fp16, causal"
    of(right, [row])
    for wrong in (("64", "64, 128"), ("1k", "1k to 2k"), ("fp16", "bf16"), ("causal", "full and causal")):
        with pytest.raises(AssertionError):
            of(right.replace(*wrong), [row])


def test_a_training_step_s_table_is_what_the_rows_say() -> None:
    """One cell, added up by hand: 16k causal tokens of head_dim 128 beside FlashAttention-4."""
    rows = read(ROOT / "benchmarks" / "results" / f"{front_page.FIGURE}-{front_page.CARD}.csv")
    shape = {"head_dim": "128", "causal": "yes", "seqlen_q": "16384"}
    mine = [row for row in rows if shape.items() <= row.items()]
    ms = {who: sum(float(row["ms"]) for row in mine if row["provider"] == who) for who in ("flashtile/hopper", "fa4")}
    (line,) = (line for line in (ROOT / "docs" / "limits.md").read_text().splitlines() if line.startswith("| 128, causal |"))
    assert line.endswith(f" {ms['fa4'] / ms['flashtile/hopper']:.2f}x |")


def test_models_are_told_by_the_suite_s_shapes_and_a_step_of_one_is_added_up_by_hand() -> None:
    """Llama 3 8B, both passes beside each peer; whoever has no time is in the legend, with the reason."""
    folder = ROOT / "benchmarks" / "results"
    assert list(shapes.MODELS) == [case.spell() for case in suite_named("models").cases]
    rows = [row for row in read(folder / f"{front_page.TRAINED}.csv") if shapes.MODELS[row["spelling"]] == "Llama 3 8B"]
    ours, *peers = (
        sum(float(row["ms"]) for row in rows if row["provider"] == who) for who in ("flashtile/hopper", "sdpa/cudnn", "fa4")
    )
    cudnn, fa4 = (f"{peer / ours:.2f}x" for peer in peers)
    (line,) = (line for line in front_page.models(folder).splitlines() if line.startswith("| Llama 3 8B |"))
    assert line.endswith(f" {cudnn} | {fa4} |")
    timed = read_bench(folder / f"{front_page.TRAINED}.csv")
    assert shapes.legend(timed).endswith(", ViT-L `B64 H16 S577 D64 full bf16`")
    lost = [replace(r, status="skipped", reason="no time", ms=None, tflops=None) if "577" in r.spelling else r for r in timed]
    said = shapes.legend(lost)
    assert "Llama 3 8B `B2 H32/8 S8192 D128 causal bf16`, " in said
    assert said.endswith("(no time): ViT-L `B64 H16 S577 D64 full bf16`")


def test_a_combination_counts_where_its_features_met_and_a_backward_ran(tmp_path: Path) -> None:
    met = "attention(band=9:0,score=alibi(1x2:bf16),sink=2:fp32,dropout=0.1)"
    rows = ["section,backward,failure,problem"]
    rows += [f'pairs,{way},{failure},"{problem}"' for way, failure, problem in (
        ("split", "", met), ("split", "", met.replace(")", "),where=document(8)", 1)), ("none", "", met), ("fused", "off", met),
        ("fused", "", met.replace("9:0", ":0")), ("fused", "", met.replace("sink=2:fp32,", "")))]  # fmt: skip
    (tmp_path / "pairs-h100.csv").write_text("\n".join(rows))
    (tmp_path / "pairs-hopper-h100.csv").write_text("\n".join(rows[:2]))
    told = "2 calls by the portable kernels and 1 by Hopper's, with documents in 1 and 0 of these"
    assert script_tables.trained_pairs(tmp_path) == told


def test_gains_of_blocks_and_bounds_of_large_scores_are_added_up_by_hand() -> None:
    rows = [row for row in read(ROOT / "benchmarks" / "results" / "varlen-h100.csv") if row["note"] == "32768 tokens"]
    ms = {row["name"]: float(row["ms"]) for row in rows if (row["section"], row["direction"]) == ("blocks", "bwd")}
    page = (ROOT / "docs" / "how-to" / "block-masks.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("| 32,768 | 95 % | 20x |"))
    assert f" {ms['dense'] / ms['flashtile 95%']:.1f}x | " in line
    assert line.endswith(f", {ms['flex 95%'] / ms['flashtile 95%']:.2f} |")
    assert error_table.factor(1e5) == pytest.approx(1 + 4.3 / 2**24 * 1e5, abs=5e-4)
    assert error_table.factor(1e5, 128) == pytest.approx(error_table.factor(1e5) * math.exp(8 * 2 / 2**23 * 1e5))
    assert "| 10^5 | 1.026 | 1.13 | 1.24 |" in (ROOT / "docs" / "limits.md").read_text()


def test_builds_are_told_of_by_rows_of_several_processes(tmp_path: Path) -> None:
    """A row of one process is no word on a build; the worst host's time stands with how far the base lies apart."""
    rows = ["cell,pass,unit,of_base,spread,starts,commit"]
    rows += [f"costs-{name},{which},ms,{ratio},1.01,5,new" for name in ("bias", "dropout")
             for which, ratio in (("forward", 1.25), ("backward", 1.5))]  # fmt: skip
    rows += ["host,forward,host_us,3.0,1.5,1,old", "costs-bias,forward,ms,3.0,1.5,1,old"]
    rows += [
        f"host-{i},both,host_us,{ratio},{spread},5,new" for i, (ratio, spread) in enumerate(((1.2, 1.3), (0.9, 1.1), (1.1, 1)))
    ]
    (tmp_path / "builds-h200.csv").write_text("\n".join(rows))
    said = script_tables.builds(tmp_path).replace("\n", " ")
    assert "with a bias take 1.250 and 1.500 of their time at c6ffcb5" in said
    assert "(causal; medians of 5 processes a build)" in said
    assert "0.900 to 1.100 of c6ffcb5's in 2 cases, and 1.200 in one, where c6ffcb5's own processes lie 1.300 apart" in said


def test_what_is_behind_a_peer_begins_with_the_least_figures_of_the_table() -> None:
    """The first row of README's table has the least of each pass; what is below 1 there is named, and nothing else."""
    folder = ROOT / "benchmarks" / "results"
    (row,) = (line for line in front_page.speed(folder).splitlines() if front_page.called(folder, front_page.FIGURE) in line)
    least = dict(zip(("forward", "backward"), re.findall(r"\((\d\.\d\d) to", row), strict=True))
    found: dict[str, str] = {}
    for what, speed, _ in front_page.behind(folder):
        found.setdefault(what.partition(",")[0].split()[1], speed.removesuffix("x"))
    assert found == {direction: figure for direction, figure in least.items() if float(figure) < 1.0}


def test_the_guide_names_the_versions_of_readme_s_rows() -> None:
    folder = ROOT / "benchmarks" / "results"
    told = dict(re.findall(r"^\| (\w[^|]*?) \| (\d\S*) \|$", (ROOT / "docs/how-to/benchmarks.md").read_text(), re.MULTILINE))
    names = {
        "PyTorch": "torch",
        "Triton": "triton",
        "FlashAttention-4 (`flash-attn-4`)": "flash_attn",
        "NVIDIA driver": "driver",
    }
    names |= {"Python": "python", "cuDNN, which comes with PyTorch": "cudnn"}
    assert told.keys() == names.keys()
    rows = [row for stem in front_page.SUITES for row in read(folder / f"{stem}-{front_page.CARD}.csv") if row["device"]]
    for name, column in names.items():
        known = {row[column] for row in rows} - {""}
        if column == "cudnn":  # 9.19.0 as one number
            known = set(map(front_page.cudnn, known))
        assert known == {told[name]}, name


def test_no_other_gpu_has_rows() -> None:
    """README and docs/limits.md say so."""
    rows = (row for path in (ROOT / "benchmarks" / "results").glob("*.csv") for row in read(path))
    found = {row["device"] for row in rows if row.get("device")}
    assert {device for device in found if not any(cpu in device for cpu in ("Xeon", "EPYC"))} == MEASURED_ON
