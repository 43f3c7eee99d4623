"""Random problems by `flashtile.jax` on a GPU, against float64, held against the accuracy rule of tests/judge.py.

    python benchmarks/jax_accuracy.py [--cases N] [--numbers 4 ... | --repeat [CASE]] [--workers N] [--budget SECONDS]
        [--output FILE]

Several processes compile and check side by side; a case that does not come to run in time is named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import sys
import time
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment import Judged, main_of
from benchmarks.processes import WORKERS, Failure
from benchmarks.record import Record, at_least_one, provenance

FACTOR, FLOOR_ULP, FLOOR_SUM_ULP, LSE_TOLERANCE = 1.5, 2.0, 16.0, 1e-5  # tests/judge.py
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
HEAD_DIMS = (16, 32, 40, 64, 64, 64, 96, 128, 128, 128, 192, 256)
REPEATS, PROCESSES = 50, 4
SHAPES = 12  # problems that differ in sizes alone
SIZINGS = 2  # ways in which they do for Triton: is a size one, or a multiple of 16
ONES = {"heads_kv": 1 / 3, "batch": 1 / 3, "seqlen_q": 1 / 8, "seqlen_k": 1 / 8}  # how many sizes are one
MOST = {"heads_kv": 3, "batch": 4, "seqlen_q": 400, "seqlen_k": 400}


def draw(number: int) -> dict[str, Any]:
    """The options of a case; SHAPES of them, one after another, differ in sizes alone, and for the compiler in no more than
    SIZINGS ways: a run compiles a few hundred kernels.
    """
    kind, turn = divmod(number, SHAPES)
    r, sizes, sizing = random.Random(kind), random.Random(number), random.Random(f"{kind}, {turn % SIZINGS}")

    def size(name: str) -> int:
        one, even = sizing.random() < ONES[name], MOST[name] > 16 and sizing.random() < 0.5
        return 1 if one else sizes.choice([n for n in range(2, MOST[name] + 1) if (n % 16 == 0) is even])

    group = r.choice((1, 1, 2, 4))
    heads_kv, seqlen_q, seqlen_k, batch = map(size, ("heads_kv", "seqlen_q", "seqlen_k", "batch"))
    if sizing.random() < 0.5 and seqlen_q > 1:
        seqlen_k = seqlen_q
    head_dim = r.choice(HEAD_DIMS)
    case: dict[str, Any] = dict(
        number=number, dtype=r.choice(("float16", "bfloat16", "bfloat16", "float32")), batch=batch,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads_kv * group, heads_kv=heads_kv, head_dim=head_dim,
        head_dim_v=head_dim if r.random() < 0.8 else r.choice((16, 64, 128)),
        backward=r.choice(("auto", "auto", "split", "fused")), varlen=r.random() < 0.12,
    )  # fmt: skip
    if r.random() < 0.5:
        case["is_causal"] = True
        case["alignment"] = r.choice(("top-left", "bottom-right"))
    if r.random() < 0.15:
        case["local_window_size"] = (r.choice((0, 9, 64)), r.choice((0, 5, 70)))
        case.setdefault("alignment", "bottom-right")
    for name, chance in (("softcap", 0.12), ("sinks", 0.12), ("slopes", 0.15), ("dropout", 0.1)):
        if r.random() < chance:
            case[name] = True
    if case["varlen"]:
        return {**case, "batch": 1, "alignment": "bottom-right"}
    if r.random() < 0.15:
        case["bias"] = r.choice(("bhqk", "1hqk", "b11k", "1h11", "11qk"))
    if r.random() < 0.1:
        case["mask"] = r.choice(("bhqk", "11qk", "b11k"))
    if r.random() < 0.2:
        case["lengths"] = r.choice(("k", "q", "qk"))
        case.pop("bias", None)  # no gradient of a bias where items differ in length
    return case


def attend(
    leaves: dict[str, Any], flows: tuple[Any, Any], static: dict[str, Any], fixed: dict[str, Any], dtype: Any
) -> dict[str, Any]:
    """out, lse and gradients by numpy; rounded to `dtype` after every operation, or float64 where that is None.

    fixed: seen (B, N, T, S), counts (B, 1, T, 1), which queries are no padding, distance of ALiBi, keep of dropout with its
    p, group.
    """
    import numpy as np

    wide = np.float64 if dtype is None else np.float32
    rounded = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(np.float32))
    x = {name: np.asarray(leaf, wide) for name, leaf in leaves.items()}
    dout, dlse = (np.asarray(flow, wide) for flow in flows)
    repeat = lambda a: np.repeat(a, fixed["group"], axis=2).transpose(0, 2, 1, 3)  # noqa: E731
    q, k, v, dout = x["q"].transpose(0, 2, 1, 3), repeat(x["k"]), repeat(x["v"]), dout.transpose(0, 2, 1, 3)
    scale = q.shape[-1] ** -0.5
    score = rounded(rounded(q @ k.swapaxes(2, 3)) * wide(scale))
    if "bias" in x:
        score = rounded(score + x["bias"])
    bent = score
    if "softcap" in static:
        curve = rounded(np.tanh(score / wide(static["softcap"])))
        bent = rounded(wide(static["softcap"]) * curve)
    if "slopes" in x:
        bent = rounded(bent - x["slopes"][:, None, None] * fixed["distance"])
    seen = fixed["seen"]
    hidden = np.where(seen, bent, -np.inf)
    top = hidden.max(-1, keepdims=True, initial=-np.inf)
    if "sinks" in x:
        top = np.maximum(top, x["sinks"][:, None, None])
    top = np.where(top == -np.inf, 0.0, top).astype(wide)
    weight = rounded(np.exp(hidden - top))
    total = weight.sum(-1, keepdims=True)
    if "sinks" in x:
        total = total + np.exp(x["sinks"][:, None, None] - top)
    total = np.where(fixed["counts"], total, 0.0)
    lives = total > 0.0
    with np.errstate(divide="ignore"):
        lse = np.where(lives, np.log(total) + top, -np.inf)[..., 0]
    share = rounded(weight / np.where(lives, total, 1.0))
    kept = rounded(np.where(fixed["keep"], share / wide(1.0 - fixed["p"]), 0.0)) if "keep" in fixed else share
    out = rounded(kept @ v)
    dv, dweight = rounded(kept.swapaxes(2, 3) @ dout), rounded(dout @ v.swapaxes(2, 3))
    if "keep" in fixed:
        dweight = rounded(np.where(fixed["keep"], dweight / wide(1.0 - fixed["p"]), 0.0))
    dlse = np.where(lives[..., 0], dlse.transpose(0, 2, 1), 0.0)
    delta = (share * dweight).sum(-1, keepdims=True)
    dbent = rounded(share * (dweight - delta + dlse[..., None]))
    made: dict[str, Any] = {}
    if "sinks" in x:
        lone = np.where(lives, np.exp(x["sinks"][:, None, None] - np.where(lives, lse[..., None], 0.0)), 0.0)
        made["dsinks"] = (lone * (dlse[..., None] - delta)).sum((0, 2, 3))
    if "slopes" in x:
        made["dslopes"] = -(dbent * fixed["distance"]).sum((0, 2, 3))
    dscore = rounded(dbent * (1.0 - curve * curve)) if "softcap" in static else dbent
    if "bias" in x:
        axes = tuple(axis for axis, size in enumerate(x["bias"].shape) if size == 1)
        made["dbias"] = rounded(dscore.sum(axes, keepdims=True))
    dscore = rounded(dscore * wide(scale))

    def grouped(grad: Any) -> Any:
        batch, heads, *rest = grad.shape
        grad = grad.reshape(batch, heads // fixed["group"], fixed["group"], *rest).sum(2)
        return rounded(grad).transpose(0, 2, 1, 3)

    made |= {"dq": rounded(dscore @ k).transpose(0, 2, 1, 3), "dk": grouped(dscore.swapaxes(2, 3) @ q), "dv": grouped(dv)}
    return {"out": out.transpose(0, 2, 1, 3), "lse": lse.transpose(0, 2, 1), **made}


@dataclass
class Arranged:
    """A case's arrays, what is called with them, and what numpy makes of it: in float64, and in the case's dtype."""

    everything: Callable[..., dict[str, Any]]  # of (leaves, arrays, dout, dlse): out, lse, gradients
    given: tuple[Any, ...]
    exact: dict[str, Any]
    rough: dict[str, Any]


def arrange(case: dict[str, Any]) -> Arranged:
    """Everything that a case needs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flashtile import Alibi, Dropout
    from flashtile.jax import dot_product_attention, dot_product_attention_varlen
    from flashtile.jax.dropout import keep, seed_words

    rng = np.random.default_rng(case["number"])
    b, t, s, n, m = (case[k] for k in ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv"))
    dtype = jnp.dtype(case["dtype"])
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(dtype)  # noqa: E731
    leaves = {"q": normal(b, t, n, case["head_dim"]), "k": normal(b, s, m, case["head_dim"])}
    leaves["v"] = normal(b, s, m, case["head_dim_v"])
    shape = lambda spelled: tuple(size if c != "1" else 1 for c, size in zip(spelled, (b, n, t, s), strict=True))  # noqa: E731
    if "bias" in case:
        leaves["bias"] = normal(*shape(case["bias"]))
    if "sinks" in case:
        leaves["sinks"] = rng.standard_normal(n).astype(np.float32)
    if "slopes" in case:
        leaves["slopes"] = (rng.random(n) / 8).astype(np.float32)
    static = {k: case[k] for k in ("is_causal", "local_window_size") if k in case}
    if "softcap" in case:
        static["softcap"] = 3.0
    arrays: dict[str, Any] = {}
    row, key = np.arange(t)[:, None], np.arange(s)[None, :]
    seen = np.ones((b, n, t, s), bool)
    length_q, length_k = np.full(b, t), np.full(b, s)
    for side, size, lengths in (("q", t, length_q), ("k", s, length_k)):
        if side in case.get("lengths", ""):
            lengths[:] = rng.integers(0, size + 1, b)
            arrays[{"q": "query_seq_lengths", "k": "key_value_seq_lengths"}[side]] = lengths.astype(np.int32)
    items, counts = np.zeros(1, int), np.ones((b, 1, t, 1), bool)
    if case["varlen"]:  # one run of tokens, cut at random
        cuts = [np.sort(rng.integers(0, size + 1, 3)) for size in (t, s)]
        arrays = {f"cu_seqlens_{x}": np.array([0, *c, size], np.int32) for x, c, size in zip("qk", cuts, (t, s), strict=True)}
        of_q, of_k = (np.searchsorted(cu[1:], np.arange(cu[-1]), side="right") for cu in arrays.values())
        first_q, first_k = (cu[:-1] for cu in arrays.values())
        length_q, length_k = (np.diff(cu) for cu in arrays.values())
        seen &= of_q[:, None] == of_k[None, :]
        row, key = (np.arange(t) - first_q[of_q])[:, None], (np.arange(s) - first_k[of_k])[None, :]
        aligned = row + (length_k - length_q)[of_q][:, None]
        items = of_q[None, None, :, None]
    else:
        counts = row < length_q[:, None, None, None]
        seen &= counts & (key < length_k[:, None, None, None])
        aligned = row + (length_k - length_q)[:, None, None, None]
    left, right = static.get("local_window_size", (None, None))
    right = 0 if "is_causal" in static else right
    place = aligned
    if case.get("alignment") == "top-left" and (left, right) != (None, None):
        place, aligned = row, row + s - t  # lengths hide, but move no query
    seen &= (True if left is None else key >= place - left) & (True if right is None else key <= place + right)
    if "mask" in case:
        arrays["mask"] = rng.random(shape(case["mask"])) < 0.7
        seen &= arrays["mask"]
    fixed = {"seen": seen, "counts": counts, "group": n // m, "distance": np.abs(aligned - key)}
    if "dropout" in case:
        batch = items if case["varlen"] else np.arange(b)[:, None, None, None]
        index = (batch, np.arange(n)[None, :, None, None], row[None, None], key[None, None])
        index = (jnp.asarray(x, jnp.int32) for x in index)
        fixed |= dict(p=0.2, keep=np.asarray(keep(0.2, *index, n, seed_words(Dropout(0.2, 11)))))
    dout = normal(b, t, n, case["head_dim_v"])
    dlse = rng.standard_normal((b, t, n)).astype(np.float32)

    def ours(leaves: Any, arrays: Any) -> Any:
        extras = dict(static, backward=case["backward"], return_residual=True, sinks=leaves.get("sinks"))
        extras |= {"score": (Alibi(leaves["slopes"]),) if "slopes" in leaves else ()}
        extras |= {"dropout": Dropout(0.2, 11)} if "dropout" in case else {}
        inputs = [leaves[k] for k in "qkv"]
        if case["varlen"]:
            out, lse = dot_product_attention_varlen(*(x[0] for x in inputs), **arrays, **extras)
            return out[None], lse[None]
        extras["alignment"] = case.get("alignment", "top-left")
        return dot_product_attention(*inputs, leaves.get("bias"), **arrays, **extras)

    def everything(leaves: Any, arrays: Any, dout: Any, dlse: Any) -> Any:
        (out, lse), pull = jax.vjp(lambda x: ours(x, arrays), leaves)
        (grads,) = pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0.0)))
        return {"out": out, "lse": lse, **{f"d{k}": g for k, g in grads.items()}}

    exact = attend(leaves, (dout, dlse), static, fixed, None)
    rough = attend(leaves, (dout, dlse), static, fixed, dtype)
    return Arranged(everything, (leaves, arrays, dout, dlse), exact, rough)


