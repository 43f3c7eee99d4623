"""llm.c's attention: problems on its packed layout, and functions with its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

from flashtile.export.attention import AttentionExport, entries
from flashtile.export.emit import Planned, tensors_of
from flashtile.export.entry import Entry
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.mask import CAUSAL

HEAD_DIMS = (64, 128)
DTYPES = ("fp32", "fp16", "bf16")
FUNCTIONS = ("attention_forward", "attention_backward")  # what llm.c's are called

# The tensors, in the order that `llmc.c` counts them by; "stats" is there at float32's grade.
FORWARD = ("q", "k", "v", "out", "lse", "stats")
BACKWARD = (*FORWARD, "dout", "dq", "dk", "dv")


def problems(dtypes: tuple[str, ...] = DTYPES, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[AttentionProblem]:
    """Causal self-attention, as llm.c has it; batch, lengths and heads stand for any."""
    return [
        AttentionProblem.parse(f"attention(q=8x1024x12x{d},kv=1024x12x{d},{dtype},band=:0)")
        for dtype in dtypes
        for d in head_dims
    ]


def is_llmc(p: AttentionProblem) -> bool:
    """Whether the functions with llm.c's arguments compute this problem, whose sizes stand for any; in any precision."""
    plain = AttentionProblem(p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, p.dtype, CAUSAL)
    return p == replace(plain, precision=p.precision)


def name_of(p: AttentionProblem) -> str:
    return f"llmc_{p.dtype.value}_{p.head_dim}"


def llmc_entries(exported: list[AttentionProblem]) -> list[Entry]:
    return [entry for p in exported for entry in entries(name_of(p), AttentionExport(p, "llmc"))]


def declarations() -> str:
    """For the header."""
    return (files("flashtile.export") / "llmc.h").read_text()


def functions(exported: list[AttentionProblem], planned: Sequence[Planned]) -> str:
    """For the C file."""

    def places(name: str, counted: tuple[str, ...]) -> str:
        steps = next(p.path.steps for p in planned if p.entry.name == name)
        given = [one.name for one in tensors_of(steps)]
        assert set(given) <= set(counted), f"{name} takes {given}"
        return "{" + ", ".join(str(given.index(n) if n in given else -1) for n in counted) + "}"

    rows = [
        f"    {{FLASHTILE_{p.dtype.value.upper()}, {p.head_dim}, {p.dtype.size_bytes}, {int(p.float32_grade)}, "
        f"&{name_of(p)}_forward_entry, &{name_of(p)}_backward_entry,\n"
        f"     {places(name_of(p) + '_forward', FORWARD)}, {places(name_of(p) + '_backward', BACKWARD)}}},"
        for p in exported
    ]
    names = ", ".join(f"{p.dtype.value} {p.head_dim}" for p in exported)
    table = [
        "static const struct packed packed_problems[] = {", *rows, "};",
        f'static const char packed_names[] = "{names}";', "",
    ]  # fmt: skip
    return (files("flashtile.export") / "llmc.c").read_text().replace("@TABLE@", "\n".join(table))
