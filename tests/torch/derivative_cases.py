"""Random cases of second derivatives and statistics by kernels, judged beside plain PyTorch in the same dtype.

    python -m tests.torch.derivative_cases [--cases 640] [--first 0] [--processes 16] [--budget 600]

Few variants, which decide what is compiled, and many sizes. Of each case: the tangents of out and lse, the gradients' tangents
(forward over reverse), double backward (with what goes back to the upstream gradient), and statistics with the entropy's
gradient. No result may be farther from float64 than 1.5 times what attention in a few lines of the dtype is, or 2 units in the
last place of its largest element. On a GPU if there is one, else in Triton's interpreter (TRITON_INTERPRET=1). The exit status
is 1 if anything is.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashtile
from flashtile import Alibi, Band, Bias, Document, Mass, Options, Softcap
from flashtile.reference.attention import attention_plain

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
# (dtype, head_dim, query heads per key head, features)
VARIANTS: tuple[tuple[torch.dtype, int, int, tuple[str, ...]], ...] = (
    (BRAIN, 64, 1, ()), (HALF, 64, 2, ("causal",)), (FULL, 32, 1, ("causal",)), (BRAIN, 128, 1, ("causal",)),
    (FULL, 64, 2, ("softcap",)), (BRAIN, 32, 2, ("softcap", "causal")), (FULL, 32, 1, ("sink", "window")),
    (HALF, 32, 1, ("alibi",)), (BRAIN, 64, 1, ("sink",)), (FULL, 32, 2, ("varlen", "causal")), (BRAIN, 64, 1, ("varlen",)),
    (FULL, 32, 1, ("bias",)),
    (BRAIN, 64, 2, ("window",)), (FULL, 32, 1, ("document",)), (HALF, 64, 1, ("document", "softcap")), (FULL, 64, 1, ()),
)  # fmt: skip
Tensors = Sequence[torch.Tensor]


class Drawn:
    """A case: its inputs in float64, rounded to the dtype, and arguments of any dtype."""

    def __init__(self, variant: int, seed: int, device: torch.device):
        self.dtype, d, group, self.features = VARIANTS[variant]
        self.device, draw = device, random.Random(seed)
        small = device.type == "cpu"
        self.generator = torch.Generator().manual_seed(seed)
        n, m, batch, heads = (
            draw.randint(1, 40 if small else 300),
            draw.randint(1, 40 if small else 300),
            draw.randint(1, 2),
            draw.randint(1, 2),
        )
        if "varlen" in self.features:
            cuts = sorted(draw.randint(0, n) for _ in range(2)), sorted(draw.randint(0, m) for _ in range(2))
            self.lengths = {
                f"cu_seqlens_{s}": torch.tensor([0, *cut, size], dtype=torch.int32, device=device)
                for s, cut, size in zip("qk", cuts, (n, m), strict=True)
            }
            shapes = ((n, heads * group, d), (m, heads, d), (m, heads, d))
        else:
            self.lengths = {}
            shapes = ((batch, n, heads * group, d), (batch, m, heads, d), (batch, m, heads, d))
        self.inputs = [self.normal(s) for s in shapes]
        self.inputs[0] = (self.inputs[0] * draw.choice((1.0, 1.0, 3.0))).to(self.dtype).double()  # 3 q is rounded, too
        self.moved = [self.normal(s) for s in shapes]
        self.upstream = self.normal(shapes[0])
        self.weights = self.normal((*shapes[0][:-3], shapes[0][-2], shapes[0][-3]))
        self.sink, self.slopes, self.bias = (
            self.normal((heads * group,)),
            self.normal((heads * group,)).abs() / 8,
            self.normal((1, heads * group, n, m)),
        )
        self.window = (draw.randint(0, 20), draw.randint(0, 20))
        ids = draw.randint(3, 20)
        self.documents = [(torch.arange(size, device=device) // ids)[None].expand(batch, -1) for size in (n, m)]

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32).to(self.device).to(self.dtype).double()

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {"causal": "causal" in self.features}
        score: list[Any] = []
        if "bias" in self.features:
            score.append(Bias(self.bias.to(dtype)))
        if "alibi" in self.features:
            score.append(Alibi(self.slopes.to(torch.promote_types(dtype, torch.float32))))
        if "softcap" in self.features:
            score.append(Softcap(5.0))
        if "sink" in self.features:
            made["sink"] = self.sink.to(torch.promote_types(dtype, torch.float32))
        if "window" in self.features:
            made["window"] = self.window
        if "document" in self.features:
            made["mask"] = Document(*self.documents) & Band(right=30)
        return {**made, "score": tuple(score), **self.lengths}


def results(case: Drawn, function: Callable[..., Any], dtype: torch.dtype) -> dict[str, Tensors]:
    """All derivatives of (out, lse) = function(q, k, v), by name."""
    x, t = ([one.to(dtype) for one in some] for some in (case.inputs, case.moved))
    upstream, weights = case.upstream.to(dtype), case.weights.to(torch.promote_types(dtype, FULL))

    def rows(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = function(*given)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    made = {"tangent": torch.func.jvp(rows, tuple(x), tuple(t))[1]}
    leaves = [one.detach().requires_grad_() for one in (*x, upstream)]
    out, lse = rows(*leaves[:3])
    grads = torch.autograd.grad((out, lse), leaves[:3], (leaves[3], weights), create_graph=True)
    made["double backward"] = torch.autograd.grad(grads, leaves, t)

    def first(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: Any = torch.func.vjp(rows, *given)
        return found[1]((upstream, weights))

    made["hessian product"] = torch.func.jvp(first, tuple(x), tuple(t))[1]
    return made


def wrong(variant: int, seed: int, device: torch.device, backend: str) -> list[str]:
    """What is, of a case."""
    case = Drawn(variant, seed, device)
    options = Options(backend=backend)
    ours: Any = flashtile.attention_varlen if case.lengths else flashtile.attention
    exact = results(case, lambda *x: attention_plain(*x, **case.arguments(torch.float64)), torch.float64)
    plain = results(case, lambda *x: attention_plain(*x, **case.arguments(case.dtype)), case.dtype)
    found = results(case, lambda *x: ours(*x, **case.arguments(case.dtype), return_lse=True, options=options), case.dtype)
    bad: list[str] = []
    for name, truths in exact.items():
        for i, (truth, one, other) in enumerate(zip(truths, found[name], plain[name], strict=True)):
            if truth.numel() == 0:
                continue
            far, allowed = (one.double() - truth).abs().max(), (other.double() - truth).abs().max()
            ulp = torch.finfo(case.dtype).eps * truth.abs().max()
            if not far <= torch.maximum(1.5 * allowed, 2 * ulp) and not bool(allowed.isnan()):
                bad.append(f"{name}[{i}] off by {far:.3e}, plain by {allowed:.3e}, ulp {ulp:.3e}")
    return bad + wrong_statistics(case, ours, options)


def wrong_statistics(case: Drawn, ours: Any, options: Options) -> list[str]:
    """Against the CPU's in float64, whose own tests hold them against the definition."""
    names: tuple[Any, ...] = ("max_logit", "entropy", Mass(last=7))
    leaves = [t.to(case.dtype).requires_grad_() for t in case.inputs]
    _, found = ours(*leaves, **case.arguments(case.dtype), returns=names, options=options)
    wide = [t.to(case.dtype).double().cpu().requires_grad_() for t in case.inputs]
    given = {n: moved_to_cpu(x) for n, x in case.arguments(torch.float64).items()}
    if "mask" in given:
        given["mask"] = Document(*(t.cpu() for t in case.documents)) & Band(right=30)
    _, exact = ours(*wide, **given, returns=names)
    weights = case.weights.to(found.entropy)
    pairs = [(found.max_logit, exact.max_logit), (found.entropy, exact.entropy), (found.mass, exact.mass)]
    pairs += zip(
        torch.autograd.grad((found.entropy * weights).sum(), leaves[:2]),
        torch.autograd.grad((exact.entropy * weights.double().cpu()).sum(), wide[:2]), strict=True,
    )  # fmt: skip
    bad = []
    for i, (one, truth) in enumerate(pairs):
        hidden = truth == -torch.inf
        if truth.numel() and not torch.equal(one.cpu() == -torch.inf, hidden):
            bad.append(f"statistics[{i}]: other rows are -inf")
        elif truth.numel():
            far = (one.double().cpu() - truth).masked_fill(hidden, 0.0).abs().max()
            largest = truth.masked_fill(hidden, 0.0).abs().max()
            most = (4e-6 if case.dtype is FULL or i < 3 else 8 * torch.finfo(case.dtype).eps) * (1.0 + largest)
            most *= 1.0 if case.dtype is FULL else 4.0
            if not far <= 4 * most:
                bad.append(f"statistics[{i}] off by {far:.3e} of {largest:.3e}")
    return bad


