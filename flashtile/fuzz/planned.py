"""The plans of a case on a device that need not be there: nothing is computed, and no tensor of its size is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashtile import dispatch
from flashtile.errors import NotSupported
from flashtile.export.build import key_of
from flashtile.fuzz.case import Case
from flashtile.fuzz.make import TORCH, Inputs, arguments, captured_shape, lengths_of, where_of
from flashtile.fuzz.tiles import forced
from flashtile.plan.backend import Gradients
from flashtile.plan.call import KernelCall, Plan
from flashtile.plan.device import Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Variant
from flashtile.torch.call.arguments import Arguments
from flashtile.torch.call.describe import make_problem
from flashtile.torch.call.lengths import given_lengths
from flashtile.triton_glue.compile import specialise

CPU = torch.device("cpu")


def problem_of(case: Case, place: torch.device = CPU) -> AttentionProblem:
    """What a case asks for. place: where masks' tensors are made and looked at. Raises InvalidProblem."""
    c = replace(case, layout="bshd")
    inputs = Inputs(c, place, c.lengths(), where=where_of(c, place))
    slabs = 1 if c.items else c.batch
    shapes = {
        "q": (slabs, c.seqlen_q, c.heads_q, c.head_dim),
        "k": (slabs, c.seqlen_k, c.heads_kv, c.head_dim),
        "v": (slabs, c.seqlen_k, c.heads_kv, c.head_dim_v),
    }
    inputs.leaves |= {name: torch.zeros((), dtype=TORCH[c.dtype], device=place).expand(shape) for name, shape in shapes.items()}
    if c.sink:
        inputs.leaves["sink"] = torch.zeros((c.heads_q,), dtype=TORCH[c.sink], device=place)
    for i, name in enumerate(c.modifiers):
        shape = captured_shape(c, name)
        if shape is not None:
            inputs.leaves[f"score.{i}"] = torch.empty(shape, dtype=TORCH[c.score_dtype], device=place)
    leaves = {n: t.detach().requires_grad_(n in inputs.wanted) for n, t in inputs.leaves.items()}
    lengths: dict[str, Any] = lengths_of(inputs)
    q, k, v = (leaves[n] for n in "qkv")
    return make_problem(q, k, v, Arguments(**arguments(inputs, leaves)), given_lengths(**lengths))[0]


def plans_of(case: Case, device: Device, place: torch.device = CPU) -> list[Plan]:
    """The plans of its forward and, if it has one, its backward. Raises NotSupported."""
    problem, backend, variant = problem_of(case, place), case.backend or None, case.backward
    made = [dispatch.plan_forward(problem, device, backend)]
    if case.upstream != "none":
        wanted = Gradients(frozenset(case.wants), case.upstream in ("both", "lse"))
        how: Variant = variant  # pyright: ignore[reportAssignmentType] (checked by Case)
        made.append(dispatch.plan_backward(problem, device, wanted, backend, how))
    return made


class Unmet:
    """Whether a case has a kernel that no case before it had, as its plans say: all tensors are taken to be dense."""

    def __init__(self, device: Device, place: torch.device = CPU):
        self.device, self.place, self.met = device, place, set[Any]()

    def brings(self, case: Case) -> bool:
        """False of what is refused; true of what cannot be planned, so that it is run, and found wrong."""
        try:
            with forced(case.tile):
                plans = plans_of(case, self.device, self.place)
        except NotSupported:
            return False
        except Exception:
            return True
        buffers = [{b.name: b for b in plan.buffers} for plan in plans]
        calls = [(call, named) for plan, named in zip(plans, buffers, strict=True) for call in plan.calls]
        kernels = [(call, named) for call, named in calls if isinstance(call, KernelCall) and 0 not in call.grid]
        new = {key_of(call, specialise(call, named), self.device) for call, named in kernels} - self.met
        self.met |= new
        return bool(new)
