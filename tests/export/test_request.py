"""What may be asked of `flashtile export`, and what it answers otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.export.main import Request, export, name_of, read
from flashtile.problem.attention import AttentionProblem
from tests.export.conftest import ROOT, environment

PLAIN = "attention(q=1x1x4x128,kv=1x1x128,bf16,band=:0)"
PACKED = "attention(q=1x1x1x64,kv=1x1x64,fp32,band=:0"


@pytest.mark.parametrize(
    ("problems", "architectures", "layout", "message"),
    [
        ((PLAIN,), ("sm_90",), "bsdh", "layout is 'bsdh'; it must be one of bshd, bhsd, llmc"),
        ((), ("sm_90",), "bshd", "there is no problem"),
        ((PLAIN,), (), "bshd", "there is no architecture"),
        ((PLAIN,), ("sm_91",), "bshd", "architecture is 'sm_91'; it must be one of sm_80"),
        ((PLAIN,), ("gfx942",), "bshd", "architecture is 'gfx942'"),
    ],
)
def test_requests(problems: tuple[str, ...], architectures: tuple[str, ...], layout: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message.replace("(", r"\(")):
        Request(problems, architectures, layout)


@pytest.mark.parametrize(
    ("problems", "layout", "message"),
    [
        (("nonsense",), "bshd", "problem is 'nonsense'; it must be 'attention(...)'"),
        (("1x=" + PLAIN,), "bshd", "problem is '1x="),
        ((PLAIN,), "llmc", "its q, k and v must have equal heads, head_dim and length"),
        ((PLAIN, PLAIN), "bshd", "two problems have the functions attention_bf16_128_group4_causal_forward; give one a name"),
        ((PACKED + ")", PACKED + ",tf32)"), "llmc", "two problems have the functions llmc_fp32_64_forward; give one a name"),
        (
            (PACKED + ")", "attention=" + PACKED + ")"),
            "llmc",
            "two problems have the functions attention_forward; give one a name",
        ),
        (("é=" + PLAIN,), "bshd", "problem is 'é="),
        ((PLAIN[:-1] + ",scale=1e39)",), "bshd", "asks its kernels for 1e+39; their numbers end at 3.40282e+38"),
        (("nothing(x=1:bf16)",), "bshd", "spelling is 'nothing(x=1:bf16)'"),
        (("attention(q=2x1x1x64,kv=1x1x64,bf16,varlen=9x9)",), "bshd", "items differ in length"),
        (("attention(q=1x1x1x64,kv=1x1x64,bf16,where=dilated(3))",), "bshd", "the mask has predicates or block lists"),
        (("attention(q=1x1x1x320,kv=1x1x320,fp32)",), "bshd", "fp32, whose operands are multiplied in parts"),
        (("norm(x=8x16:bf16,weight=16:bf16,x_subset=4:int32)",), "bshd", "x_subset is given; rows are then not those of x"),
        (("softmax(x=2x2x8x8:bf16)",), "bshd", "softmax has no axis of rows alone"),
    ],
)
def test_the_command_refuses(tmp_path: Path, problems: tuple[str, ...], layout: str, message: str) -> None:
    asked = [word for problem in problems for word in ("--problem", problem)]
    command = [sys.executable, "-m", "flashtile", "export", "-o", str(tmp_path), "--layout", layout, "--arch", "sm_80", *asked]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["taken", "taken/x", "/proc/x"])
def test_an_output_that_cannot_be_written_is_refused_before_compiling(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").touch()
    output = str(tmp_path / place)
    command = [sys.executable, "-m", "flashtile", "export", "-o", output, "--arch", "sm_80", "--problem", PLAIN]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.startswith(f"InvalidProblem: output is '{output}/flashtile_attention.c'"), "no line on kernels before it"
    assert done.stderr.count("\n") == 1


def test_the_interpreter_compiles_nothing(tmp_path: Path) -> None:
    from flashtile.triton_glue import language as _triton

    if not _triton.INTERPRETED:
        pytest.skip("kernels are compiled here")
    with pytest.raises(NotSupported, match="kernels cannot be compiled"):
        export(Request((PLAIN,), ("sm_80",)), tmp_path)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (PLAIN, "attention_bf16_128_group4_causal"),  # as in docs/c.md
        ("attention(q=1x1x1x64,kv=1x1x80,fp32,ieee,lse)", "attention_fp32_64x80_lse_ieee"),
        ("attention(q=1x1x1x64,kv=1x1x64,fp16,band=-3:70,score=softcap(3.0),deterministic)",
         "attention_fp16_64_bandm3_70_softcap_deterministic"),
        ("attention(q=1x1x1x64,kv=1x1x64,fp16,band=9:,sink=1:fp32,dropout=0.5)", "attention_fp16_64_band9__sink_dropout"),
    ],
)  # fmt: skip
def test_names_say_what_is_computed(spelling: str, name: str) -> None:
    assert name_of(AttentionProblem.parse(spelling)) == name


def test_a_name_may_stand_before_a_problem() -> None:
    assert read("mine=" + PLAIN) == ("mine", PLAIN)
    assert read(f" {PLAIN} ") == (None, PLAIN)


@pytest.mark.parametrize(
    ("kernels", "workers", "said"), [(1, 2, "a minute"), (77, 2, "3 minutes"), (77, 64, "a minute"), (0, 1, "a minute")]
)
def test_export_says_how_long_it_takes(kernels: int, workers: int, said: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from flashtile.export.build import minutes

    assert minutes(kernels, workers) == said