def judge(case: dict[str, Any], arranged: Arranged, got: dict[str, Any]) -> tuple[list[str], float]:
    """What breaks the rule, and the worst error as a part of what is allowed."""
    import numpy as np

    got = {k: np.asarray(x).astype(np.float64) for k, x in got.items()}
    failures, worst = [], 0.0
    for name, truth in arranged.exact.items():
        mine = got[name]
        assert mine.shape == truth.shape, (name, mine.shape, truth.shape)
        if name == "lse":
            empty = truth == -np.inf
            if not np.array_equal(mine == -np.inf, empty):
                failures.append("lse: -inf in the wrong rows")
            elif not empty.all():
                off = (np.abs(mine[~empty] - truth[~empty]) / np.maximum(np.abs(truth[~empty]), 1.0)).max()
                failures += [f"lse off by {off:.2g}"] if not off <= LSE_TOLERANCE else []
            continue
        if not np.isfinite(mine).all():
            failures.append(f"{name} is not finite")
            continue
        floor = (
            (FLOOR_SUM_ULP if name in ("dbias", "dsinks", "dslopes") else FLOOR_ULP) * EPS[case["dtype"]] * np.abs(truth).max()
        )
        off, theirs = np.abs(mine - truth).max(), np.abs(arranged.rough[name] - truth).max()
        allowed = max(FACTOR * theirs, floor)
        worst = max(worst, off / allowed if allowed else float(off > 0))
        if off > allowed:
            wrong = np.argwhere(np.abs(mine - truth) > allowed)
            shown = [(*at, round(mine[tuple(at)], 4), round(truth[tuple(at)], 4)) for at in wrong[:3].tolist()]
            told = f"{len(wrong)} of {truth.size}, like {shown}"
            failures.append(f"{name} off by {off:.3g}, plain by {theirs:.3g}, allowed {allowed:.3g}: {told}")
    return failures, float(worst)


