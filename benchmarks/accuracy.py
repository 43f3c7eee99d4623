"""Judges random GPU cases by the accuracy rule, and writes what it found.

    python benchmarks/accuracy.py [--cases 2400] [--seed 0] [--output benchmarks/results/accuracy.csv]

Rule: for out, dq, dk, dv the largest error against float64 is at most 1.5 x that of a plain PyTorch computation in the
same dtype, or 2 units in the last place of the tensor's largest element, whichever is more; lse is right to 1e-5.
Lengths, batch and heads are random; dtype, head dims, mask kind, modifiers and backward variant are drawn from a bounded
set, so that a run compiles a few hundred kernels and no more.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from flashtile import dispatch
from flashtile.plan.backend import Gradients
from flashtile.reference.attention import attention_plain, attention_reference
from flashtile.torch.attention import prepare
from flashtile.torch.run import Bound, KernelLaunch

FACTOR, FLOOR_ULP, LSE = 1.5, 2.0, 1e-5
FLOOR_SUM_ULP = 16.0  # dslopes: one number per head out of up to a million terms, where two luckless roundings decide a ratio
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = ((64, 64), (128, 128), (80, 80), (16, 16), (256, 256), (192, 128), (64, 128), (5, 40), (8, 128))
MASKS = ("full", "causal", "window", "left")
SCORES = ("none", "none", "none", "softcap", "alibi", "softcap+alibi")


def profiles(seed: int) -> list[tuple[str, tuple[int, int], str, str, str, int, int]]:
    """The bounded set: every dtype and pair of head dims, with mask, modifiers, variant and heads drawn for each."""
    dice = random.Random(seed)
    return [
        (dtype, dims, dice.choice(MASKS), dice.choice(SCORES), dice.choice(("split", "fused")), dice.choice((1, 2, 3)),
         dice.choice((1, 1, 2, 3)))
        for dtype in DTYPES for dims in DIMS
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One random call."""

    number: int
    dtype: str
    dims: tuple[int, int]
    mask: str
    score: str
    variant: str
    batch: int
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_k: int
    dlse: bool

    def arguments(self, slopes: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of the call; `slopes` in the precision of the caller."""
        masks: dict[str, Any] = {
            "full": {}, "causal": dict(causal=True), "window": dict(window=(33, 17)), "left": dict(window=(100, None)),
        }  # fmt: skip
        modifiers = {"softcap": flashtile.Softcap(15.0), "alibi": flashtile.Alibi(slopes)}
        return dict(masks[self.mask], score=tuple(modifiers[name] for name in self.score.split("+") if name != "none"))


def draw(number: int, seed: int) -> Case:
    """The case of this number: the same in every run with this seed."""
    dice = random.Random(seed * 1_000_003 + number)
    lengths = (dice.randint(1, 96), dice.randint(97, 700), dice.choice((128, 256, 512, 1024)))
    seqlen_q = dice.choice(lengths)
    seqlen_k = seqlen_q if dice.random() < 0.4 else dice.randint(1, 800)
    dtype, dims, mask, score, variant, heads_kv, group = dice.choice(profiles(seed))
    return Case(
        number, dtype, dims, mask, score, variant, dice.randint(1, 3), heads_kv, group,
        seqlen_q, seqlen_k, dice.random() < 0.3,
    )  # fmt: skip


def tensors_of(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(case.number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    d, dv = case.dims
    heads = case.heads_kv * case.group
    dtype = DTYPES[case.dtype]
    return {
        "q": normal(case.batch, case.seqlen_q, heads, d).to(dtype),
        "k": normal(case.batch, case.seqlen_k, case.heads_kv, d).to(dtype),
        "v": normal(case.batch, case.seqlen_k, case.heads_kv, dv).to(dtype),
        "dout": normal(case.batch, case.seqlen_q, heads, dv).to(dtype),
        "dlse": normal(case.batch, heads, case.seqlen_q),
        "slopes": torch.rand(heads, generator=generator, device=device) / 8,
    }


def evaluate(function: Any, case: Case, tensors: dict[str, torch.Tensor], **extra: Any) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv (and dslopes) of one implementation."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in ("q", "k", "v")}
    slopes = tensors["slopes"].detach().requires_grad_("alibi" in case.score)
    out, lse = function(leaves["q"], leaves["k"], leaves["v"], **case.arguments(slopes), **extra)
    outputs, given = [out], [tensors["dout"].to(out.dtype)]
    if case.dlse:
        outputs.append(lse)
        given.append(tensors["dlse"].to(lse.dtype))
    wanted = [*leaves.values(), *([slopes] if "alibi" in case.score else [])]
    grads = torch.autograd.grad(outputs, wanted, given)
    names = ("dq", "dk", "dv", "dslopes")[: len(wanted)]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def judge(case: Case, device: torch.device) -> dict[str, Any]:
    """A row: the errors, their ratio to plain PyTorch's, and `breach` naming what broke the rule."""
    tensors = tensors_of(case, device)
    options = flashtile.Options(backend="triton", backward=case.variant)
    got = evaluate(flashtile.attention, case, tensors, return_lse=True, options=options)
    exact = evaluate(attention_reference, case, {n: t.double() for n, t in tensors.items()})
    plain = evaluate(attention_plain, case, tensors)
    row: dict[str, Any] = {f: str(getattr(case, f)) for f in Case.__dataclass_fields__}
    breaches: list[str] = []
    for name, truth in exact.items():
        mine = got[name].double()
        if name == "lse":
            empty = truth == -torch.inf
            error = ((mine - truth)[~empty].abs() / truth[~empty].abs().clamp(min=1)).max().item() if (~empty).any() else 0.0
            row["lse_error"] = error
            if not torch.equal(mine == -torch.inf, empty) or not error <= LSE:
                breaches.append(f"lse {error:.2e}")
            continue
        error, other = (mine - truth).abs().max().item(), (plain[name].double() - truth).abs().max().item()
        mean, other_mean = (mine - truth).abs().mean().item(), (plain[name].double() - truth).abs().mean().item()
        floor = (
            (FLOOR_ULP if name != "dslopes" else FLOOR_SUM_ULP) * torch.finfo(DTYPES[case.dtype]).eps * truth.abs().max().item()
        )
        row[f"{name}_error"], row[f"{name}_plain"], row[f"{name}_floor"] = error, other, floor
        row[f"{name}_mean_ratio"] = mean / other_mean if other_mean > 0 else 1.0
        if not error <= max(FACTOR * other, floor):
            breaches.append(f"{name} {error:.2e} plain {other:.2e} floor {floor:.2e}")
    row["breach"] = "; ".join(breaches)
    return row


def specialised(arg: Any) -> Any:
    """What Triton makes of an argument's value: it compiles anew for strides of 1 and for multiples of 16."""
    if isinstance(arg, tuple):
        return tuple(
            specialised(a) if isinstance(a, tuple) or a is None else a % 16 == 0 if isinstance(a, int) else "" for a in arg
        )
    return arg


def launches_of(case: Case, device: torch.device) -> list[tuple[Any, KernelLaunch, dict[str, torch.Tensor]]]:
    """Every kernel launch of a case with its tensors, and what distinguishes its compiled code from another's."""
    tensors = tensors_of(case, device)
    slopes = tensors.pop("slopes").requires_grad_("alibi" in case.score)
    masks = {"causal": False, "window": None, "score": (), **case.arguments(slopes)}
    options = flashtile.Options(backend="triton", backward=case.variant)
    q, k, v = (tensors[n] for n in "qkv")
    call, captured = prepare(q, k, v, masks["causal"], masks["window"], None, masks["score"], None, options)
    tensors.update(call.tensors(q, k, v, [t.detach() for t in captured]))
    gradients = Gradients(dlse=case.dlse)
    found = []
    for plan in (call.plan, dispatch.plan_backward(call.problem, call.place, gradients, "triton", case.variant)):
        bound = Bound(plan, {b.name: tensors[b.name] for b in plan.named("input")}, device)
        for name, shape, strides, dtype, _ in bound.allocations:
            tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for launch in bound.launches:
            assert isinstance(launch, KernelLaunch)
            identity = (launch.call.kernel.fn.__name__, launch.call.constants, case.dtype, specialised(tuple(launch.args)))
            found.append((identity, launch, tensors))
    return found


def compile_ahead(cases: list[Case], device: torch.device) -> None:
    """Compile what the cases need, in parallel."""
    needed: dict[Any, tuple[KernelLaunch, dict[str, torch.Tensor]]] = {}
    for case in cases:
        for identity, launch, tensors in launches_of(case, device):
            needed.setdefault(identity, (launch, tensors))
    print(f"{len(needed)} kernels to compile", flush=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda pair: pair[0].warm(pair[1]), needed.values()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/accuracy.csv"))
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0)
    start = time.perf_counter()
    cases = [draw(n, chosen.seed) for n in range(chosen.cases)]
    compile_ahead(cases, device)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        try:
            rows.append(judge(case, device))
        except flashtile.NotSupported:
            raise
        except RuntimeError as error:
            if "illegal" in str(error) or "launch" in str(error):  # the process's GPU context is lost
                print("FAULT", case, flush=True)
                raise
            # a kernel that does not compile or run is a failure like a wrong one
            rows.append(
                {
                    **{f: str(getattr(case, f)) for f in Case.__dataclass_fields__},
                    "breach": f"{type(error).__name__}: {error}"[:300],
                }
            )
        if rows[-1]["breach"]:
            print("BREACH", case, rows[-1]["breach"], flush=True)
        if time.perf_counter() - start > chosen.budget:
            print("budget used up", flush=True)
            break
    failures = sum(bool(row["breach"]) for row in rows)
    for dtype in DTYPES:
        for name in ("out", "dq", "dk", "dv", "dslopes"):
            mine = [r for r in rows if r["dtype"] == dtype and f"{name}_error" in r]
            if not mine:
                continue
            allowed = sorted(r[f"{name}_error"] / max(r[f"{name}_plain"], r[f"{name}_floor"] / FACTOR, 1e-30) for r in mine)
            means = sorted(r[f"{name}_mean_ratio"] for r in mine)
            print(
                f"{dtype} {name:8s} {len(mine):5d} cases  error / max(plain, floor): worst {allowed[-1]:.3f}"
                f" p99 {allowed[int(0.99 * len(allowed))]:.3f}  mean-error ratio: median {means[len(means) // 2]:.3f}"
            )
    lse = sorted(r["lse_error"] for r in rows if "lse_error" in r)
    print(f"lse relative error: worst {lse[-1]:.2e} p99 {lse[int(0.99 * len(lse))]:.2e}")
    properties = torch.cuda.get_device_properties(0)
    print(f"{len(rows)} cases, {failures} failures, {properties.name}, torch {torch.__version__}, triton {triton.__version__}")
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with chosen.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({c: f"{v:.3e}" if isinstance(v, float) else v for c, v in row.items()} for row in rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
