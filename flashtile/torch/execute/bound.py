"""Executes plans on PyTorch tensors.

`Bound` is a plan tied to the strides, alignment and device of its inputs. Its first run goes through Triton's JIT; later
runs reuse the compiled kernels and prepared argument lists, so that a call costs microseconds of host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import cache
from inspect import getclosurevars
from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.plan.call import Buffer, Descriptor, HostCall, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import NAMED, Device
from flashtile.problem.dtype import DType
from flashtile.torch.execute.descriptor import DescribedBuffer, addressable, staged_strides
from flashtile.torch.execute.packing import PackedGradient
from flashtile.torch.execute.replay import Allocation, HostReplay, Layout, Replay, laid
from flashtile.triton_glue import language as _triton

DTYPES = {torch.float16: DType.FP16, torch.bfloat16: DType.BF16, torch.float32: DType.FP32, torch.float64: DType.FP64}
DEVICES = frozenset({"cpu", "cuda", "meta"})  # on meta there are shapes alone
TORCH_DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "int8": torch.int8, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# The compiled kernel's own launcher is private to Triton; these releases were run with it. Others take the public path.
DIRECT_LAUNCH = (
    _triton.VERSION is not None
    and _triton.VERSION.split(".")[:2] == ["3", "6"]
    and not _triton.INTERPRETED
    and torch.version.hip is None
)


def check_device(name: str, device: torch.device) -> None:
    """Raise InvalidProblem for a device that nothing here runs on, such as a Mac's mps."""
    if device.type not in DEVICES:
        remedy = "it must be on cpu or cuda (move it: .cpu()), or on meta for shapes alone"
        raise InvalidProblem(f"{name} is on {device}; {remedy}.")


@cache
def device_of(device: torch.device) -> Device:
    """What backends may know of a torch device."""
    check_device("a tensor", device)
    if device.type in ("cpu", "meta"):
        return NAMED["cpu"]
    properties = torch.cuda.get_device_properties(device)
    smem = int(getattr(properties, "shared_memory_per_block_optin", 0))
    if torch.version.hip:
        arch = int("".join(c for c in properties.gcnArchName.split(":")[0].removeprefix("gfx") if c.isdigit()))
        return Device("hip", properties.name, arch, properties.multi_processor_count, smem or 64 * 1024)
    arch = properties.major * 10 + properties.minor
    known = NAMED.get(f"sm{arch}")
    return Device(
        "cuda", properties.name, arch, properties.multi_processor_count, smem or (known.smem_bytes if known else 99 * 1024),
        known.peak_tflops if known else None, known.peak_gbps if known else None,
    )  # fmt: skip


def output_strides(buffer: Buffer, like: torch.Tensor | None, described: bool = False) -> tuple[int, ...]:
    """Dense strides that keep the memory order of `like`, so that (b, h, s, d) callers get (b, h, s, d) back.

    For the bulk copy engine (`described`) the last axis is the densest, whatever it is in `like`.
    """
    order, last = list(range(len(buffer.shape))), len(buffer.shape) - 1
    if like is not None and like.dim() == len(order) and 0 not in like.stride():
        order.sort(key=lambda axis: (described and axis == last, -like.stride(axis), axis))
    strides, step = [0] * len(order), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(buffer.shape[axis], 1)
    return tuple(strides)