def check(case: dict[str, Any]) -> dict[str, Any]:
    """A row of results; `failure` says what breaks the rule."""
    import jax

    started = time.perf_counter()
    arranged = arrange(case)
    failures, worst = judge(case, arranged, jax.jit(arranged.everything)(*arranged.given))
    seconds = round(time.perf_counter() - started, 1)
    return dict(case=case["number"], worst=round(worst, 3), seconds=seconds, failure="; ".join(failures), options=spell(case))


def spell(case: dict[str, Any]) -> str:
    return ";".join(f"{k}={v}" for k, v in case.items() if k != "number" and v not in (False, None))


# Each process has a core: XLA compiles with one thread, and times no variants.
ONE_OF_MANY = "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1"


def checked(number: int) -> dict[str, Any]:
    """The row of a case, in a process that shares the GPU."""
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ONE_OF_MANY}
    import jax

    device = jax.devices("cuda")[0].device_kind  # raises where there is none: plain JAX is not what is checked
    return {**check(draw(number)), "device": device}


# A case whose dq was wrong on an H100, by JAX and by PyTorch, as long as ptxas 12.8 compiled it (docs/lab/tuning.md).
SUSPECT = "number=4;dtype=float16;batch=1;seqlen_q=17;seqlen_k=17;heads=2;heads_kv=2;head_dim=40;head_dim_v=40;backward=split"
# How a case is repeated: by JAX as it comes, without CUDA graphs, one kernel after another; by PyTorch.
FLAGS = {"jax": "", "jax without graphs": "--xla_gpu_enable_command_buffer=", "torch": ""}


