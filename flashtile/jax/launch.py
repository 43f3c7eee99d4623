"""Kernel calls of a plan as XLA custom calls: compiled by Triton, launched by jaxlib's own handler.

jaxlib's handler (`jaxlib/gpu/triton_kernels.cc`) takes a compressed message: machine code, grid, and the kernel's parameters in
order. Each array parameter and each descriptor takes the next of the call's buffers, operands first, then results.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import NotSupported
from flashtile.jax.arrays import JAX_DTYPES, Arrays
from flashtile.jax.reorder import machine_code, reordered
from flashtile.memory import remembered
from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer
from flashtile.plan.device import Device
from flashtile.problem.dtype import SIZES_BYTES
from flashtile.triton_glue.compile import compile_call, contiguous, specialise

HANDLER = "triton_kernel_call_ffi"
OLDEST = (0, 11, 1)  # the first jaxlib whose handler makes TMA descriptors
ALIGNMENT_BYTES = 16  # what kernels are specialised on; XLA's buffers are aligned to more


@dataclass(frozen=True)
class Seating:
    """Which buffers stand where in a custom call: names of operands and of results, and results that are operands again."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]  # (operand, result)
    places: tuple[int, ...] | None = None  # the order of the kernel's runtime arguments, where it is not their own


def seat(call: KernelCall, plan: Plan, made: frozenset[str]) -> Seating | str:
    """The seating of a call when the buffers `made` hold something already; a reason where there is none.

    Parameters take operands, then results, in the kernel's order. What a kernel writes is a result; where an input follows it
    among the parameters, or it holds something already, it is an operand first, over which the result lies. Where a kernel
    takes such a buffer twice, its parameters are put into another order: one of the two is the operand, the other the result.
    """
    inputs = {b.name for b in plan.named("input")}
    order = [
        arg.name
        for arg, _ in specialise(call, {b.name: b for b in plan.buffers}).runtime
        if isinstance(arg, (Pointer, Descriptor))
    ]
    first = len(order)
    while first and order[first - 1] not in inputs and order[first - 1] not in order[first:]:
        first -= 1
    while any(name in made and name not in order[:first] for name in order[first:]):
        first += 1
    operands, results = order[:first], order[first:]
    aliases: list[tuple[int, int]] = []
    for index, name in enumerate(operands):
        if name in inputs:
            continue
        if name in operands[:index]:
            return _reseat(call, plan, made)
        if name not in results:
            results.append(name)
        aliases.append((index, results.index(name)))
    return Seating(tuple(operands), tuple(results), tuple(aliases))


def _reseat(call: KernelCall, plan: Plan, made: frozenset[str]) -> Seating | str:
    """The seating with parameters in another order: inputs and what is added to, what is new or met again, numbers."""
    inputs = {b.name for b in plan.named("input")}
    runtime = [arg for arg, _ in specialise(call, {b.name: b for b in plan.buffers}).runtime]
    given = [(i, arg.name) for i, arg in enumerate(runtime) if isinstance(arg, (Pointer, Descriptor))]
    order = [name for _, name in given]
    operands: list[tuple[int, str]] = []
    results: list[tuple[int, str]] = []
    for i, name in given:
        known = [n for _, n in operands]
        if name in inputs or (name not in known and (name in made or order.count(name) > 1)):
            operands.append((i, name))
        elif name in (n for _, n in results):
            return f"{name} is written by a kernel that takes it three times, which jaxlib's launcher has no place for"
        else:
            results.append((i, name))
    numbers = [i for i, arg in enumerate(runtime) if not isinstance(arg, (Pointer, Descriptor))]
    places = (*(i for i, _ in operands), *(i for i, _ in results), *numbers)
    made_here = [name for _, name in results]
    aliases: list[tuple[int, int]] = []
    for index, (_, name) in enumerate(operands):
        if name not in inputs:
            made_here += [name] * (name not in made_here)
            aliases.append((index, made_here.index(name)))
    return Seating(tuple(name for _, name in operands), tuple(made_here), tuple(aliases), places)


def refusals(plan: Plan) -> list[str]:
    """Reasons why jaxlib's launcher cannot run a plan; empty when it can."""
    made: set[str] = set()
    for call in plan.calls:
        if not isinstance(call, KernelCall):
            return ["its plan has a step that PyTorch computes"]
        if 0 in call.grid:
            continue
        found = seat(call, plan, frozenset(made))
        if isinstance(found, str):
            return [found]
        made.update(found.results)
    return []


def require_jaxlib() -> Any:
    """jaxlib's module of the launcher; raises NotSupported where this jaxlib has none that serves."""
    from jaxlib import gpu_triton
    from jaxlib.version import __version__ as installed

    version = tuple(int(n) for n in installed.split(".")[:3] if n.isdigit())
    if version < OLDEST:
        reason = f"jaxlib is {installed}; its launcher makes TMA descriptors from {'.'.join(map(str, OLDEST))} on"
    elif not hasattr(gpu_triton, "create_tma_descriptor_parameter"):
        reason = "jaxlib's CUDA plugin is not installed (jax-cuda13-plugin)"
    else:
        return gpu_triton
    raise NotSupported("launching Triton kernels from JAX", {"jaxlib": [reason]})


