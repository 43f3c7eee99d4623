"""Random problems by `flashtile.jax` on a GPU, against float64, held against the accuracy rule of tests/judge.py.

    python benchmarks/jax_accuracy.py [--cases N] [--workers N] [--limit SECONDS] [--output FILE]

Every worker is a process of its own, which compiles and checks its share; a case that does not come to run in time is left out.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FACTOR, FLOOR_ULP, FLOOR_SUM_ULP, LSE_TOLERANCE = 1.5, 2.0, 16.0, 1e-5  # tests/judge.py
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
HEAD_DIMS = (16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256)


def draw(number: int) -> dict[str, Any]:
    """The options of a case."""
    r = random.Random(number)
    group = r.choice((1, 1, 2, 4))
    heads_kv = r.choice((1, 2, 3))
    seqlen_q, seqlen_k = r.choice((1, 17, 64, 100, 128, 200, 257, 384)), r.choice((1, 30, 64, 128, 190, 256, 333))
    if r.random() < 0.5:
        seqlen_k = seqlen_q
    head_dim = r.choice(HEAD_DIMS)
    case: dict[str, Any] = dict(
        number=number, dtype=r.choice(("float16", "bfloat16", "bfloat16", "float32")), batch=r.choice((1, 2, 3)),
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads_kv * group, heads_kv=heads_kv, head_dim=head_dim,
        head_dim_v=head_dim if r.random() < 0.8 else r.choice((16, 64, 128)), backward=r.choice(("auto", "auto", "split", "fused")),
        varlen=r.random() < 0.12,
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
        return {**case, "alignment": "bottom-right"}
    if r.random() < 0.15:
        case["bias"] = r.choice(("bhqk", "1hqk", "b11k", "1h11", "11qk"))
    if r.random() < 0.1:
        case["mask"] = r.choice(("bhqk", "11qk", "b11k"))
    if r.random() < 0.2:
        case["lengths"] = r.choice(("k", "q", "qk"))
        if "bias" in case:  # no gradient of a bias where items differ in length
            del case["bias"]
    return case


def check(case: dict[str, Any]) -> dict[str, Any]:
    """A row of results; `failure` says what breaks the rule."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flashtile import Alibi, Dropout
    from flashtile.jax import dot_product_attention, dot_product_attention_varlen
    from flashtile.jax.dropout import keep, seed_words
    from tests.jax.quadratic import attention

    rng = np.random.default_rng(case["number"])
    b, t, s, n, m = (case[k] for k in ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv"))
    if case["varlen"]:
        b = 1
    dtype = jnp.dtype(case["dtype"])
    normal = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
    leaves = {"q": normal(b, t, n, case["head_dim"]), "k": normal(b, s, m, case["head_dim"])}
    leaves["v"] = normal(b, s, m, case["head_dim_v"])
    shape = lambda spelled: tuple(size if c != "1" else 1 for c, size in zip(spelled, (b, n, t, s), strict=True))
    if "bias" in case:
        leaves["bias"] = normal(*shape(case["bias"]))
    if "sinks" in case:
        leaves["sinks"] = rng.standard_normal(n).astype(np.float32)
    if "slopes" in case:
        leaves["slopes"] = (rng.random(n) / 8).astype(np.float32)
    fixed: dict[str, Any] = {}
    if "mask" in case:
        fixed["mask"] = rng.random(shape(case["mask"])) < 0.7
    static = {k: case[k] for k in ("is_causal", "local_window_size") if k in case}
    if "softcap" in case:
        static["softcap"] = 3.0
    for side, size in (("q", t), ("k", s)):
        if side in case.get("lengths", ""):
            name = {"q": "query_seq_lengths", "k": "key_value_seq_lengths"}[side]
            fixed[name] = rng.integers(0, size + 1, b).astype(np.int32)
    cu: tuple[Any, ...] = ()
    if case["varlen"]:
        items = 4
        cuts = [np.sort(rng.integers(0, size + 1, items - 1)) for size in (t, s)]
        cu = tuple(np.array([0, *c, size], np.int32) for c, size in zip(cuts, (t, s), strict=True))
    dout = normal(b, t, n, case["head_dim_v"])
    dlse = rng.standard_normal((b, t, n)).astype(np.float32)

    def ours(leaves: Any, fixed: Any, cu: Any) -> Any:
        extras = dict(static, backward=case["backward"], return_residual=True)
        score = (Alibi(leaves["slopes"]),) if "slopes" in leaves else ()
        extras |= {"score": score, **({"dropout": Dropout(0.2, 11)} if "dropout" in case else {})}
        if "sinks" in leaves:
            extras["sinks"] = leaves["sinks"]
        inputs = [leaves[k] for k in "qkv"]
        if cu:
            out, lse = dot_product_attention_varlen(*(x[0] for x in inputs), *cu, **extras)
            return out[None], lse[None]
        extras["alignment"] = case.get("alignment", "top-left")
        return dot_product_attention(*inputs, leaves.get("bias"), **fixed, **extras)

    def plain(leaves: Any, fixed: Any, cu: Any) -> Any:
        rest = dict(static, slopes=leaves.get("slopes"), sinks=leaves.get("sinks"))
        rest["bottom_right"] = case.get("alignment") == "bottom-right"
        index = [jnp.arange(size, dtype=jnp.int32) for size in (b, n, t, s)]
        index = [x.reshape(-1, *(1,) * (3 - axis)) for axis, x in enumerate(index)]
        if cu:
            return varlen_plain(leaves, cu, rest, index)
        if "dropout" in case:
            rest |= dict(p=0.2, keep=keep(0.2, *index, n, seed_words(Dropout(0.2, 11))))
        return attention(*(leaves[k] for k in "qkv"), leaves.get("bias"), **fixed, **rest)

    def varlen_plain(leaves: Any, cu: Any, rest: Any, index: Any) -> Any:
        """Item by item: their lengths are known here."""
        outs, lses = [], []
        for i in range(len(cu[0]) - 1):
            (a, z), (c, d) = ((int(x[i]), int(x[i + 1])) for x in cu)
            own = dict(rest)
            if "dropout" in case:
                places = [jnp.full((1, 1, 1, 1), i, jnp.int32), index[1], index[2][:, :, : z - a], index[3][..., : d - c]]
                own |= dict(p=0.2, keep=keep(0.2, *places, n, seed_words(Dropout(0.2, 11))))
            out, lse = attention(leaves["q"][:, a:z], leaves["k"][:, c:d], leaves["v"][:, c:d], **own)
            outs.append(out)
            lses.append(lse)
        return jnp.concatenate(outs, 1), jnp.concatenate(lses, 1)

    def everything(function: Any, leaves: Any, dout: Any, dlse: Any, cu: Any) -> dict[str, Any]:
        (out, lse), pull = jax.vjp(lambda x: function(x, fixed, cu), leaves)
        (grads,) = pull((dout.astype(out.dtype), jnp.where(jnp.isfinite(lse), dlse, 0).astype(lse.dtype)))
        return {"out": out, "lse": lse, **{f"d{k}": g for k, g in grads.items()}}

    got = jax.jit(lambda x, do, dl, cu: everything(ours, x, do, dl, cu))(leaves, dout, dlse, cu)
    got = {k: np.asarray(x, np.float64) for k, x in got.items()}
    rough = jax.jit(lambda x, do, dl: everything(plain, x, do, dl, cu))(leaves, dout, dlse)
    rough = {k: np.asarray(x, np.float64) for k, x in rough.items()}
    with jax.enable_x64(True):
        wide = {k: np.asarray(x, np.float64) for k, x in leaves.items()}
        run = jax.jit(lambda x, do, dl: everything(plain, x, do, dl, cu))
        exact = {k: np.asarray(x) for k, x in run(wide, np.asarray(dout, np.float64), np.asarray(dlse, np.float64)).items()}
    failures, worst = [], 0.0
    for name, truth in exact.items():
        mine = got[name]
        if name == "lse":
            empty = truth == -np.inf
            if not np.array_equal(mine == -np.inf, empty):
                failures.append("lse: -inf in the wrong rows")
            elif not empty.all():
                off = (np.abs(mine - truth)[~empty] / np.maximum(np.abs(truth[~empty]), 1.0)).max()
                failures += [f"lse off by {off:.2g}"] if not off <= LSE_TOLERANCE else []
            continue
        if not np.isfinite(mine).all():
            failures.append(f"{name} is not finite")
            continue
        if not truth.size:
            continue
        floor = (
            (FLOOR_SUM_ULP if name in ("dbias", "dsinks", "dslopes") else FLOOR_ULP) * EPS[case["dtype"]] * np.abs(truth).max()
        )
        off, theirs = np.abs(mine - truth).max(), np.abs(rough[name] - truth).max()
        allowed = max(FACTOR * theirs, floor)
        worst = max(worst, off / allowed if allowed else float(off > 0))
        if off > allowed:
            failures.append(f"{name} off by {off:.3g}, plain JAX by {theirs:.3g}, allowed {allowed:.3g}")
    return dict(case=case["number"], worst=round(float(worst), 3), failure="; ".join(failures), options=spell(case))


def spell(case: dict[str, Any]) -> str:
    return ";".join(f"{k}={v}" for k, v in case.items() if k != "number" and v not in (False, None))


def work(first: int, step: int, cases: int, limit: float, output: Path) -> None:
    end = time.perf_counter() + limit
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["case", "worst", "failure", "options"])
        writer.writeheader()
        for number in range(first, cases, step):
            if time.perf_counter() > end:
                break
            try:
                row = check(draw(number))
            except Exception as error:
                row = dict(case=number, worst="", failure=f"{type(error).__name__}: {error}"[:500], options=spell(draw(number)))
            writer.writerow(row)
            file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/jax-accuracy.csv"))
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    if chosen.first is not None:
        work(chosen.first, chosen.workers, chosen.cases, chosen.limit, chosen.output)
        return 0
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
    parts = [chosen.output.with_suffix(f".{i}.part") for i in range(chosen.workers)]
    command = [sys.executable, __file__, "--cases", str(chosen.cases), "--workers", str(chosen.workers)]
    children = [
        subprocess.Popen([*command, "--limit", str(chosen.limit), "--first", str(i), "--output", str(part)], env=environment)
        for i, part in enumerate(parts)
    ]
    for child in children:
        child.wait()
    rows: list[dict[str, str]] = []
    for part in parts:
        if part.exists():
            with part.open() as file:
                rows += csv.DictReader(file)
            part.unlink()
    rows.sort(key=lambda row: int(row["case"]))
    with chosen.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["case", "worst", "failure", "options"])
        writer.writeheader()
        writer.writerows(rows)
    failed = [row for row in rows if row["failure"]]
    for row in failed[:40]:
        print(f"FAIL {row['case']} {row['options']}: {row['failure']}")
    print(f"{len(rows)} cases, {len(failed)} failures")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