def spelled(text: str) -> dict[str, Any]:
    """The case of a row's `options`, which a number may precede."""
    case: dict[str, Any] = {"number": 0, "varlen": False}
    for name, _, value in (part.partition("=") for part in text.split(";")):
        try:
            case[name] = literal_eval(value)
        except ValueError:  # a word
            case[name] = value
    missing = draw(0).keys() - {"is_causal", "alignment"} - case.keys()
    if missing:
        raise argparse.ArgumentTypeError(f"{text} lacks {', '.join(sorted(missing))}")
    return case


def case_text(text: str) -> str:
    """An argument that spells a case."""
    spelled(text)
    return text


def repeat(text: str, how: str, process: int) -> dict[str, Any]:
    """A row: how often, of REPEATS times, a case is wrong in a process of its own, on memory that held NaN."""
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": f"--xla_gpu_autotune_level=0 {FLAGS[how]}"}
    if how == "torch":
        os.environ["JAX_PLATFORMS"] = "cpu"
    case = spelled(text)
    arranged = arrange(case)
    call = by_torch(case, arranged) if how == "torch" else by_jax(arranged)
    found = ["; ".join(judge(case, arranged, call())[0]) for _ in range(REPEATS)]
    wrong = [i for i, failure in enumerate(found) if failure]
    row = dict(case=case["number"], how=how, process=process, wrong=len(wrong), repeats=REPEATS, options=spell(case))
    return {**row, "failure": f"run {wrong[0]} first: {found[wrong[0]]}" if wrong else ""}