class Bound:
    """A plan bound to one layout of inputs. `run` takes input tensors by name and returns outputs by name."""

    def __init__(
        self, plan: Plan, inputs: dict[str, torch.Tensor], device: torch.device, packed: Sequence[PackedGradient] = ()
    ):
        self.plan, self.device, self.packed, self.on_gpu = plan, device, packed, device.type == "cuda"
        self.inputs = list(inputs)
        within = {name: strides for gradient in packed for name, strides in gradient.parts.items()}
        self.strides = {name: tensor.stride() for name, tensor in inputs.items()}
        self.zeroed: list[str] = []  # of the parts of packed gradients
        self.over: list[tuple[str, str]] = []
        self.shared: list[tuple[str, str]] = []
        self.allocations: list[Allocation] = []
        self.alike: dict[str, str] = {}  # of these the outputs that lie as an input does
        self.staged = [
            (name, staged_strides(inputs[name].shape, inputs[name].element_size())) for name in staged_inputs(plan, inputs)
        ]
        self.strides.update(self.staged)
        returned = {name for call in plan.calls if isinstance(call, HostCall) for name in call.outputs}
        for buffer in plan.buffers:
            if buffer.role == "input":
                continue
            if buffer.over is not None:
                self.strides[buffer.name] = self.strides[buffer.over]
                (self.over if buffer.over in inputs else self.shared).append((buffer.name, buffer.over))
                continue
            like = inputs.get(buffer.like) if buffer.like else None
            strides = within.get(buffer.name) or output_strides(buffer, like, buffer.name in plan.described)
            self.strides[buffer.name] = strides
            if buffer.name in within:
                self.zeroed += [buffer.name] * buffer.zeroed
            if buffer.name in returned or buffer.name in within:
                continue
            shape, dtype, zeroed = tuple(buffer.shape), TORCH_DTYPES[buffer.dtype], buffer.zeroed
            lies = like is not None and (like.shape, like.stride(), like.dtype) == (shape, strides, dtype)
            if lies and buffer.role == "output" and not zeroed and buffer.like not in dict(self.staged):
                self.alike[buffer.name] = str(buffer.like)
            self.allocations.append((buffer.name, shape, strides, dtype, zeroed))
        # whether inputs are taken as they are, and all outputs are tensors, or inputs, that nothing but launches writes
        self.plain = not (self.staged or packed or self.shared or any(zeroed for *_, zeroed in self.allocations))
        self.launches = [_launcher(call, plan, self.strides, device) for call in plan.calls]
        self.replay: Replay | HostReplay | None = None  # once every kernel is compiled
        self.ahead = _triton.INTERPRETED or not self.on_gpu  # whether nothing is left to compile ahead
        self.follow: Callable[[Executor], None] | None = None  # what to compile beside these kernels, if they are not on disk

    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, strides in self.staged:
            source = tensors[name]
            copy = torch.empty_strided(source.shape, strides, dtype=source.dtype, device=self.device)
            tensors[name] = copy.copy_(source)
        for gradient in self.packed:
            tensors.update(gradient.allocate(self.device))
        for name in self.zeroed:
            tensors[name].zero_()
        for name, shape, strides, dtype, zeroed in self.replay.allocations if self.replay else self.allocations:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            tensors[name] = tensor.zero_() if zeroed else tensor
        for name, source in self.over:
            tensors[name] = tensors[source]
        if self.on_gpu and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.launch(tensors)
        return self.launch(tensors)

    @property
    def direct(self) -> Replay | None:
        """What launches everything, of inputs and their addresses alone; None before the first run, and where there is more
        to be done.
        """
        replay = self.replay
        return replay if isinstance(replay, Replay) and replay.outputs is not None else None

    def kernel_launches(self) -> list[KernelLaunch]:
        """Those that launch anything."""
        return [launch for launch in self.launches if isinstance(launch, KernelLaunch) and not launch.empty]

    def compile_ahead(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compile a plan's kernels, and their launchers, side by side, before its first launch.

        Not those that need what a host call makes. The last ones first, which are the largest and which all wait for.
        """
        launches = [launch for launch in self.kernel_launches() if tensors.keys() >= set(launch.names)]
        if not launches:  # PyTorch itself computes all of it, or has to begin: there may be no Triton
            return
        with _triton.side_by_side(KIND, 4 if self.follow else 2, self.follow):
            for launch in reversed(launches):
                launch.warm(tensors)

    def launch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.replay:
            self.replay(tensors)
        else:
            if not self.ahead:
                self.ahead = True
                self.compile_ahead(tensors)
            for launch in self.launches:
                launch(tensors)
            # interpreted, only what launches nothing counts as prepared; a plan of nothing (none wants a gradient) never does
            if (
                self.launches
                and not _triton.INTERPRETED
                and all(isinstance(launch, KernelLaunch) and launch.prepared for launch in self.launches)
            ):
                self.replay = Replay(
                    self.plan, self.device, self.kernel_launches(), self.allocations, self.inputs,
                    self.alike if self.plain else None, dict(self.over),
                )  # fmt: skip
            elif len(self.launches) == 1 and isinstance(self.launches[0], HostStep) and self.plain and not self.over:
                self.replay = self.launches[0].replay({name: tensors[name] for name in self.inputs})
        for name, source in self.shared:
            tensors[name] = tensors[source]
        return tensors


KIND = "hip" if torch.version.hip else "cuda"  # of PyTorch's GPUs


def _launcher(call: KernelCall | HostCall, plan: Plan, strides: dict[str, Any], device: torch.device) -> Callable[..., None]:
    if device.type == "meta":
        return ShapeStep(call, plan, strides)
    return HostStep(call, plan, strides, device) if isinstance(call, HostCall) else KernelLaunch(call, plan, strides, device)


def staged_inputs(plan: Plan, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Inputs that a run copies first, because the bulk copy engine cannot address them where they lie."""
    described = {name: inputs[name] for name in sorted(plan.described & inputs.keys())}
    return [n for n, t in described.items() if not addressable(t.shape, t.stride(), t.element_size(), t.data_ptr())]


class ShapeStep:
    """A call on meta: it makes what a host call would, of no numbers."""

    def __init__(self, call: KernelCall | HostCall, plan: Plan, strides: dict[str, Any]):
        outputs = call.outputs if isinstance(call, HostCall) else ()
        made = [b for b in plan.buffers if b.name in outputs and b.over is None]
        self.made = {b.name: (tuple(b.shape), strides[b.name], TORCH_DTYPES[b.dtype]) for b in made}

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, (shape, strides, dtype) in self.made.items():
            if name not in tensors:  # a part of a packed gradient is there
                tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class HostStep:
    """One host call; what it returns in another dtype or memory order than the buffer's is copied into that."""

    def __init__(self, call: HostCall, plan: Plan, strides: dict[str, Any], device: torch.device):
        self.call, self.problem, self.device = call, plan.problem, device
        made = [b for b in plan.buffers if b.name in call.outputs]
        self.layouts: dict[str, Layout] = {
            b.name: (None if b.name in plan.optional else strides[b.name], TORCH_DTYPES[b.dtype]) for b in made
        }
        self.over = {b.name for b in made if b.over is not None}

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        if torch.is_autocast_enabled(self.device.type):  # a plan computes the same under a caller's autocast
            with torch.autocast(self.device.type, enabled=False):
                return self(tensors)
        for name, tensor in self.call.function(self.problem, tensors, self.call.outputs).items():
            if name in self.over:
                tensors[name].copy_(tensor)
                continue
            strides, dtype = self.layouts[name]
            if name in tensors:  # a part of a packed gradient
                tensors[name].copy_(tensor)
                continue
            tensors[name] = laid(tensor, strides, dtype)

    def replay(self, inputs: dict[str, torch.Tensor]) -> HostReplay | None:
        """The call without what need not be asked again, if it has such a form."""
        function = self.call.bind and self.call.bind(self.problem, self.call.outputs, [*inputs.values()])
        return HostReplay(self, self.layouts, function, [*inputs]) if function else None


class KernelLaunch:
    """One kernel call with everything resolved but the addresses."""

    def __init__(self, call: KernelCall, plan: Plan, strides: dict[str, Any], device: torch.device):
        self.call, self.device = call, device
        buffers = {b.name: b for b in plan.buffers}
        self.args = [
            DescribedBuffer(a, buffers[a.name], strides[a.name])
            if isinstance(a, Descriptor)
            else _resolve_strides(a, strides, buffers)
            for a in call.args
        ]
        self.names = list(dict.fromkeys(_names(self.args)))
        self.grid, self.empty = call.grid, 0 in call.grid
        self.compiled: Any = None

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.empty:
            return
        if self.compiled is None:
            self.launch_first(tensors)
            return
        args = self.arguments({name: tensors[name].data_ptr() for name in self.names})
        self.launch(*self.grid, torch._C._cuda_getCurrentRawStream(self.device.index), *args)

    @property
    def prepared(self) -> bool:
        """Whether nothing but addresses is missing."""
        return self.empty or self.compiled is not None

    def arguments(self, addresses: dict[str, int]) -> list[Any]:
        """The compiled kernel's argument list, given the buffers' addresses."""
        args = self.flat.copy()
        for i, template in self.nested:
            args[i] = _fill(template, addresses)
        for i, end, described in self.descriptors:
            args[i:end] = described.encoded(addresses[described.name])
        return args

    def warm(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compile without launching, in a context of `_triton`."""
        if not self.empty and self.compiled is None:
            args = [_fill(a, tensors) for a in self.args]
            self.call.kernel.warmup(*args, grid=self.call.grid, **dict(self.call.constants), **self.options())

    def options(self) -> dict[str, Any]:
        return {} if _triton.INTERPRETED else self.call.options

    def launch_first(self, tensors: dict[str, torch.Tensor]) -> None:
        """Launch through the JIT, which specialises on the values, and keep what it compiled."""
        call = self.call
        args = [_fill(a, tensors) for a in self.args]
        with _triton.compiling(KIND):
            compiled = call.kernel[call.grid](*args, **dict(call.constants), **self.options())
        if DIRECT_LAUNCH and compiled is not None and not (
            compiled.run.global_scratch_size or compiled.run.profile_scratch_size
        ):  # fmt: skip
            self.prepare(compiled)

    def prepare(self, compiled: Any) -> None:
        """The argument list of the compiled kernel's own launcher, whose places of addresses alone change from call to call."""
        run, early = compiled.run, compiled.run.launch_pdl or self.call.early
        flat: list[Any] = [
            compiled.function, run.launch_cooperative_grid, early, None, None, compiled.packed_metadata,
            None, None, None,
        ]  # fmt: skip
        metadata = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self.nested: list[tuple[int, Any]] = []
        self.descriptors: list[tuple[int, int, DescribedBuffer]] = []
        for arg in self.args:
            if isinstance(arg, DescribedBuffer):
                arg.prepare(next(metadata))
                self.descriptors.append((len(flat), len(flat) + 1 + 2 * len(arg.shape), arg))
                flat += [None] * (1 + 2 * len(arg.shape))
                continue
            if any(_names([arg])):
                self.nested.append((len(flat), arg))
            flat.append(arg)
        self.flat = flat + [value for _, value in self.call.constants]
        self.launch = run.launch
        if self.descriptors:  # Triton wraps its launcher to encode descriptors at every call; here they come encoded
            self.launch = getclosurevars(run.launch).nonlocals["launcher"]
        self.compiled = compiled


def _resolve_strides(arg: Any, strides: dict[str, Any], buffers: dict[str, Buffer]) -> Any:
    if isinstance(arg, Strides):
        return arg.of(buffers[arg.name].shape, strides[arg.name])
    if isinstance(arg, tuple):
        return tuple(_resolve_strides(a, strides, buffers) for a in arg)
    return arg


def _names(args: Sequence[Any]) -> Iterator[str]:
    """Names of the buffers whose addresses are among arguments."""
    for arg in args:
        if isinstance(arg, (Pointer, DescribedBuffer)):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from _names(arg)


def _fill(arg: Any, given: Mapping[str, Any]) -> Any:
    """An argument with the given tensors, or addresses, in the place of pointers."""
    if isinstance(arg, DescribedBuffer):
        return arg.first(given[arg.name])
    if isinstance(arg, Pointer):
        return given[arg.name]
    if isinstance(arg, tuple):
        return tuple([_fill(a, given) for a in arg])
    return arg
