"""The launches of a plan whose kernels are compiled: all that changes from call to call are addresses."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from flashtile.memory import CacheInfo, Memory, listed
from flashtile.plan.call import Plan
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.descriptor import MOST_ADDRESSES
from flashtile.torch.execute.graph import Launches, LaunchGraph

SCRATCH_ALIGNMENT_BYTES = 256  # of buffers in one allocation; the bulk copy engine and wide loads want 16
ALIGNED_BYTES = 16  # of every output that is made, which Triton specialises on, and the bulk copy engine asks for
KEPT_BYTES = 16 << 20  # of scratch at most, from call to call: of larger problems the host's time does not count
MEETINGS = 8  # of the same addresses, after which they get a graph: to make one takes 60 us, and saves 2 to 11 a call (an H100)
MOST_GRAPHS = 64  # per plan; each takes 112 KiB of device memory
BRIEF_FLOPS = 8e9  # 20 us of an H100: less than the host takes for a call
FEW, LONG_FLOPS = 2, 2e10  # launches that the host makes in less time than the device takes for so much: 40 us of an H100


Into = tuple[str, torch.Tensor]  # the name of an output, and where it is to be
Allocation = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bool]  # name, shape, strides, dtype, zeroed
Tensors = dict[str, torch.Tensor]


class Prepared(Protocol):
    """A kernel's launch that lacks nothing but addresses: of the buffers that it names."""

    names: list[str]
    launch: Callable[..., Any]

    @property
    def grid(self) -> tuple[int, ...]: ...

    def arguments(self, addresses: dict[str, int]) -> list[Any]: ...


