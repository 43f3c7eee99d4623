"""Running a companion case and judging its numbers by the accuracy rule of tests/judge.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashtile.torch.ops.run import run
from tests.companions.cases import Case, Tensors
from tests.judge import FACTOR, FLOOR_ULP

# A sum over all rows, small by itself, has terms of both signs: few roundings decide it.
FLOOR_SUM_ULP = 16.0


def evaluate(function: Callable[[Tensors], Tensors], case: Case, tensors: Tensors) -> Tensors:
    """The public outputs and the wanted gradients, by name."""
    names = [name for name, _ in case.problem.given]
    overwrites = getattr(case.problem, "inplace", False)
    given = {name: tensors[name].clone() if overwrites else tensors[name].detach() for name in names}
    for name in case.wanted:
        given[name].requires_grad_()
    made = function({n: t.clone() if overwrites and t.requires_grad else t for n, t in given.items()})
    flowing = [name for name in made if f"d{name}" in tensors and made[name].requires_grad]
    leaves = [given[name] for name in case.wanted]
    grads = torch.autograd.grad(
        [made[n] for n in flowing], leaves, [tensors[f"d{n}"].to(made[n].dtype) for n in flowing], allow_unused=True
    )
    found = {name: tensor.detach() for name, tensor in made.items()}
    for name, leaf, grad in zip(case.wanted, leaves, grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def result(case: Case, tensors: Tensors, backend: str) -> Tensors:
    problem = case.problem

    def function(given: Tensors) -> Tensors:
        return dict(zip(problem.public(), run(problem.op, given, problem.options(), backend), strict=True))

    return evaluate(function, case, tensors)


def truth(case: Case, tensors: Tensors) -> Tensors:
    return evaluate(case.reference, case, {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()})


def plain(case: Case, tensors: Tensors) -> Tensors:
    return evaluate(case.reference, case, tensors)


def breaches(case: Case, got: Tensors, exact: Tensors, other: Tensors) -> Iterator[str]:
    """What breaks the accuracy rule, a sentence for each tensor."""
    for name, true in exact.items():
        mine, theirs = got[name], other[name]
        if mine.shape != true.shape or mine.dtype != theirs.dtype:
            yield f"{name} is {tuple(mine.shape)} {mine.dtype}, not {tuple(true.shape)} {theirs.dtype}"
            continue
        held = true.to(mine.dtype).isfinite()  # the others are no numbers, or more than the dtype can say
        if not torch.equal(mine.isfinite(), held):
            yield f"{name} is not finite, or is where it cannot be, at {(mine.isfinite() != held).nonzero()[:4].tolist()}"
        elif held.any():
            true, mine, theirs = true[held], mine[held], theirs[held]
            error, plain_error = (mine.double() - true).abs().max().item(), (theirs.double() - true).abs().max().item()
            ulp = torch.finfo(mine.dtype).eps * true.abs().max().item()
            ulp = max(ulp, case_ulp(case, name) * true.abs().max().item())
            allowed = max(FACTOR * plain_error, (FLOOR_SUM_ULP if is_sum(case, name) else FLOOR_ULP) * ulp)
            if not error <= allowed:
                yield f"{name} is off by {error:.3g}; plain PyTorch by {plain_error:.3g}, allowed {allowed:.3g}"


def case_ulp(case: Case, name: str) -> float:
    """A float32 result of 16-bit inputs is as exact as what was rounded on the way: h, and the gradients that arrive."""
    problem = case.problem
    if problem.op == "norm" and name != "h":
        return torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.stored]).eps  # type: ignore[attr-defined]
    return 0.0


def is_sum(case: Case, name: str) -> bool:
    """Whether a gradient is a sum over rows, which few roundings decide where it is small."""
    described = case.problem.find(name[1:])
    return name.startswith("d") and described is not None and len(described.shape) == 1


def judge(case: Case, got: Tensors, tensors: Tensors) -> None:
    exact, other = truth(case, tensors), plain(case, tensors)
    assert got.keys() == exact.keys()
    found = list(breaches(case, got, exact, other))
    assert not found, f"{case}:\n" + "\n".join(found)