def launch(call: KernelCall, plan: Plan, device: Device, arrays: Arrays) -> None:
    """Add the call to the program that is being traced; `arrays` holds every buffer that there is, by name, and is updated."""
    if 0 in call.grid:
        return
    buffers = {b.name: b for b in plan.buffers}
    seating = seat(call, plan, frozenset(arrays))
    assert isinstance(seating, Seating), seating
    fresh = frozenset(n for n in (*seating.operands, *seating.results) if n not in arrays)
    message = _message(call, plan, device, frozenset(n for n in fresh if buffers[n].zeroed), seating.places)
    operands = [arrays[n] if n in arrays else empty(buffers[n]) for n in seating.operands]
    results = [jax.ShapeDtypeStruct(*held(buffers[n])) for n in seating.results]
    invoke = jax.ffi.ffi_call(HANDLER, results, input_output_aliases=dict(seating.aliases))
    arrays.update(zip(seating.results, invoke(*operands, opaque=message), strict=True))


def held(buffer: Buffer) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the array that is a buffer's memory: float64, which JAX only has with jax_enable_x64, in pairs."""
    if buffer.dtype == "fp64":
        return (*buffer.shape, 2), jnp.float32
    return buffer.shape, JAX_DTYPES[buffer.dtype]


def empty(buffer: Buffer) -> Any:
    """Memory of a buffer, holding anything."""
    return jax.lax.empty(*held(buffer))


@remembered(4096, "kernels of JAX programs")
def compiled(call: KernelCall, plan: Plan, device: Device) -> Any:
    """The compiled kernel, remembered for the process (Triton remembers it on disk)."""
    return compile_call(call, plan, device)


def _message(
    call: KernelCall, plan: Plan, device: Device, zeroed: frozenset[str], places: tuple[int, ...] | None = None
) -> bytes:
    """What jaxlib's handler wants to know; buffers in `zeroed` are filled with zeros before the launch. places: see Seating."""
    triton = require_jaxlib()
    buffers = {b.name: b for b in plan.buffers}
    kernel = compiled(call, plan, device)
    meta, cubin = kernel.metadata, kernel.asm["cubin"]
    runtime = specialise(call, buffers).runtime
    said = iter(meta.tensordesc_meta or ())
    descriptions = {i: next(said) for i, (arg, _) in enumerate(runtime) if isinstance(arg, Descriptor)}
    if places is not None:
        cubin = machine_code(kernel, reordered(kernel.asm["ptx"], runtime, places), device, call.contracts)
    if getattr(meta, "profile_scratch_size", 0) or meta.launch_cooperative_grid or meta.launch_pdl:
        raise NotSupported(f"{meta.name} from JAX", {"jaxlib": ["its launcher knows no cooperative or dependent launches"]})
    # jaxlib knows machine code by the text where PTX is meant to be, and copies and hashes that at every launch.
    text = f"// sm_{device.arch} machine code {hashlib.sha256(cubin).hexdigest()}"
    # num_warps counts all warps of a block, those of a warp-specialised kernel's other roles too
    described = [meta.name, meta.num_warps, meta.num_ctas, meta.shared, text, "", device.arch]
    if meta.global_scratch_size:
        described += [meta.global_scratch_size, meta.global_scratch_align]
    parameters: list[Any] = []
    pending = set(zeroed)
    for i in range(len(runtime)) if places is None else places:
        arg, kind = runtime[i]
        if isinstance(arg, Pointer):
            size = _size_bytes(buffers[arg.name]) if arg.name in pending else 0
            pending.discard(arg.name)
            parameters.append(triton.create_array_parameter(size, ALIGNMENT_BYTES))
        elif isinstance(arg, Descriptor):
            parameters += _descriptor(triton, arg, buffers[arg.name], descriptions[i])
        else:
            parameters.append(triton.create_scalar_parameter(arg, kind))
    assert not pending, f"{pending} of {plan.problem.spell()} are zeroed and met as descriptors alone"
    grid = triton.TritonKernelCall(triton.TritonKernel(*described), *call.grid, parameters)
    message = grid.to_proto(meta.name, b"") + _image(meta.name, meta.shared, cubin)
    return zlib.compress(message)


def _descriptor(triton: Any, arg: Descriptor, buffer: Buffer, said: Mapping[str, Any]) -> list[Any]:
    """A descriptor's parameters: the map, which the handler encodes at the launch, then shape and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    assert not any(map(said.get, ("fp4_padded", "is_im2col")))
    strides = contiguous(buffer.shape)
    shape, steps = [buffer.shape[axis] for axis in arg.axes], [strides[axis] for axis in arg.axes]
    described = triton.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[said["elem_type"]], swizzle=said["swizzle"], shape=shape, strides=steps,
        block_shape=said["block_size"], oob_fill=0,
    )  # fmt: skip
    sizes = [triton.create_scalar_parameter(n, "i32") for n in shape]
    return [described, *sizes, *(triton.create_scalar_parameter(n, "i64") for n in steps)]


def _size_bytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * SIZES_BYTES[buffer.dtype]


def _image(name: str, shared_bytes: int, cubin: bytes) -> bytes:
    """Triton's own machine code, to be appended to the message: the same as under PyTorch, whatever assembler XLA has.

    Protocol buffers merge a message field that occurs twice. The fields are TritonAnyKernelCall.kernel_call = 1, its kernel
    = 1, its module_image = 11, and in that cubin = 1, kernel_name = 2, shared_mem_bytes = 3 (jaxlib/gpu/triton.proto).
    """
    image = _field(1, cubin) + _field(2, name.encode()) + _varint(3 << 3) + _varint(shared_bytes)
    return _field(1, _field(1, _field(11, image)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
