"""The documentation shows code that exists and runs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashtile
from tools import answer_pages, benchmark_pages, evidence, goals

ROOT = Path(__file__).parent.parent
Shown = Callable[[str, str], Any]
PAGES = ["README.md", "CONTRIBUTING.md", *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("place", "count"), [(0, 3), (1, 3), (2, 6)], ids=["softcap", "dilated", "softmax"])
def test_the_diffs_of_add_a_feature_are_the_code(place: int, count: int) -> None:
    parts = re.split(r"^--- .*\n", blocks("docs/add-a-feature.md", "diff")[place], flags=re.MULTILINE)[1:]
    assert len(parts) == count
    for part in parts:
        header, _, body = part.partition("\n")
        path = ROOT / header.removeprefix("+++ b/")
        for hunk in re.split(r"^@@.*@@\n", body, flags=re.MULTILINE)[1:]:
            after = "\n".join(line[1:] for line in hunk.splitlines() if not line.startswith("-"))
            assert after in path.read_text(), f"docs/add-a-feature.md shows lines that {header} does not have:\n{after}"


def test_what_is_generated_is_what_the_results_and_the_backends_say() -> None:
    """In one process of its own, where kernels are not interpreted: README asks the backends what the support matrix asks."""
    pytest.importorskip("triton")
    code = (
        "from tools.make_docs import *; page = lambda name: (ROOT / 'docs' / name).read_text();"
        "said = {'support.md': support(evidence.read(RESULTS)), 'goals.md': goals.page(RESULTS)};"
        "said |= {**benchmark_pages.pages(RESULTS), 'reference/arguments.md': argument_page.page()};"
        "said |= {name: answers(page(name)) for name in (f'answers/{group}.md' for group in answer_pages.GROUPS)};"
        "said |= {name: made(page(name)) for name, made in (('../README.md', readme), ('explanation/numerics.md', numerics),"
        " ('jax.md', jax), ('features.md', features), ('limits.md', limits), ('answers.md', answers),"
        " ('reference/environment.md', environment), ('tutorials/cache.md', caches), ('how-to/fp8.md', fp8),"
        " ('how-to/block-masks.md', block_masks))};"
        "print(*sorted(said)); print(*(name for name, text in said.items() if text != page(name)))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    groups = " ".join(sorted(f"answers/{group}.md" for group in answer_pages.GROUPS))
    rows = " ".join(sorted(f"benchmarks/{page}.md" for page in benchmark_pages.SUBJECTS))
    generated = (
        f"../README.md answers.md {groups} benchmarks.md {rows} explanation/numerics.md features.md goals.md "
        "how-to/block-masks.md how-to/fp8.md "
        "jax.md limits.md reference/arguments.md reference/environment.md support.md tutorials/cache.md"
    )
    assert done.stdout == f"{generated}\n\n", "run `make docs` for the pages of the second line"


def test_a_goal_that_nobody_measured_is_not_reached(tmp_path: Path) -> None:
    figures = [figure for section in goals.sections(tmp_path, "h100") for figure in section.figures]
    assert len(figures) > 20
    assert [figure.what for figure in figures if figure.reached] == []


def test_a_goal_is_reached_from_its_bound_on(tmp_path: Path) -> None:
    rows = ["provider,what,host_us,commit"]
    rows += [f"{who},{what},{us},abc" for what, (mine, theirs) in {"forward": (12, 10), "forward+backward": (12.1, 10)}.items()
             for who, us in (("flashtile", mine), ("sdpa/flash", theirs))]  # fmt: skip
    (tmp_path / "host-h100.csv").write_text("\n".join(rows))
    (host,) = (section for section in goals.sections(tmp_path, "h100") if section.files == ("host-h100.csv",))
    assert [(figure.value, figure.reached) for figure in host.figures] == [(1.2, True), (1.21, False)]
    assert "1.210 | at most 1.200 | no | abc |" in goals.page(tmp_path)


def test_what_building_lists_takes_is_a_goal(tmp_path: Path) -> None:
    (tmp_path / "varlen-h100.csv").write_text(
        "section,name,direction,ms,ratio,of,note,failure,commit\nbuild,d,,19,62,MiB,,,abc\n"
    )
    (unequal,) = (section for section in goals.sections(tmp_path, "h100") if section.files == ("varlen-h100.csv",))
    built = [(f.what.rpartition(" ")[2], f.reached) for f in unequal.figures if "64k x 64k" in f.what]
    assert built == [("ms", True), ("MB", False)], "62 MiB are 65 MB"


PLAIN = "attention(q=1x128x2x64,kv=128x2x64,bf16)"
SINK = "attention(q=2x512x4x64,kv=512x4x64,bf16,band=:0,sink=4:fp32:grad)"
MEASURED = dict(
    spelling=SINK, provider="flashtile/triton/split", direction="forward", device="NVIDIA A100-SXM4-80GB", status="ok"
)


def support_of_sinks(*rows: dict[str, str]) -> str:
    pytest.importorskip("triton")
    problem = "attention(q=1x128x4x64,kv=128x4x64,bf16,sink=4:fp32:grad)"
    return evidence.cell(problem, "auto", "sm80", [seen for row in rows for seen in evidence.of_row(row, "features-a100")])


def test_a_feature_has_run_where_a_row_measured_it() -> None:
    backward = MEASURED | {"direction": "backward"}
    assert support_of_sinks() == "compiled for (triton)"
    assert support_of_sinks(MEASURED, backward) == "run on (triton)"
    assert support_of_sinks(MEASURED) == "forward run on (triton), backward compiled for (triton)"
    for other in (SINK.replace(":grad", ""), SINK.replace(",sink=4:fp32:grad", "")):  # no gradient, no sink
        assert support_of_sinks(MEASURED, backward | {"spelling": other}).startswith(
            "forward run on (triton), backward compiled"
        )


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H100"}, {"device": ""}, {"provider": "sdpa/cudnn"}, {"provider": "flashtile/hopper"},
        {"status": "wrong"}, {"failure": "off by 1"}, {"breach": "out"}, {"spelling": PLAIN}, {"spelling": "norm(x=1x8:bf16)"},
        {"spelling": SINK.replace("bf16", "fp16")},
    ],
)  # fmt: skip
def test_other_rows_prove_nothing(change: dict[str, str]) -> None:
    assert support_of_sinks(MEASURED) != support_of_sinks(MEASURED | change) == "compiled for (triton)"


def test_a_cache_has_run_where_a_row_of_pages_measured_it() -> None:
    pytest.importorskip("triton")
    decode = "cached(attention(q=4x1x8x128,kv=1024x2x128,bf16,used=k),pages=64x16x64,split=512)"
    sizes = dict(batch="1", queries="1", keys="1024", heads_q="32", heads_kv="8", head_dim="128")
    row = sizes | dict(provider="flashtile/16", device="NVIDIA H100 80GB HBM3")

    def told(**change: str) -> str:
        return evidence.cell(decode, "auto", "sm90", list(evidence.of_row(row | change, "cached-h100")))

    assert told() == "run on (triton)"
    for change in (dict(provider="flashtile/contiguous"), dict(provider="sdpa"), dict(failure="off by 1"), dict(device="L40S")):
        assert told(**change) == "compiled for (triton)"


def test_what_a_cache_s_table_says_to_have_run_is_of_caches_files_alone(tmp_path: Path) -> None:
    from tools.cache_rows import measured

    row = "model,provider,us,failure,device\nmla-16,flashtile/64,9,,NVIDIA H200\nmla-16,flashtile/64/e4m3,9,wrong,NVIDIA H200\n"
    for stem in ("cached", "stored", "fp8"):
        (tmp_path / f"{stem}-h200.csv").write_text(row.replace("64", {"cached": "16", "stored": "64", "fp8": "256"}[stem]))
    seen = {("NVIDIA H200", "triton", f"flashtile/{rows}/mla") for rows in (16, 64)}
    assert measured(tmp_path) == seen
    row = "model,provider,us,window,device\nllama3-8b,flashtile/16,9,1023,NVIDIA H200\n"
    (tmp_path / "cached-hopper-h200.csv").write_text(row)
    (tmp_path / "padded-h200.csv").write_text("model,provider,us,device\nllama3-8b,first_k,9,NVIDIA H200\n")
    assert measured(tmp_path) - seen == {
        ("NVIDIA H200", "hopper", "flashtile/16/window"), ("NVIDIA H200", "hopper", "first_k")
    }  # fmt: skip


def test_rows_of_scripts_speak_by_their_files_names() -> None:
    (seen,) = evidence.of_row({"problem": PLAIN, "device": "H100", "tile": "128x128"}, "hopper-forward-h100")
    assert (seen.backend, seen.direction, seen.traits) == ("hopper", "forward", {"bf16"})
    (seen,) = evidence.of_row({"problem": PLAIN, "device": "H100", "provider": "64-deterministic"}, "hopper-backward-h100")
    assert (seen.direction, seen.traits) == ("backward", {"bf16", "deterministic", "variant fused"})
    assert not list(evidence.of_row({"problem": PLAIN, "device": "H100", "provider": "sdpa/cudnn"}, "hopper-backward-h100"))


def test_products_of_e4m3_have_run_where_they_were_judged() -> None:
    """Keys and values of 8 bits under 16-bit queries say nothing of them, nor does a time without a problem."""
    products = "attention(q=1x128x2x64,kv=128x2x64,bf16,stored=e4m3:head:head:head)"
    row = {"section": "speed", "problem": products, "backend": "triton", "direction": "forward", "device": "RTX 5090"}

    def told(**change: str) -> str:
        return evidence.cell(products, "auto", "sm120", list(evidence.of_row(row | change, "fp8-5090")))

    assert told() == "forward run on (triton)"
    stored = products.replace(":head:head:head", ":head:head")
    for change in (
        dict(problem=stored),
        dict(problem=""),
        dict(backend="hopper"),
        dict(failure="off by 1"),
        dict(device="A10"),
    ):
        assert told(**change) == "forward compiled for (triton)"


def test_the_readme_s_pytorch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = blocks("README.md", "python")[0]
    assert len([line for line in example.splitlines() if line]) <= 6
    exec(example.replace("2, 1024, 8, 64", "1, 32, 2, 16"), {})  # small: the kernels may be interpreted
    assert "forward: " in capsys.readouterr().out


def test_the_readme_s_flash_attn_runs() -> None:
    names: dict[str, Any] = {}
    try:
        exec(blocks("README.md", "python")[1].replace("2, 1024, 8, 64", "1, 32, 2, 16"), names)
    finally:
        flashtile.compat.uninstall("flash_attn")  # pyright: ignore[reportAttributeAccessIssue]
    assert names["out"].shape == (1, 32, 2, 16)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What imports a class that a page shows: Triton reads sources from files."""

    def of(page: str, name: str) -> Any:
        code = next(block for block in blocks(page, "python") if f"class {name}" in block)
        (tmp_path / f"shown_{name.lower()}.py").write_text(code.partition("\nout = ")[0])
        monkeypatch.syspath_prepend(tmp_path)
        return getattr(importlib.import_module(f"shown_{name.lower()}"), name)

    return of


