"""A prepared call: a validated problem and the plans bound to one layout of its tensors, with the backwards met so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashtile import dispatch
from flashtile.plan.backend import Gradients
from flashtile.plan.buffers import input_buffers
from flashtile.plan.call import Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.options import Options
from flashtile.torch.execute.bound import Bound, device_of
from flashtile.torch.execute.packing import APART, PackedGradient, Packing
from flashtile.torch.execute.replay import HostReplay, Replay, addresses_of
from flashtile.triton_glue import language as _triton

Tensors = dict[str, torch.Tensor]


class PreparedCall:
    """A validated problem, bound to one layout of q, k, v, with the backwards met so far."""

    def __init__(self, problem: AttentionProblem, options: Options, device: torch.device):
        self.problem, self.options, self.device = problem, options, device
        self.names = tuple(b.name for b in input_buffers(problem)[3:])  # besides q, k, v
        self.place = device_of(device)
        self.on_gpu = self.place.kind != "cpu"
        if self.on_gpu:
            _triton.digest_ahead()
        self.plan = dispatch.plan_forward(problem, self.place, options.backend)
        if options.backward != "auto":  # asked for by name: refused even where no gradient is wanted
            dispatch.select(problem, self.place, options.backend, options.backward)
        self.kept = tuple(b.name for b in self.plan.named("output"))  # out, lse, and what else the backward wants
        self.bound_forward: Bound | None = None
        self.bound_backward: dict[Any, Bound] = {}
        self.bound_directed: dict[Any, Bound] = {}  # of passes beyond first derivatives (`execute.directed`)
        self.packing, self.packings = APART, dict[Packing, PreparedCall]()
        self.wished: dict[tuple[bool, ...], tuple[frozenset[str], list[str | None]]] = {}
        self.direct: dict[
            Any, tuple[Replay | HostReplay, list[int | None] | None]
        ] = {}  # of backwards: replay; which outputs, if not all
        # Where passes are one host call: its function of q, k, v (`HostReplay.function`), and by wishes for gradients that of
        # what the backward has, and which of its outputs, if not all.
        self.hosted: Callable[..., list[torch.Tensor] | None] | None = None
        self.hosted_backward: dict[tuple[bool, ...], tuple[Callable[..., list[Any] | None], list[int | None] | None]] = {}
        self.differentiable: set[bool] = set()  # for which wishes for determinism a backward is known to exist

    def require_backward(self) -> None:
        """Raise NotSupported now where the backward would have to, also under torch's own wish for determinism."""
        deterministic = self.problem.deterministic
        if self.options.deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic not in self.differentiable:
            problem = replace(self.problem, deterministic=deterministic)
            dispatch.select(problem, self.place, self.options.backend, self.options.backward)
            self.differentiable.add(deterministic)

    def packed(self, packing: Packing) -> PreparedCall:
        """The same call of tensors that hold q, k and v as parts."""
        found = self.packings.get(packing)
        if found is None:
            found = self.packings[packing] = copy(self)
            found.packing, found.bound_backward, found.bound_directed, found.wished, found.direct = packing, {}, {}, {}, {}
            found.hosted, found.hosted_backward = None, {}
        return found

    def tensors(self, packs: tuple[torch.Tensor, ...], others: Sequence[torch.Tensor], parts: Tensors | None = None) -> Tensors:
        """The inputs by name. parts: q, k, v, where the caller has them."""
        tensors = self.packing.unpack(packs) if parts is None else dict(parts)
        if others:
            tensors.update(zip(self.names, others, strict=True))
        return tensors

    def forward(
        self,
        packs: tuple[torch.Tensor, ...],
        others: Sequence[torch.Tensor],
        parts: Tensors | None = None,
        whole: bool = True,
        into: torch.Tensor | None = None,
        needs: tuple[bool, ...] | None = None,
    ) -> list[torch.Tensor]:
        """The plan's outputs, `kept` in order: out and lse first; unless `whole`, what is behind out may be None.

        into: where out is to be written, if kernels can; it is then the first of the outputs.
        needs: which inputs want a gradient. A first call then compiles also the backward's kernels.
        """
        replay = self.bound_forward and self.bound_forward.replay
        if replay is not None and replay.outputs is not None:
            if self.packing is not APART:
                packs = tuple((self.packing.unpack(packs) if parts is None else parts).values())
            inputs = *packs, *others
            if isinstance(replay, Replay):
                return replay.direct(inputs, addresses_of(inputs), whole, None if into is None else ("out", into))
            made = replay.direct(inputs)
            if replay.fits and self.packing is APART:
                self.hosted = replay.function
            return made
        tensors = self.tensors(packs, others, parts)
        if self.bound_forward is None:
            self.bound_forward = Bound(self.plan, tensors, self.device)
            if needs is not None:
                wanted, _ = self.wished.get(needs) or self.wish(needs)
                self.bound_forward.follow = partial(self.compile_backward, Gradients(wanted), self.deterministic)
        self.bound_forward.run(tensors)
        return [tensors[name] for name in self.kept]

    def gradients(
        self,
        saved: Sequence[torch.Tensor],
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        needs: tuple[bool, ...],
        wide_keys: bool = False,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all inputs, None where not needed; saved: the inputs, then what the forward returned.

        wide_keys: those of 16-bit k and v are float32. into: where dq, which is needed, is to be written, if kernels can; it is
        then what is returned.
        """
        count = len(self.packing.packs)
        first_kept = count + len(self.names)
        if dout is None:
            if dlse is None:
                return (None,) * first_kept
            dout = torch.zeros((), dtype=saved[0].dtype, device=saved[0].device).expand(saved[first_kept].shape)
        dout = dout.resolve_neg() if dout.is_neg() else dout
        inputs = (*saved, dout)
        if dlse is not None:
            inputs = (*inputs, dlse.resolve_neg() if dlse.is_neg() else dlse)
        deterministic = self.deterministic
        key: Any = None
        if self.packing is APART:  # a hook of saved tensors may have laid also those otherwise that the forward kept
            addresses = addresses_of(inputs) if self.on_gpu else ()
            key = needs, deterministic, wide_keys, alignment(addresses), *map(torch.Tensor.stride, inputs)
            direct = self.direct.get(key)
            if direct is not None:
                replay, places = direct
                made = replay.direct(inputs, addresses, into=None if into is None else ("dq", into))
                if isinstance(replay, HostReplay) and replay.fits and dlse is None:
                    self.hosted_backward[needs] = replay.function, places
                return tuple(made) if places is None else tuple([None if i is None else made[i] for i in places])
        wanted, names = self.wished.get(needs) or self.wish(needs)
        packs, others = tuple(saved[:count]), saved[count:first_kept]
        tensors = self.tensors(packs, others)
        tensors.update(zip((*self.kept, "dout", "dlse"), inputs[first_kept:], strict=False))
        replay = self.backward(tensors, packs, wanted, deterministic, wide_keys).replay
        given = [None if name is None else tensors[name] for name in names]
        if key is not None and replay is not None and replay.outputs is not None:
            as_they_come = (1, 2) if wide_keys else ()
            if all(g is None or g.dtype is saved[i].dtype or i in as_they_come for i, g in enumerate(given)):
                places = [None if name is None else replay.made.index(name) for name in names]
                self.direct[key] = replay, None if places == [*range(len(replay.made))] else places
        for i, tensor in enumerate(others, count):
            gradient = given[i]
            given[i] = None if gradient is None else gradient.to(tensor.dtype)
        return tuple(given)

    @property
    def deterministic(self) -> bool:
        """Whether gradients are wanted in one order, by the call or by torch's own wish."""
        wished = self.options.deterministic
        return torch.are_deterministic_algorithms_enabled() if wished is None else wished

    def plan_backward(self, gradients: Gradients, deterministic: bool) -> Plan:
        """How these gradients are computed."""
        problem = self.problem
        if deterministic and not problem.deterministic:
            problem = replace(problem, deterministic=True)
        return dispatch.plan_backward(problem, self.place, gradients, self.options.backend, self.options.backward)

    def compile_backward(self, gradients: Gradients, deterministic: bool, pool: Executor) -> None:
        """Have the pool leave on disk what a backward will launch whose tensors lie as those of the forward."""
        from flashtile.triton_glue.compile import submit_plan

        submit_plan(pool, self.plan_backward(gradients, deterministic), self.place)

    def wish(self, needs: tuple[bool, ...]) -> tuple[frozenset[str], list[str | None]]:
        """(which of q, k and v want a gradient, each input's gradient by name, None where not needed)."""
        names = (*self.packing.names, *self.names)
        wanted = frozenset("".join(name for name, need in zip(self.packing.names, needs, strict=False) if need))
        self.wished[needs] = wanted, [f"d{name}" if need else None for name, need in zip(names, needs, strict=True)]
        return self.wished[needs]

    def backward(
        self,
        tensors: Tensors,
        packs: tuple[torch.Tensor, ...],
        wanted: frozenset[str],
        deterministic: bool,
        wide_keys: bool = False,
    ) -> Bound:
        """The binding that has added the gradients to the tensors."""
        given = tensors.values()
        key = wanted, deterministic, wide_keys, alignment(addresses_of(given)), *map(torch.Tensor.stride, given)
        bound = self.bound_backward.get(key)
        if bound is None:
            plan = self.plan_backward(Gradients(wanted, "dlse" in tensors, wide_keys), deterministic)
            packed = [
                PackedGradient(pack, tensor)
                for pack, tensor in zip(self.packing.packs, packs, strict=True)
                if len(pack.parts) > 1 and wanted.issuperset(pack.parts)
            ]
            bound = self.bound_backward[key] = Bound(plan, tensors, self.device, packed)
        bound.run(tensors)
        return bound


def alignment(addresses: Sequence[int]) -> Any:
    """0 when all are 16-byte aligned, which Triton specialises on."""
    bits = 0
    for address in addresses:
        bits |= address
    return tuple([address & 15 for address in addresses]) if bits & 15 else 0