class Replay:
    """A bound plan's launches, by the addresses of its tensors.

    Scratch is one allocation, which small problems on the default stream `take`. Argument lists are remembered by
    stream and the addresses in them: a training loop meets few.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        launches: Sequence[Prepared],
        allocations: Sequence[Allocation],
        inputs: Sequence[str],
        alike: Mapping[str, str] | None,
        over: Mapping[str, str],
    ):
        """allocations: of all buffers that a run makes. alike: of these outputs the inputs that they lie like; None unless
        inputs are taken as they are and all outputs are tensors, or inputs, that nothing but launches writes. over: of these
        outputs the inputs that they are."""
        scratch = {b.name for b in plan.named("scratch")}
        self.device, self.known = device, Memory[tuple[int, ...], Met](MOST_ADDRESSES)
        self.launches, self.over = launches, over
        self.allocations = [a for a in allocations if a[0] not in scratch or a[4]]
        self.offsets, self.scratch_bytes = dict[str, int](), 0
        for name, shape, _, dtype, zeroed in allocations:
            if name in scratch and not zeroed:
                self.offsets[name] = self.scratch_bytes
                self.scratch_bytes += -(-prod(shape) * dtype.itemsize // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        self.spare = dict[str, int]()  # where outputs lie in the scratch whose address is given as 0
        for name, shape, _, dtype, _ in self.allocations:
            if name in plan.spare and self.offsets:
                self.spare[name] = self.scratch_bytes
                self.scratch_bytes += -(-prod(shape) * dtype.itemsize // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES
        self.graphs_left = MOST_GRAPHS if pays(plan, len(launches)) else 0
        self.made = [name for name, *_ in self.allocations]  # in the order of `outputs`, where it is not None
        if alike is None:
            used = {name: None for launch in launches for name in launch.names}
            self.outputs, self.names = None, [name for name in used if name not in self.offsets]
            return
        self.names = [*inputs, *self.made]
        self.outputs = [
            (inputs.index(alike[a[0]]), torch.empty_like, a[0] in plan.optional or a[0] in self.spare)
            if a[0] in alike
            else (0, _maker(a, device), a[0] in plan.optional or a[0] in self.spare)
            for a in self.allocations
        ]

    def direct(
        self, inputs: Sequence[torch.Tensor], addresses: Sequence[int], whole: bool = True, into: Into | None = None
    ) -> list[Any]:
        """The plan's outputs, of inputs (and where they lie) in the order in which they were bound; unless `whole`, optional
        outputs are None, and spare ones where there is scratch. into: where one of them is to be; another tensor is made where
        it cannot.

        Only of plain bindings. It takes half of the host's time of `Bound.run`.
        """
        assert self.outputs is not None
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.direct(inputs, addresses, whole, into)
        places = [torch._C._cuda_getCurrentRawStream(self.device.index), *addresses]
        outputs: list[Any] = []
        there = None if into is None else self.place_of(*into)
        for like, make, optional in self.outputs:
            if optional and not whole:
                outputs.append(None)
                places.append(0)
                continue
            tensor = into[1] if into is not None and len(outputs) == there else make(inputs[like])
            outputs.append(tensor)
            places.append(tensor.data_ptr())
        self.launch(places)
        return outputs

    def place_of(self, name: str, tensor: torch.Tensor) -> int | None:
        """Which output is of this name, if the tensor can take its place: laid alike along all axes that are longer than 1. It
        may lack a first axis of 1.
        """
        place = self.made.index(name)
        _, shape, strides, dtype, _ = self.allocations[place]
        if len(shape) == tensor.dim() + 1 and shape[0] == 1:
            shape, strides = shape[1:], strides[1:]
        fits = tensor.dtype is dtype and tensor.shape == shape and (tensor.stride() == strides or lies(tensor, strides))
        fits = fits and not tensor.data_ptr() % ALIGNED_BYTES
        return place if fits else None

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        self.launch([stream, *[tensors[name].data_ptr() for name in self.names]])

    def launch(self, places: list[int]) -> None:
        """Everything, given the stream and the addresses of `names`."""
        if not self.offsets:
            self.launch_with(tuple(places))
            return
        keeps = not places[0] and self.scratch_bytes <= KEPT_BYTES  # on the default stream, which is 0
        scratch = (take if keeps else Scratch)(self.scratch_bytes, self.device)
        self.launch_with((*places, scratch.address))
        if keeps:
            _kept[self.device].append(scratch)  # what comes next on the stream may have it

    def launch_with(self, key: tuple[int, ...]) -> None:
        """The same, given also the address of the scratch, if there is any."""
        met = self.known.get(key) or self.fill(key)
        # nobody can capture the default stream, which is 0
        if met.graph is not None and not (key[0] and torch.cuda.is_current_stream_capturing()):
            met.graph.launch()
            return
        for launch, args in met.launches:
            launch(*args)
        met.times += 1
        if met.times >= MEETINGS and self.graphs_left and not torch.cuda.is_current_stream_capturing():
            self.capture(met, key[0])

    def capture(self, met: Met, stream: int) -> None:
        """Give the launches their graph. A driver that makes none leaves them as they are, and says so."""
        try:
            met.graph = LaunchGraph(met.launches, stream, self.device.index)
            self.graphs_left -= 1
        except RuntimeError as problem:
            self.graphs_left = 0
            warnings.warn(
                f"flashtile launches kernels one by one, not as a CUDA graph: {problem}", RuntimeWarning, stacklevel=2
            )

    def fill(self, places: tuple[int, ...]) -> Met:
        """Each kernel's launcher and its arguments, given the stream, the addresses of `names`, and that of the scratch."""
        while len(self.known) >= MOST_ADDRESSES:
            met = self.known.drop_oldest()
            self.graphs_left += met is not None and met.graph is not None
        stream, *addresses = places
        by_name = dict(zip(self.names, addresses, strict=False))
        by_name.update((name, addresses[-1] + offset) for name, offset in self.offsets.items())
        for name, source in self.over.items():
            if source in by_name:
                by_name[name] = by_name[source]
        for name, offset in self.spare.items():
            if not by_name[name]:
                by_name[name] = addresses[-1] + offset
        met = self.known[places] = Met([(x.launch, (*x.grid, stream, *x.arguments(by_name))) for x in self.launches])
        return met


Layout = tuple[tuple[int, ...] | None, torch.dtype]  # strides, None for any, and dtype