def test_the_modifier_of_add_a_feature_runs(shown: Shown, device: Any) -> None:
    pytest.importorskip("triton")
    import torch

    Locality = shown("docs/add-a-feature.md", "Locality")
    q, k, v = (torch.randn(1, 32, 2, 16, device=device) for _ in range(3))
    bend = Locality(0.5)
    out = flashtile.attention(q, k, v, score=(bend,))
    distance = (torch.arange(32)[:, None] - torch.arange(32)).abs().to(device)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - 0.5 * distance.float().log1p()
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_the_predicate_of_add_a_feature_runs(shown: Shown, device: Any) -> None:
    pytest.importorskip("triton")
    import torch

    Parity = shown("docs/add-a-feature.md", "Parity")
    q, k, v = (torch.randn(1, 32, 2, 16, device=device) for _ in range(3))
    out = flashtile.attention(q, k, v, mask=Parity(0) & flashtile.Band(right=0))
    at = torch.arange(32, device=device)
    keep = ((at[:, None] + at) % 2 == 0) & (at <= at[:, None])
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=keep)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_the_mask_of_an_answer_runs(shown: Shown, device: Any) -> None:
    pytest.importorskip("triton")
    import torch

    Every = shown("docs/answers/masks.md", "Every")
    q, k, v = (torch.randn(1, 32, 2, 16, device=device) for _ in range(3))
    out = flashtile.attention(q, k, v, mask=Every(4) | flashtile.Band(right=0), options=flashtile.Options(backend="triton"))
    at = torch.arange(32, device=device)
    keep = (at % 4 == 0) | (at <= at[:, None])
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=keep)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_the_code_of_the_guides_runs(tmp_path: Path) -> None:
    """Each page from its first block to its last, where kernels are not interpreted; what begins with "# needs" is left out."""
    ran: list[str] = []
    for page in PAGES:
        guide = (
            page.startswith(("docs/tutorials/", "docs/how-to/", "docs/reference/", "docs/explanation/"))
            and page != "docs/tutorials/jax.md"
        )
        text = (ROOT / page).read_text() if guide else ""  # tests/jax runs that of JAX
        found = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
        code = "\n".join(textwrap.dedent(block) for block in found if not block.lstrip().startswith("# needs"))
        if code:
            ran.append(page.replace("/", "-").replace(".md", ".py"))
            (tmp_path / ran[-1]).write_text(code)  # Triton reads sources from files
    assert len(ran) > 10
    assert any(name.startswith("docs-explanation-") for name in ran)
    (tmp_path / "all.py").write_text(f"import runpy\nfor page in {ran}:\n    print(page)\n    runpy.run_path(page)\n")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "all.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pictures_are_what_the_tool_draws() -> None:
    from tools import pictures

    folder = ROOT / "docs" / "explanation"
    assert {path.stem for path in folder.glob("*.svg")} == pictures.PICTURES.keys()
    for name, draw in pictures.PICTURES.items():
        assert (folder / f"{name}.svg").read_text() == draw(), "run `python tools/pictures.py`"


