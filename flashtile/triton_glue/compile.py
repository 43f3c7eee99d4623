"""Compiles the kernels of a plan for any architecture, without a GPU, and reads what they cost."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from flashtile.plan.call import Buffer, Descriptor, KernelCall, Plan, Pointer, Strides
from flashtile.plan.device import Device
from flashtile.plan.size import Size, divisor
from flashtile.triton_glue.language import compiling, tile_layout

TOOLS = Path(os.path.dirname(triton.__file__)) / "backends" / "nvidia" / "bin"

DIVISIBLE = [["tt.divisibility", 16]]
INTEGERS = {"int8": "i8", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "u1"}  # in Triton's signature language


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. `matrix` counts tensor-core instructions; spills are bytes per thread."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: int
    stack_bytes: int = 0
    log: str = ""


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor in its own order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def compile_call(call: KernelCall, plan: Plan, device: Device) -> Any:
    """The compiled kernel of one call, specialised as a launch on dense, aligned tensors would be."""
    return compile_kernel(call, specialise(call, {b.name: b for b in plan.buffers}), device)


@dataclass(frozen=True)
class Specialisation:
    """What the compiler is told of a call's arguments: types by name, nested as they are, constants by path, and of what may be
    one whether it is a multiple of 16. Of a `Size` it learns what holds for every size. In the order and the form in which a
    launch tells it, so that Triton finds on disk what either of the two has compiled.

    `runtime` lists what a launch passes, in order, with its type: numbers, Pointer and Descriptor.
    """

    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    divisible: dict[tuple[int, ...], Any]
    runtime: tuple[tuple[Any, str], ...]


def specialise(call: KernelCall, buffers: Mapping[str, Buffer]) -> Specialisation:
    """What a launch of the call on dense, aligned tensors would tell."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    divisible: dict[tuple[int, ...], Any] = {}
    runtime: list[tuple[Any, str]] = []

    def describe(arg: Any, path: tuple[int, ...], special: bool = True) -> Any:
        if isinstance(arg, Strides):
            shape = buffers[arg.name].shape
            arg = arg.of(shape, contiguous(shape))
        if isinstance(arg, tuple):
            return tuple(describe(a, (*path, i)) for i, a in enumerate(arg))
        if isinstance(arg, Pointer):
            divisible[path] = DIVISIBLE
            dtype = buffers[arg.name].dtype
            kind = "*" + INTEGERS.get(dtype, dtype)
        elif isinstance(arg, Descriptor):
            kind = descriptor_type(arg, buffers[arg.name].dtype)
        elif isinstance(arg, float):
            kind = "fp32"
        elif isinstance(arg, Size):
            if special:
                divisible[path] = DIVISIBLE if divisor(arg.terms) % 16 == 0 else []
            kind = "i32"
        elif arg is None or (arg == 1 and special):
            constants[path] = arg
            return "constexpr"
        else:
            if special:
                divisible[path] = DIVISIBLE if arg % 16 == 0 else []
            kind = "i32" if -(2**31) <= arg < 2**31 else "i64"
        runtime.append((arg, kind))
        return kind

    names = call.kernel.arg_names
    for i, arg in enumerate(call.args):
        signature[names[i]] = describe(arg, (i,), not call.kernel.params[i].do_not_specialize)
    for name, value in call.constants:
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    return Specialisation(signature, constants, divisible, tuple(runtime))


def source_of(call: KernelCall, special: Specialisation) -> Any:
    """What Triton compiles."""
    return source_class(call.kernel)(
        call.kernel, signature=special.signature, constexprs=special.constants, attrs=special.divisible
    )


def compile_kernel(call: KernelCall, special: Specialisation, device: Device) -> Any:
    """The compiled kernel of a call, as it was specialised."""
    with compiling(device.kind):
        return triton.compile(source_of(call, special), target=gpu_target(device), options=call.options)


def submit_plan(pool: Executor, plan: Plan, device: Device) -> None:
    """Have the threads of `side_by_side` leave a plan's kernels on disk, the last ones first, which are the largest."""
    buffers = {b.name: b for b in plan.buffers}
    for call in reversed(plan.calls):
        if isinstance(call, KernelCall) and 0 not in call.grid:
            pool.submit(_compiles(call, specialise(call, buffers), device))