class HostReplay:
    """The one host call of a plan, bound to its problem, for tensors of one layout: as `Replay` of launches."""

    allocations: tuple[Any, ...] = ()  # it makes all outputs itself
    outputs: tuple[Any, ...] = ()

    def __init__(
        self,
        step: Callable[[Tensors], None],
        layouts: Mapping[str, Layout],
        function: Callable[..., list[torch.Tensor] | None],
        inputs: Sequence[str],
    ):
        """step: the whole call. layouts: of its outputs. function: what of it is to be done again, of inputs in this order."""
        self.step, self.function, self.inputs = step, function, inputs
        self.made, self.layouts = [*layouts], [*layouts.values()]
        self.fits = False  # whether the function's outputs are known to lie as the plan's

    def direct(
        self, inputs: Sequence[torch.Tensor], addresses: Sequence[int] = (), whole: bool = True, into: Into | None = None
    ) -> list[torch.Tensor]:
        """The plan's outputs, of inputs in the order in which they were bound; never those that a caller has."""
        made = self.function(*inputs)
        if made is None:
            tensors = dict(zip(self.inputs, inputs, strict=True))
            self.step(tensors)
            return [tensors[name] for name in self.made]
        if self.fits:
            return made
        found = [laid(tensor, *layout) for tensor, layout in zip(made, self.layouts, strict=True)]
        self.fits = all(a is b for a, b in zip(found, made, strict=True))
        return found

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.step(tensors)


def laid(tensor: torch.Tensor, strides: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor with these strides, or any, and this dtype, or its own: in its memory, or a copy where that lies otherwise."""
    dtype = tensor.dtype if dtype is None else dtype
    if strides is None:
        return tensor.to(dtype)
    if tensor.dtype is dtype:
        if tensor.stride() == strides:
            return tensor
        if lies(tensor, strides):
            return tensor.data.as_strided_(tensor.shape, strides)  # no view: those forbid what may be done to results
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)


def lies(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether its elements lie as these strides say: of an axis with one place any number may stand there."""
    return all(a == b for a, b, n in zip(tensor.stride(), strides, tensor.shape, strict=True) if n != 1)


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where they lie."""
    return [*map(torch.Tensor.data_ptr, tensors)]


class Scratch:
    """Memory that nobody reads after the launches it was made for."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.memory = torch.empty_strided((size // 4,), (1,), dtype=torch.float32, device=device)
        self.address = self.memory.data_ptr()


class Kept(defaultdict[torch.device, list[Scratch]]):
    """Scratch by device."""

    def info(self) -> CacheInfo:
        kept = [scratch for of_device in self.copy().values() for scratch in of_device]
        return CacheInfo(len(kept), None, sum(scratch.size for scratch in kept))


# Of calls on each device's default stream, which run one after another whatever thread makes them. A call takes one and gives
# it back when all its launches are on the stream, so that there are as many as there were calls under way at one time.
_kept = Kept(list)
listed("scratch", _kept)


def take(size: int, device: torch.device) -> Scratch:
    """One that is kept, or, if none is or it is too small, another in its place."""
    try:
        scratch = _kept[device].pop()  # two threads never have the same
    except IndexError:
        return Scratch(size, device)
    return scratch if scratch.size >= size else Scratch(size, device)


def _maker(allocation: Allocation, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes an output anew at every call; `empty_like`, where it serves, takes half as long."""
    _, shape, strides, dtype, _ = allocation
    return lambda _: torch.empty_strided(shape, strides, dtype=dtype, device=device)


@dataclass
class Met:
    """Launches with all their arguments, how often they were made one by one, and their graph, if that was often."""

    launches: Launches
    times: int = 0
    graph: LaunchGraph | None = None


def pays(plan: Plan, launches: int) -> bool:
    """Whether a graph saves time: the host's always, but the device takes 1.2 us more to begin one than a single kernel (an
    H100), and of long ones 12 us more than two (an H200).
    """
    if not isinstance(plan.problem, AttentionProblem):
        return launches > 1
    return launches > FEW or plan.problem.flops() <= (BRIEF_FLOPS if launches == 1 else LONG_FLOPS)
