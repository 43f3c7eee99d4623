"""Cases that Hopper's kernels run in the emulator: those of the one list that they take, and longer ones of several tiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.cases import CASES, Case

# Every reason for which Hopper's kernels may refuse one of these cases.
REFUSALS = (
    r"head_dim(_v)? is (320|512); supported up to 256",
    r"an item has one query, or up to 15 in a small problem: .*",
    r"there is dropout, and what is known at run time may leave each query of a small problem one key: .*",
    r"items lie one after another and bias's tensor has an element for every query or key; .*",
    r"the mask's blocks are (32 x 32|32 x 64|64 x 32); supported .*",
    r"the mask has predicates and there is a sink; .*",
    r"gradients of biases are formed by the 'fused' backward",
    r"the gradient of (alibi|bias|relative)'s tensor is formed by the portable kernels; .*",
    r"the sink's gradient in a small problem is formed by the portable kernels: .*",
)


def unexpected(reasons: Iterable[str]) -> list[str]:
    """Reasons of refusals that are none of `REFUSALS`."""
    return [reason for reason in reasons if not any(re.fullmatch(known, reason) for known in REFUSALS)]


def _longer() -> Iterator[Case]:
    uneven = Case(
        "varlen", seqlen_q=600, seqlen_k=640, heads_q=2, heads_kv=1, head_dim=64, dtype="fp16",
        cu_q=(0, 333, 333, 340, 590), cu_k=(0, 300, 310, 310, 600),
    )  # fmt: skip
    for head_dim, head_dim_v in ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256)):
        wide = replace(uneven, name=f"varlen-{head_dim}", head_dim=head_dim, head_dim_v=head_dim_v)
        yield replace(wide, name=f"{wide.name}-causal", causal=True, sink="fp32")
        yield replace(wide, name=f"{wide.name}-window", window=(70, 30))
        yield replace(wide, name=f"{wide.name}-dropout", causal=True, dropout=0.3)
    yield replace(uneven, name="varlen-full", heads_q=3, heads_kv=3)
    # key tiles that begin with queries of their own: more of them than query tiles, and fewer, the last of each short
    yield replace(uneven, name="varlen-full-128", heads_kv=2, head_dim=128)
    own = Case("own-queries", batch=2, seqlen_q=200, seqlen_k=700, heads_q=3, heads_kv=3, head_dim=128, dtype="bf16")
    yield own
    yield replace(own, name="own-queries-96", seqlen_q=650, seqlen_k=260, head_dim=96, dtype="fp16")
    # of tokens behind the last item no tensor has anything
    each = replace(uneven, name="varlen-each-item", score=("bias-each-item", "alibi-per-batch"), fixed_slopes=True)
    yield each
    yield replace(each, name="varlen-each-item-document", mask="document", dtype="bf16", causal=True)
    masked = Case("mask", batch=2, seqlen_q=264, seqlen_k=304, heads_q=2, heads_kv=1, head_dim=64, dtype="fp16")
    masks = (64, "table"), (128, "table"), (256, "table"), (64, "holes"), (96, "document-causal"), (128, "holes")
    for head_dim, mask in masks:
        dtype = "bf16" if head_dim == 128 else "fp16"
        yield replace(masked, name=f"mask-{mask}-{head_dim}", head_dim=head_dim, mask=mask, dtype=dtype)
    # lists of whole blocks alone: nothing is visible in part, some lists are empty
    whole = replace(masked, seqlen_q=512, seqlen_k=640, mask="table")
    for head_dim in (64, 96, 128, 256):
        yield replace(whole, name=f"mask-whole-{head_dim}", head_dim=head_dim, dtype="fp16" if head_dim == 64 else "bf16")
    yield replace(whole, name="mask-whole-each", heads_kv=2, head_dim=128, dtype="bf16")
    yield replace(whole, name="mask-whole-scores", head_dim=128, score=("alibi", "softcap"), dropout=0.2, dtype="bf16")
    yield replace(whole, name="mask-whole-bias", head_dim=128, score=("bias",), score_dtype="fp16", fixed_slopes=True)
    yield replace(whole, name="mask-whole-ordered", head_dim=128, deterministic=True, dtype="bf16")
    # a list so long that several blocks take it
    long = replace(whole, name="mask-long", batch=1, seqlen_q=896, mask="one-long")
    yield replace(long, name="mask-long-64")
    yield replace(long, name="mask-long-64-each", seqlen_q=1100, heads_kv=2)
    yield replace(long, name="mask-long-128", head_dim=128, heads_q=4, heads_kv=2, dtype="bf16", upstream="both")
    yield replace(long, name="mask-long-96", head_dim=96, seqlen_q=700, dropout=0.2)
    yield replace(long, name="mask-long-256", head_dim=256, dtype="bf16")  # but wide heads', which is taken whole
    first = replace(long, name="mask-first", seqlen_q=900, seqlen_k=900, mask="first-blocks")
    yield replace(first, name="mask-first-64", heads_kv=1, dropout=0.2)
    yield replace(first, name="mask-first-128", head_dim=128, heads_q=4, heads_kv=1, causal=True, score=("softcap",))
    listed = replace(masked, heads_q=4, heads_kv=2)
    for head_dim in (64, 128, 256):
        yield replace(listed, name=f"mask-strangers-{head_dim}", head_dim=head_dim, mask="strangers-blocks")
        yield replace(listed, name=f"mask-table-{head_dim}-ordered", head_dim=head_dim, mask="table", deterministic=True)
        yield replace(listed, name=f"mask-wide-band-{head_dim}", head_dim=head_dim, mask="wide-band-blocks", heads_kv=4)
    # keys that most queries do not see: some lists are far longer than the mean
    yield replace(listed, name="mask-few-queries", batch=1, seqlen_k=1300, mask="wide-band-blocks")
    yield replace(listed, name="mask-table-scores", mask="table", score=("softcap",), dropout=0.2)
    yield replace(listed, name="mask-strangers-dropout", head_dim=128, mask="strangers-blocks", dropout=0.2, deterministic=True)
    yield replace(listed, name="mask-holes-sink", mask="holes", sink="fp32")
    # what a bias adds is brought ahead: over several tiles, the last of them short; others are loaded score by score
    biased = replace(listed, mask=None, score=("bias",), score_dtype="bf16", fixed_slopes=True)
    yield replace(biased, name="bias-full", head_dim=128, seqlen_k=312, score=("bias-heads", "bias-keys"))
    yield replace(biased, name="bias-causal", head_dim=128, dtype="bf16", causal=True, score=("alibi", "bias", "softcap"))
    yield replace(biased, name="bias-window", head_dim=256, window=(90, 30), score=("bias-keys",))
    yield replace(biased, name="bias-empty-rows", head_dim=96, seqlen_q=504, causal=True)
    yield replace(biased, name="bias-dropout", dropout=0.2, seqlen_k=384)
    yield replace(biased, name="bias-table", head_dim=128, mask="table", dropout=0.2)
    yield replace(biased, name="bias-holes", head_dim=128, mask="holes", score=("bias-batch",))
    yield replace(biased, name="bias-wide-band", head_dim=128, mask="wide-band-blocks", heads_kv=4)
    yield replace(biased, name="bias-odd-keys", head_dim=128, seqlen_k=299)
    yield replace(biased, name="bias-fp32", head_dim=128, causal=True, score_dtype="fp32", score=("alibi", "bias"))
    yield replace(biased, name="bias-twice", head_dim=64, causal=True, deterministic=True, score=("bias-plane", "bias"))
    # the gradient of a bias for every score, in the problem's dtype, is stored tile by tile
    given = replace(biased, score_dtype="fp16", fixed_slopes=False)
    yield replace(given, name="bias-gradient", head_dim=128, seqlen_k=312)
    yield replace(given, name="bias-gradient-causal", causal=True)
    yield replace(given, name="bias-gradient-lse", head_dim=96, dtype="bf16", score_dtype="bf16", upstream="out")
    yield replace(given, name="bias-gradient-window", head_dim=128, window=(90, 30), deterministic=True)
    yield replace(given, name="bias-gradient-dropout", dropout=0.2, seqlen_k=384)
    yield replace(given, name="bias-gradient-unseen", causal=True, seqlen_q=600, sink="fp32")
    yield replace(given, name="bias-gradient-table", head_dim=128, mask="table")
    yield replace(given, name="bias-gradient-holes", mask="holes", heads_kv=4)
    yield replace(given, name="bias-gradient-pair", head_dim=128, score=("bias-heads",))
    yield replace(given, name="bias-gradient-pair-table", head_dim=128, score=("bias-heads",), mask="table", seqlen_q=304)
    yield replace(given, name="bias-gradient-two-heads", heads_q=2, heads_kv=1, causal=True, score=("bias-batch",))
    yield replace(given, name="bias-gradient-batch", batch=3, score=("bias-heads",), deterministic=True)
    yield replace(given, name="bias-gradient-heads", causal=True, score=("bias-batch",))
    yield replace(given, name="bias-gradient-plane", score=("bias-plane",))
    # scores between bounds, which no maximum is asked of: rows whose scores are all at the lower one, or at the upper one
    # and without lse, where curves are those of the hardware
    capped = Case(
        "softcap-widest", head_dim=64, seqlen_q=200, seqlen_k=200, scale=10.0, dtype="bf16", score=("softcap50",),
        upstream="out",
    )  # fmt: skip
    yield replace(capped, causal=True)
    yield replace(capped, name="softcap-128", head_dim=128, scale=None, score=("softcap",), heads_q=4, heads_kv=2)
    yield replace(capped, name="softcap-256-causal", head_dim=256, scale=0.5, score=("softcap30",), causal=True)
    yield replace(capped, name="softcap-few", seqlen_k=3, head_dim=128)
    yield replace(capped, name="softcap-least", seqlen_q=40, seqlen_k=8, causal=True, score=("softcap30",), scale=2.0)
    yield replace(capped, name="softcap-sink", causal=True, sink="fp32", seqlen_q=300, score=("alibi", "softcap30"), scale=-1.0)
    # head_dim 256, causal: a row's maximum lags behind; in some of these one key has nearly all of a row's weight
    wide = Case("lags", batch=2, seqlen_q=200, seqlen_k=333, heads_q=2, head_dim=256, dtype="bf16", causal=True)
    yield wide
    yield replace(wide, name="lags-fp16", dtype="fp16", heads_q=4, heads_kv=2, seqlen_q=260, seqlen_k=260)
    yield replace(wide, name="lags-empty-rows", seqlen_q=333, seqlen_k=200)
    yield replace(wide, name="lags-window", dtype="fp16", window=(100, 30), causal=False, head_dim=200)
    yield replace(wide, name="lags-sink", sink="fp32", seqlen_q=333, seqlen_k=200)
    yield replace(wide, name="lags-sink-fp16", sink="fp16", dtype="fp16", scale=0.25)
    for scale in (0.25, 0.5, 4.0):
        for dtype in ("fp16", "bf16"):
            yield replace(wide, name=f"lags-{dtype}-scale{scale}", dtype=dtype, scale=scale, batch=1)
    # scores so far apart that 2^ of their distance from a maximum of before overflows: those tiles are computed again
    for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        wild = replace(wide, scale=30.0, head_dim=head_dim, head_dim_v=head_dim_v, name=f"wild-{head_dim}")
        yield wild
        yield replace(wild, name=f"{wild.name}-full", dtype="fp16", causal=False, seqlen_k=600)
        yield replace(wild, name=f"{wild.name}-window", causal=False, window=(150, 30), heads_kv=1)
    # all keys are one tile, of which queries are 128 or 192
    once = replace(wide, name="once", batch=1, seqlen_q=400, seqlen_k=77, causal=False, scale=30.0)
    for head_dim in (64, 96, 128, 256):
        yield replace(once, name=f"once-{head_dim}", head_dim=head_dim, heads_q=4, heads_kv=2)
        yield replace(
            once, name=f"once-{head_dim}-causal", head_dim=head_dim, dtype="fp16", causal=True, seqlen_q=160, sink="fp32"
        )
    few = replace(once, name="once-split", seqlen_q=160, seqlen_k=60, window=(None, 3), backward="split")
    yield few
    yield replace(few, name="once-split-64", head_dim=64, window=(50, 0), dtype="fp16")
    yield replace(once, name="once-window", head_dim=64, window=(30, 20), seqlen_k=128)
    yield replace(once, name="once-dropout", head_dim=128, dropout=0.2, deterministic=True)
    yield replace(once, name="once-bias", head_dim=64, score=("bias",), score_dtype="bf16", fixed_slopes=True, seqlen_k=80)
    yield replace(once, name="once-document", head_dim=64, mask="document", seqlen_k=100)
    yield replace(uneven, name="wild-varlen", scale=30.0)
    yield replace(uneven, name="wild-varlen-causal", scale=30.0, head_dim=128, causal=True, sink="fp32", dtype="bf16")
    yield replace(uneven, name="wild-varlen-dropout", scale=30.0, head_dim=128, window=(200, 90), dropout=0.3)
    for mask in ("table", "holes", "document-causal", "strangers-blocks"):
        yield replace(masked, name=f"wild-{mask}", head_dim=128, mask=mask, scale=30.0)
    yield replace(whole, name="wild-whole", head_dim=128, scale=30.0)
    yield replace(biased, name="wild-bias", head_dim=128, scale=30.0, score=("bias-heads",))
    yield replace(biased, name="wild-bias-causal", scale=30.0, causal=True, dropout=0.2)
    yield replace(biased, name="wild-scores", scale=-30.0, score=("alibi", "bias", "softcap1000"))
    yield replace(capped, name="wild-softcap", scale=30.0, score=("softcap1000",), seqlen_k=400)
    # one wave of tiles: blocks of short ones help with long ones
    wave = Case("one-wave", seqlen_q=700, seqlen_k=700, heads_q=2, heads_kv=2, head_dim=64, dtype="bf16", causal=True)
    yield wave
    yield replace(wave, name="one-wave-128", head_dim=128, seqlen_q=512, seqlen_k=512, batch=2, upstream="both")
    yield replace(wave, name="one-wave-more-keys", head_dim=96, seqlen_q=640, seqlen_k=800, dtype="fp16")
    yield replace(wave, name="one-wave-more-queries", head_dim=128, seqlen_q=900, seqlen_k=600)
    padded = replace(uneven, batch=2, cu_q=None, cu_k=None, used_q=(333, 600), used_k=(640, 301))
    yield replace(padded, name="padded-causal", causal=True)
    yield replace(padded, name="padded-bias", head_dim=128, causal=True, score=("bias",), score_dtype="fp16", fixed_slopes=True)
    yield replace(padded, name="padded-left", window=(100, None), sink="bf16", score=("softcap",))


CASES_HERE: tuple[Case, ...] = (*(case for case in CASES if case.dtype != "fp32" and case.head_dim % 8 == 0), *(
    replace(case, name=f"longer-{case.name}", fixed_sink=case.sink is not None) for case in _longer()))  # fmt: skip

# What the emulator runs: of a case in both dtypes with both backwards two, in which each dtype and each backward occurs.
EMULATED = tuple(
    case for case in CASES_HERE if not case.name.endswith(("-fp16-split", "-bf16-fused")) or case.name.startswith("longer-")
)


def _large() -> Iterator[Case]:
    base = Case("sink", batch=2, seqlen_q=1100, seqlen_k=1100, heads_q=8, heads_kv=4, head_dim=64, dtype="bf16", sink="fp32")
    yield base
    yield replace(base, name="sink-causal", head_dim=128, dtype="fp16", causal=True, sink="fp16")
    yield replace(base, name="sink-dropout", dropout=0.2, seqlen_k=1300, deterministic=True)
    yield replace(base, name="sink-window", head_dim=96, window=(300, 0), heads_kv=8)
    yield replace(base, name="sink-bias", head_dim=128, score=("bias",), score_dtype="bf16", seqlen_k=1304)
    yield replace(base, name="sink-wide", head_dim=256, heads_q=4, upstream="out")
    # so many tiles that dq is made in the pass over keys
    many = replace(base, name="converted", batch=8, seqlen_q=520, seqlen_k=700, heads_q=24, heads_kv=12, sink=None)
    yield many
    yield replace(many, name="converted-dropout", seqlen_q=200, dropout=0.2, head_dim=40, sink="fp32")
    yield replace(many, name="converted-128", head_dim=128, dtype="fp16", heads_q=12, upstream="both")
    yield replace(many, name="converted-128-causal", head_dim=128, heads_q=16, heads_kv=16, causal=True, seqlen_k=400)
    yield replace(many, name="converted-128-dropout", head_dim=128, heads_q=12, causal=True, dropout=0.2, seqlen_k=520)
    yield replace(many, name="converted-128-softcap", head_dim=128, heads_q=12, score=("softcap30",), upstream="both")
    yield replace(many, name="converted-96-causal", head_dim=96, heads_q=12, causal=True, upstream="both")
    yield replace(base, name="sink-varlen", batch=1, seqlen_q=2200, seqlen_k=2200, cu_q=(0, 700, 2200), cu_k=(0, 700, 2200))


LARGE = tuple(replace(case, name=f"large-{case.name}") for case in _large())  # for a GPU: sinks have gradients there