def moved_to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(
            type(s)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in vars(s).values()))
            if isinstance(s, flashtile.Score)
            else s
            for s in value
        )
    return value


def run(variants: Sequence[int], cases: int, budget: float, first: int = 0) -> int:
    """The number of cases that are wrong, each told: so many of a variant from seed `first` on, or what the budget allows."""
    device, failed, done = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0, 0
    start = time.monotonic()
    for seed in range(first, first + cases):
        for variant in variants:
            if time.monotonic() - start > budget:
                break
            done += 1
            try:
                bad = wrong(variant, 1000 * variant + seed, device, "triton")
            except Exception as error:  # a case is a line, whatever comes of it
                bad = [f"{type(error).__name__}: {str(error)[:300]}"]
            if bad:
                failed += 1
                print(f"variant {variant} {VARIANTS[variant]} seed {seed}:", *bad, sep="\n    ", flush=True)
    print(f"variants {variants}: {done} cases, {failed} wrong", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=640)
    parser.add_argument("--first", type=int, default=0, help="each variant's first seed")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--variants", type=int, nargs="*", help="in this process alone")
    asked = parser.parse_args()
    each = -(-asked.cases // len(VARIANTS))
    if asked.variants is not None:
        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            from tests.interpreter import hasten

            hasten()
        return int(run(asked.variants, each, asked.budget, asked.first) > 0)
    shares = [list(range(i, len(VARIANTS), asked.processes)) for i in range(min(asked.processes, len(VARIANTS)))]
    command = [
        sys.executable,
        "-m",
        "tests.torch.derivative_cases",
        "--cases",
        str(asked.cases),
        "--first",
        str(asked.first),
        "--budget",
        str(asked.budget),
        "--variants",
    ]
    children = [subprocess.Popen([*command, *map(str, share)]) for share in shares]
    codes = [child.wait() for child in children]
    print("all right" if not any(codes) else "WRONG")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