def links(page: str) -> set[str]:
    """The pages that a page links to."""
    home = (ROOT / page).parent
    found = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", (ROOT / page).read_text())
    return {(home / target).resolve().relative_to(ROOT.resolve()).as_posix() for target in found}


def test_a_reader_of_readme_reaches_every_page_of_the_menu() -> None:
    """By links of README and of pages that it reaches; the pages that tools/site_pages.py writes are the menu's alone."""
    menu = set(re.findall(r"[ :]([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {f"docs/{page}" for page in menu if (ROOT / "docs" / page).exists()}
    assert pages == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}, "every page is in the menu"
    reached, new = set[str](), {"README.md"}
    while new:
        reached |= new
        new = {target for page in new for target in links(page)} - reached
    assert pages - reached == set()


def test_what_a_page_of_the_site_loads_from_elsewhere_is_seen() -> None:
    """`make site` fails on it."""
    from tools.site_links import elsewhere

    here = '<script src="assets/a.js"></script><a href="https://example.org/">x</a><link rel="stylesheet" href="../a.css">'
    assert elsewhere(here) == []
    for tag in (
        '<script defer src="https://a.org/b.js">',
        "<img src='//a.org/b.png'>",
        '<link rel="x" href=http://a.org/c.css>',
    ):
        assert len(elsewhere(here + tag)) == 1


PARTS = (r"\*\*Question\.\*\* ", r"\*\*Change\.\*\* ", r"\*\*Result[.,]", r"\*\*Commit\.\*\* Written down in [0-9a-f]{7}")
ENTRY = re.compile(r"^### \d+\. .*\n\n" + r"[^#]*?\n\n".join(PARTS), re.MULTILINE)


def test_every_experiment_of_the_lab_has_its_four_parts() -> None:
    for page, least in {"hopper-forward": 120, "hopper-backward": 39, "tuning": 40}.items():
        text = (ROOT / "docs" / "lab" / f"{page}.md").read_text()
        headings = re.findall(r"^### \d+\. ", text, re.MULTILINE)
        assert len(headings) >= least
        assert len(ENTRY.findall(text)) == len(headings), page


@pytest.mark.parametrize("page", PAGES)
def test_every_row_of_a_table_has_the_cells_of_its_header(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for header, rows in re.findall(r"^(\|.*\|)\n\|(?: --- \|)+\n((?:(?!<!--).+\n)*)", text + "\n", re.MULTILINE):
        cells = len(re.findall(r"(?<!\\)\|", header))
        for row in rows.splitlines():
            assert row.startswith("|"), f"{page} has a table that breaks off at: {row}"
            assert len(re.findall(r"(?<!\\)\|", row)) == cells, f"{page}: {row}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_docs_name_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    home = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (home / target).exists(), f"{page} links to {target}"
    for name in re.findall(r"`((?:flashtile|tests|tools|benchmarks|docs)/[\w/.-]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_a_link_to_a_file_s_rows_is_right_on_every_page_and_in_the_list() -> None:
    assert benchmark_pages.subject("cached-hopper-cells-h200") == "caches"
    assert benchmark_pages.subject("cached-h200") == "caches-log"
    assert benchmark_pages.subject("nobody-knows-h100") == "others"
    text = "[a](#cpu-epyc), [b](#fuzz-h200), [Goals](goals.md)"
    assert benchmark_pages.moved(text, "cpu") == "[a](#cpu-epyc), [b](others.md#fuzz-h200), [Goals](../goals.md)"
    stems = [stem for own in benchmark_pages.stems(ROOT / "benchmarks" / "results").values() for stem in own]
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [stem for stem in stems if f'<a id="{stem}"></a>' not in listed] == [], "old links lead there"


def test_links_of_the_site_to_pages_stay_and_those_to_files_become_words() -> None:
    from tools.site_links import NO_PAGE

    def shown(text: str) -> str:
        return NO_PAGE.sub(lambda link: link[1], text)

    for kept in ("[rows](../benchmarks/jax.md#h100)", "[rows](benchmarks.md)", "[how](how-to/benchmarks.md)"):
        assert shown(kept) == kept
    for file in ("../../examples/generate.py", "../examples/c", ".github/ISSUE_TEMPLATE/error.md", "../../.github/a.md"):
        assert shown(f"see [this]({file}).") == "see this."