def by_jax(arranged: Arranged) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    jax.devices("cuda")  # raises where there is none
    compiled = jax.jit(arranged.everything)

    def call() -> Any:
        for size in (2**10, 2**12, 2**14, 2**16, 2**20):  # and gives it back: the next buffers lie there
            jax.block_until_ready([jnp.full(size, jnp.nan) for _ in range(8)])
        return jax.block_until_ready(compiled(*arranged.given))

    return call


def by_torch(case: dict[str, Any], arranged: Arranged) -> Callable[[], Any]:
    """The case by PyTorch's front end. Raises ValueError where it has more than q, k and v."""
    from unittest.mock import patch

    import torch

    import flashtile

    leaves, arrays, dout, dlse = arranged.given
    plain = {
        "number",
        "dtype",
        "batch",
        "seqlen_q",
        "seqlen_k",
        "heads",
        "heads_kv",
        "head_dim",
        "head_dim_v",
        "backward",
        "varlen",
    }
    if arrays or not set(case) <= plain:
        raise ValueError(f"PyTorch repeats cases of q, k and v alone; this one has {set(case) - plain or set(arrays)}")
    empty_strided = torch.empty_strided

    def poisoned(*given: Any, **options: Any) -> torch.Tensor:
        made = empty_strided(*given, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -9)

    options = flashtile.Options(backward=case["backward"])

    def call() -> Any:
        q, k, v = (torch.tensor(leaves[name], device="cuda").requires_grad_() for name in "qkv")
        with patch.object(torch, "empty_strided", poisoned):
            out, lse = flashtile.attention(q, k, v, return_lse=True, options=options)
            flows = torch.tensor(dout, device="cuda"), torch.tensor(dlse, device="cuda").transpose(1, 2)
            made = [out, lse.transpose(1, 2), *torch.autograd.grad((out, lse), (q, k, v), flows)]
        return {name: t.detach().double().cpu().numpy() for name, t in zip(("out", "lse", "dq", "dk", "dv"), made, strict=True)}

    return call


class JaxAccuracy(Judged):
    """A cell is a case's number; with --repeat a way to run the one case, and a process."""

    output, budget_s, gpu = "benchmarks/results/jax-accuracy.csv", 150, False  # JAX asks for the GPU, in the processes

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", type=at_least_one, default=600)
        parser.add_argument("--numbers", type=int, nargs="+", help="the cases of these numbers alone")
        parser.add_argument("--repeat", nargs="?", type=case_text, const=SUSPECT, help=(
            f"this case alone, as `options` has it, {REPEATS} times on poisoned memory in each of {PROCESSES} processes: by "
            f"JAX, by JAX without CUDA graphs, by PyTorch; {SUSPECT}"))  # fmt: skip
        parser.add_argument("--workers", type=at_least_one, default=WORKERS)

    def __init__(self, chosen: argparse.Namespace):
        super().__init__(chosen)
        self.judge = repeat if chosen.repeat else checked
        self.workers, self.fresh = chosen.workers, bool(chosen.repeat)  # a process that has imported JAX keeps its flags

    def about(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("jax", "triton")}

    def machine(self) -> dict[str, str]:
        return provenance(self.chosen.commit)

    def cells(self) -> list[tuple[Any, ...]]:
        chosen = self.chosen
        if chosen.repeat:
            return [(chosen.repeat, how, i) for i in range(PROCESSES) for how in FLAGS]
        numbers = chosen.numbers or sorted(range(chosen.cases), key=lambda n: (n % SHAPES, n))  # the first of every kind first
        return [(n,) for n in numbers]

    def write(self, cell: tuple[Any, ...], made: Any, record: Record) -> None:
        row = dict(case=cell[0], failure=made.text) if isinstance(made, Failure) else made
        if row["failure"] or self.chosen.repeat:
            print("FAIL" if row["failure"] else "right", *cell, row.get("options", ""), row["failure"], flush=True)
        record.add(row)


def main() -> int:
    return main_of(JaxAccuracy)


if __name__ == "__main__":
    sys.exit(main())
