"""The suites, as data. A case is an AttentionProblem; forward and backward of each are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.attention import PRECISIONS, AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.mask import CAUSAL, FULL

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

# A case above this is refused on a CPU: two cores reach some 50 GFLOP/s, and a case is run a few dozen times.
CPU_MOST_FLOPS = 2e10

OWN_SHAPES = "shapes"  # the suite of problems that are spelled on the command line
# Parts of a spelling that every provider is given, or that change ours alone; for others no tensors are made.
PARTS = frozenset(("q", "kv", "fp16", "bf16", "fp32", "band", "scale", "deterministic", *PRECISIONS))


@dataclass(frozen=True)
class Suite:
    """A named list of problems that belong in one table and one plot."""

    name: str
    about: str
    cases: tuple[AttentionProblem, ...]


def case(
    batch: int,
    heads: int,
    seqlen: int | tuple[int, int],
    head_dim: int,
    dtype: DType,
    causal: bool,
    heads_kv: int | None = None,
    head_dim_v: int | None = None,
) -> AttentionProblem:
    """The problem of one row of a published table; `seqlen` is one number, or (seqlen_q, seqlen_k)."""
    seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
    return AttentionProblem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=heads_kv or heads,
        head_dim=head_dim, head_dim_v=head_dim_v or head_dim, dtype=dtype, mask=CAUSAL if causal else FULL,
    )  # fmt: skip


FP16, BF16, FP32 = DType.FP16, DType.BF16, DType.FP32

SUITES: tuple[Suite, ...] = (
    Suite(
        "fa3-paper",
        "FlashAttention-3's figure: 16k tokens, hidden size 2048, bf16 (arXiv 2407.08608)",
        tuple(
            case(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, BF16, causal)
            for head_dim in (64, 128, 256)
            for causal in (True, False)
            for seqlen in (1024, 4096, 16384)
        ),
    ),
    Suite(
        "llmc",
        "llm.c: GPT-2's 768 channels in 12 heads, causal, fp16 and fp32",
        tuple(
            case(batch, 12, seqlen, 64, dtype, True)
            for dtype in (FP16, FP32)
            for batch, seqlen in ((8, 1024), (6, 4096), (1, 8192))
        ),
    ),
    Suite(
        "triton-tutorial",
        "Triton's fused attention tutorial: batch 4, 48 heads, head_dim 64, causal, fp16",
        tuple(case(4, 48, 2**n, 64, FP16, True) for n in range(10, 16)),
    ),
    Suite(
        "cudnn-cross",
        "cross attention of the cuDNN issue: 1024 queries on 1536 keys, 16 heads, head_dim 64, bf16",
        tuple(case(batch, 16, (1024, 1536), 64, BF16, False) for batch in (1, 2, 4, 6)),
    ),
    Suite(
        "mla",
        "DeepSeek's latent attention as it is trained: 16k tokens, 16 heads, head_dim 192, values 128, bf16 (arXiv 2412.19437)",
        tuple(
            case(16384 // seqlen, 16, seqlen, 192, BF16, causal, head_dim_v=128)
            for causal in (True, False)
            for seqlen in (1024, 4096, 16384)
        ),
    ),
    Suite(
        "models",
        "attention as today's models train it, bf16: Llama 3 8B and 70B, Qwen3 32B, Gemma 3 27B, GPT-OSS 120B, DeepSeek V3, "
        "a video DiT, ViT-L",
        (
            case(2, 32, 8192, 128, BF16, True, heads_kv=8),
            case(1, 64, 8192, 128, BF16, True, heads_kv=8),
            case(2, 64, 4096, 128, BF16, True, heads_kv=8),
            case(1, 32, 8192, 128, BF16, True, heads_kv=16),
            case(2, 64, 4096, 64, BF16, True, heads_kv=8),
            case(1, 128, 4096, 192, BF16, True, head_dim_v=128),
            case(1, 24, 32768, 128, BF16, False),
            case(64, 16, 577, 64, BF16, False),
        ),
    ),
    Suite(
        "jax-split",
        "jax-triton's split against fused backward: batch 4, 4096 tokens, hidden size 2048, bf16",
        tuple(
            case(4, heads, 4096, head_dim, BF16, causal)
            for head_dim, heads in ((64, 32), (128, 16))
            for causal in (True, False)
        ),
    ),
    Suite(
        "host",
        "host time of an eager call: a problem too small for the device to matter",
        tuple(case(1, 8, 128, 64, BF16, causal) for causal in (True, False)),
    ),
    Suite(
        "cpu",
        "what a CPU does within seconds: 2048 tokens, where torch's own kernel is used and where it is not",
        (
            *(case(1, 4, 2048, 64, dtype, causal) for dtype in (FP32, BF16, FP16) for causal in (True, False)),
            case(1, 4, (1024, 2048), 64, FP32, True),
            case(1, 8, 2048, 64, FP32, True, heads_kv=2),
        ),
    ),
    Suite(
        "smoke",
        "a few seconds on any machine: does everything still run",
        (case(1, 2, 64, 32, FP32, True), case(2, 4, (48, 80), 16, FP32, False, heads_kv=2), case(1, 2, 64, 64, FP16, True)),
    ),
)


def suite_named(name: str) -> Suite:
    """The suite of that name. Raises InvalidProblem with the names there are."""
    for suite in SUITES:
        if suite.name == name:
            return suite
    raise InvalidProblem(f"suite is {name!r}; it must be one of {', '.join(s.name for s in SUITES)}.")


def spelled(texts: Sequence[str]) -> Suite:
    """A suite of problems that are spelled. Raises InvalidProblem for what is not measured here."""
    cases = tuple(dict.fromkeys(AttentionProblem.parse(text) for text in texts))
    for problem in cases:
        text = problem.spell()
        parts = text.partition("(")[2].removesuffix(")").split(",")
        more = [part for part in parts if part.partition("=")[0] not in PARTS]
        if more:
            raise InvalidProblem(f"spelling is {text!r}; leave out {', '.join(more)}: the benchmark times sizes, fp16, bf16 or "
                                 "fp32, a band, a scale, `deterministic` and fp32's precision.")  # fmt: skip
        if not problem.visible_pairs:
            raise InvalidProblem(f"spelling is {text!r}; some query must see a key, else there is nothing to time.")
    return Suite(OWN_SHAPES, "problems of the command line", cases)


def with_dtype(suite: Suite, dtype: DType) -> Suite:
    """The suite with every case in that element type; cases that become equal are kept once."""
    return replace(suite, cases=tuple(dict.fromkeys(replace(c, dtype=dtype) for c in suite.cases)))


def field_flops(problem: AttentionProblem, direction: Direction) -> float:
    """FLOPs as the field counts them: 4 B H Sq Sk D forward, half of it when causal, 2.5 times that backward.

    `AttentionProblem.flops` counts visible scores exactly; published figures halve the square instead.
    """
    pairs = problem.seqlen_q * problem.seqlen_k * problem.batch * problem.heads_q
    halved = is_causal(problem) and problem.seqlen_q == problem.seqlen_k
    visible = pairs / 2 if halved else float(problem.visible_pairs)
    return 2 * visible * (problem.head_dim + problem.head_dim_v) * (1.0 if direction == "forward" else 2.5)


def is_causal(problem: AttentionProblem) -> bool:
    """Whether the mask is exactly the causal one."""
    return problem.mask == CAUSAL