def _compiles(call: KernelCall, special: Specialisation, device: Device) -> Callable[[], Any]:
    src = source_of(call, special)  # by this name the threads look for it
    return lambda: triton.compile(src, target=gpu_target(device), options=call.options)


def represented(call: KernelCall, plan: Plan, device: Device) -> tuple[Any, Any]:
    """A call's kernel as the compiler first has it, and the context that this lives in."""
    source = source_of(call, specialise(call, {b.name: b for b in plan.buffers}))
    target = gpu_target(device)
    backend: Any = make_backend(target)
    with compiling(device.kind):
        options = backend.parse_options({**source.parse_options(), **call.options})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        made = source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
        return made, context


def intermediate(call: KernelCall, plan: Plan, device: Device) -> str:
    """What a call's kernel says to the compiler: its first representation, functions put where they are called, constants in
    order, without names and places of sources. So it stays what it is where parameters are arranged otherwise.

    It is made in a fraction of a second. What is made of one text differs by the compiler's own whims alone.
    """
    made, context = represented(call, plan, device)
    manager = ir.pass_manager(context)
    (passes.common if source_class(call.kernel) is ASTSource else passes.gluon).add_inliner(manager)
    manager.run(made, "inline")
    text = made.str_nodebug()
    constants = [line for line in text.splitlines() if "arith.constant" in line]
    text = "\n".join([*sorted(constants), *(line for line in text.splitlines() if "arith.constant" not in line)])
    names: dict[str, str] = {}
    return re.sub(r'@(?:"[^"]*"|[\w.$]+)', lambda found: names.setdefault(found.group(0), f"@{len(names)}"), text)


def descriptor_type(descriptor: Descriptor, dtype: str) -> str:
    """A descriptor in Triton's signature language."""
    block = list(descriptor.block)
    return f"tensordesc<{INTEGERS.get(dtype, dtype)}{block},{tile_layout(block, dtype, descriptor.swizzled)!r}>"


def source_class(kernel: Any) -> type[ASTSource]:
    """How Triton reads this kernel's language."""
    if type(kernel).__name__ != "GluonJITFunction":
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def gpu_target(device: Device) -> GPUTarget:
    if device.kind == "hip":
        return GPUTarget("hip", f"gfx{device.arch}", 64)
    return GPUTarget("cuda", device.arch, 32)


def compile_and_read(call: KernelCall, plan: Plan, device: Device) -> tuple[Any, Resources]:
    """`compile_call`, compiled anew also where Triton has the kernel on disk, and what its own assembler said of it."""
    said = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(said):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile_call(call, plan, device)
    return compiled, resources(compiled, device, said.getvalue())


def resources(compiled: Any, device: Device, log: str) -> Resources:
    """Registers, spills, shared memory and matrix instructions of a compiled kernel, of which ptxas said `log`."""
    shared = int(compiled.metadata.shared)
    if device.kind == "hip":
        code = compiled.asm["amdgcn"]

        def count(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", code)
            return int(found.group(1)) if found else 0

        return Resources(count("vgpr_count"), 4 * count("vgpr_spill_count"), shared, len(re.findall(r"v_mfma", code)))
    matrix = len(re.findall(r"\bmma\.sync|wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"]))
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas gave no report for {device.target}:\n{log}")
    stack, stores, loads = (int(n) for n in spills.groups())
    return Resources(int(registers.group(1)), max(stores, loads), shared, matrix, stack, log)


def assemble(ptx: str, device: Device, *options: str) -> tuple[bytes | None, str]:
    """(machine code of a PTX text, ptxas's log), by the assembler that kernels are compiled with; None where it refuses."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = f"sm_{device.arch}" + ("a" if device.arch >= 90 else "")
    with compiling(device.kind):
        tool = get_ptxas(device.arch).path
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [tool, *options, f"--gpu-name={arch}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (target.read_bytes() if done.returncode == 0 else None), done.stdout + done.stderr
