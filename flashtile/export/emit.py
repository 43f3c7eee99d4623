"""Entries with their plans, as a C file and its header."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from flashtile.errors import NotSupported
from flashtile.export import schedule
from flashtile.export.entry import Entry, Laid, Path, Steps
from flashtile.plan.call import Descriptor, KernelCall, Pointer
from flashtile.plan.size import conditions, in_c, terms_of
from flashtile.problem.dtype import SIZES_BYTES
from flashtile.triton_glue.compile import Specialisation

MOST_BUFFERS = 48  # of a plan, as runtime.c has it


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. `tensor_maps`: of each Descriptor argument, in order, what the compiler says of it."""

    index: int
    arch: int
    name: str
    image: bytes
    threads: int
    shared_bytes: int
    tensor_maps: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Planned:
    """A path of an entry on an architecture, with the binary and specialisation of each of its calls."""

    entry: Entry
    arch: int
    path: Path
    kernels: tuple[Binary, ...]
    specials: tuple[Specialisation, ...]


def tensors_of(steps: Steps) -> tuple[Laid, ...]:
    """What the caller gives, in the order of the C structure: what is written over another tensor is that tensor."""
    return tuple(one for one in steps.laid if one.buffer.role != "scratch" and one.buffer.over is None)


def scratch_of(steps: Steps) -> tuple[Laid, ...]:
    return tuple(one for one in steps.laid if one.buffer.role == "scratch")


def identifier(name: str) -> str:
    """A buffer's name in C."""
    return name.replace(".", "_")


# -- the C file -----------------------------------------------------------------------------------------------------------


def source(planned: Sequence[Planned], binaries: Sequence[Binary], functions: str) -> str:
    """The C file. `functions`: what stands at its end, the public functions beside the entries' own."""
    architectures = sorted({p.arch for p in planned})
    body = "\n".join([*map(_binary, binaries), _prepare(binaries), _plans(planned), _entries(planned), functions])
    names = ", ".join(f"sm_{arch}" for arch in architectures)
    head = [
        '#include "flashtile_attention.h"',
        f"\nenum {{ KERNELS = {len(binaries)} }};",
        f"static const int architectures[] = {{{', '.join(map(str, architectures))}}};",
        f'static const char architecture_names[] = "{names}";\n',
    ]
    chooses = [schedule.code()] if any(p.entry.schedule for p in planned) else []
    runtime = _resource("runtime.c").replace("@MOST_BUFFERS@", str(MOST_BUFFERS))
    return "\n".join([*head, runtime, *chooses, _helpers(body), body])


def _resource(name: str) -> str:
    return (files("flashtile.export") / name).read_text()


def _helpers(body: str) -> str:
    parts = re.split(r"/\* @(\w+) \*/\n", _resource("helpers.c"))[1:]
    return "\n".join(text for name, text in zip(parts[::2], parts[1::2], strict=True) if re.search(rf"\b{name}\(", body))


def _binary(binary: Binary) -> str:
    index, image = binary.index, binary.image + bytes(-len(binary.image) % 8)
    words = [f"0x{word:x}u" if word > 9 else str(word) for (word,) in struct.iter_unpack("<Q", image)]
    words = [f"UINT64_C({word[:-1]})" if len(word) > 11 else word for word in words]
    lines = [",".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    text = ",\n".join(lines)
    kernel = f'{{{index}, {binary.arch}, "{binary.name}", image_{index}, {binary.threads}, {binary.shared_bytes}}}'
    return f"static const uint64_t image_{index}[] = {{\n{text}}};\nstatic const struct kernel kernel_{index} = {kernel};\n"


def _prepare(binaries: Sequence[Binary]) -> str:
    names = ", ".join(f"&kernel_{b.index}" for b in binaries)
    return f"static const struct kernel *const kernels[] = {{{names}}};\n\n{_resource('prepare.c')}"


def _sizes(entry: Entry) -> str:
    """Declarations of the sizes that stand in the array `sizes`."""
    names = (*entry.sizes, *entry.derived)
    return "".join(f"    const int64_t {name} = sizes[{i}]; (void){name};\n" for i, name in enumerate(names))


def _plans(planned: Sequence[Planned]) -> str:
    text: list[str] = []
    known: dict[str, str] = {}  # a function by its body: paths share much

    def function(head: str, body: str) -> str:
        key = head + body
        if key not in known:
            known[key] = f"function_{len(known)}"
            text.append(head.replace("NAME", known[key]) + " {\n" + body + "}\n")
        return known[key]

    for i, p in enumerate(planned):
        sizes = _sizes(p.entry)
        test = "static int NAME(const int64_t *sizes)"
        fits = function(test, f"{sizes}    return {conditions(p.path.guards)};\n")
        limits = function(test, f"{sizes}    return {conditions(p.path.limits)};\n")
        parts = scratch_of(p.path.steps)
        lines = [f"    bytes[{j}] = {_bytes(one)};\n" for j, one in enumerate(parts)]
        scratch = function(
            "static void NAME(const int64_t *sizes, int64_t *bytes)", sizes + "    (void)bytes;\n" + "".join(lines)
        )
        head = "static flashtile_status NAME(struct gpu *gpu, const int64_t *sizes, const uint64_t *at, void *stream)"
        run = function(head, sizes + _run(p))
        text.append(f"static const struct plan plan_{i} = {{{p.arch}, {fits}, {limits}, {scratch}, {len(parts)}, {run}}};\n")
    return "\n".join(text)


def _bytes(one: Laid) -> str:
    return in_c(one.elements * SIZES_BYTES[one.buffer.dtype])


def _run(p: Planned) -> str:
    steps = p.path.steps
    places = {one.name: i for i, one in enumerate((*tensors_of(steps), *scratch_of(steps)))}
    for one in steps.laid:
        if one.buffer.over is not None:
            places[one.name] = places[one.buffer.over]
    text = "    flashtile_status status = FLASHTILE_OK;\n"
    for one in steps.laid:
        if one.buffer.zeroed:
            text += f"    status = zero(at[{places[one.name]}], {_rows(one)}, stream);\n" + _RETURN
    for binary, special, call in zip(p.kernels, p.specials, steps.calls, strict=True):
        text += _launch(binary, special, call, {one.name: one for one in steps.laid}, places)
    return text + "    return status;\n"


_RETURN = "    if (status != FLASHTILE_OK) return status;\n"


def _rows(one: Laid) -> str:
    """Rows, words in a row and the words between rows' beginnings, of a buffer whose last axes lie together."""
    per_element = SIZES_BYTES[one.buffer.dtype] // 4
    assert per_element, f"{one.name} is {one.buffer.dtype}; what starts at zero consists of 32-bit words"
    shape, strides = one.buffer.shape, one.strides
    words = 1
    axis = len(shape)
    while axis and terms_of(strides[axis - 1]) == terms_of(words):
        axis -= 1
        words = words * shape[axis]
    rows = 1
    for n in shape[:axis]:
        rows = rows * n
    pitch = strides[axis - 1] if axis else words
    for i in range(axis - 1):
        assert terms_of(strides[i]) == terms_of(strides[i + 1] * shape[i + 1]), f"{one.name} lies in more than rows"
    return ", ".join(map(in_c, (rows, words * per_element, pitch * per_element)))


def _launch(
    binary: Binary, special: Specialisation, call: KernelCall, laid: Mapping[str, Laid], places: Mapping[str, int]
) -> str:
    maps = iter(binary.tensor_maps)
    declared: list[str] = []
    parameters: list[str] = []
    checks: list[str] = []

    def declare(kind: str, value: str) -> None:
        parameters.append(f"&a{len(parameters)}")
        declared.append(f"{kind} a{len(parameters) - 1} = {value};")

    def describe(arg: Descriptor) -> None:
        one, number, told = laid[arg.name], len(checks), next(maps)
        shape = [one.buffer.shape[axis] for axis in arg.axes]
        strides = [one.strides[axis] for axis in arg.axes[:-1]]
        declared.append(f"struct tensor_map map{number};")
        declared.append(f"const int64_t shape{number}[] = {{{', '.join(map(in_c, shape))}}};")
        declared.append(f"int64_t strides{number}[] = {{{', '.join([*map(in_c, strides), '1'])}}};")
        declared.append(f"const uint32_t block{number}[] = {{{', '.join(map(str, told['block_size']))}}};")
        declared.append("int32_t " + ", ".join(f"extent{number}_{i} = (int32_t)shape{number}[{i}]" for i in range(4)) + ";")
        checks.append(
            f"status = describe(&map{number}, at[{places[arg.name]}], {told['type']}, {told['elem_size']}, "
            f"{told['swizzle']}, shape{number}, strides{number}, block{number});"
        )
        parameters.append(f"&map{number}")
        parameters.extend(f"&extent{number}_{i}" for i in range(4))
        parameters.extend(f"&strides{number}[{i}]" for i in range(4))

    def walk(arg: Any, kind: Any) -> None:
        if isinstance(kind, tuple):
            for one, its_kind in zip(arg, kind, strict=True):
                walk(one, its_kind)
        elif isinstance(arg, Descriptor):
            describe(arg)
        elif isinstance(arg, Pointer):
            declare("uint64_t", f"at[{places[arg.name]}]")
        elif kind == "fp32":
            declare("float", _float_in_c(arg))
        elif kind != "constexpr":
            declare(f"int{kind[1:]}_t", f"(int{kind[1:]}_t)({in_c(arg)})")

    for arg, kind in zip(call.args, special.signature.values(), strict=False):
        walk(arg, kind)
    lines = [
        "    {",
        f"        /* {call.kernel.fn.__name__} */",
        *(f"        {d}" for d in declared),
        "        uint64_t none = 0;",
    ]
    lines.append(f"        void *parameters[] = {{{', '.join([*parameters, '&none', '&none'])}}};")
    for check in checks:
        lines += [f"        {check}", "    " + _RETURN.rstrip()]
    grid = ", ".join(map(in_c, call.grid))
    lines += [
        f"        status = launch(gpu, &kernel_{binary.index}, {grid}, {int(call.early)}, parameters, stream);",
        "    " + _RETURN.rstrip(),
        "    }",
    ]
    return "\n".join(lines) + "\n"


def _float_in_c(value: float) -> str:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    text = f"{rounded:.9g}"
    return text + ("f" if re.search(r"[.e]", text) else ".0f")


def _entries(planned: Sequence[Planned]) -> str:
    """The table entry and the two functions of each entry."""
    text: list[str] = []
    for entry in dict.fromkeys(p.entry for p in planned):
        plans = [i for i, p in enumerate(planned) if p.entry is entry]
        tensors = tensors_of(planned[plans[0]].path.steps)
        most = max(len(planned[i].path.steps.laid) for i in plans)
        if most > MOST_BUFFERS:
            raise NotSupported(entry.spelling, {"export": [f"a plan has {most} buffers; at most {MOST_BUFFERS} are supported"]})
        given = [(one.name, one.buffer.dtype, one.buffer.role) for one in tensors]
        for i in plans:
            found = [(one.name, one.buffer.dtype, one.buffer.role) for one in tensors_of(planned[i].path.steps)]
            assert found == given, f"{entry.name}: plans take other tensors: {found}, {given}"
        names = [identifier(one.name) for one in tensors]
        fill = "".join(f"    tensors[{i}] = (uint64_t)(uintptr_t)given->{name};\n" for i, name in enumerate(names))
        sizes = ", ".join(f"int64_t {name}" for name in entry.sizes)
        text.append(f"""\
static const char *const {entry.name}_sizes[] = {{{", ".join(f'"{n}"' for n in entry.sizes)}}};
static const char *const {entry.name}_names[] = {{{", ".join(f'"{n}"' for n in names)}}};
static const struct plan *const {entry.name}_plans[] = {{{", ".join(f"&plan_{i}" for i in plans)}}};
{schedule.table(entry.schedule, entry.name) if entry.schedule else ""}\
static flashtile_status {entry.name}_derive(const struct gpu *gpu, int64_t *sizes) {{
{entry.derive}}}
static const struct entry {entry.name}_entry = {{
    "flashtile_{entry.name}", {len(entry.sizes)}, {entry.name}_sizes, {len(names)}, {entry.name}_names, {entry.name}_derive,
    {len(plans)}, {entry.name}_plans}};

flashtile_status flashtile_{entry.name}(const flashtile_{entry.name}_tensors *given, {sizes},
                       void *scratch, size_t scratch_bytes, void *stream) {{
    const int64_t sizes[] = {{{", ".join(entry.sizes)}}};
    uint64_t tensors[{len(names)}];
    if (!given) return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_{entry.name}: tensors is NULL");
{fill}    return execute(&{entry.name}_entry, sizes, tensors, scratch, scratch_bytes, stream, NULL);
}}

flashtile_status flashtile_{entry.name}_scratch({sizes}, size_t *bytes) {{
    const int64_t sizes[] = {{{", ".join(entry.sizes)}}};
    if (!bytes) return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_{entry.name}_scratch: bytes is NULL");
    return execute(&{entry.name}_entry, sizes, NULL, NULL, 0, NULL, bytes);
}}
""")
    return "\n".join(text)


# -- the header -----------------------------------------------------------------------------------------------------------


def header(planned: Sequence[Planned], declarations: str) -> str:
    """The header: every entry's tensors, with their shapes, and its two functions; then `declarations`."""
    text = [_resource("runtime.h")]
    for entry in dict.fromkeys(p.entry for p in planned):
        path = next(p.path for p in planned if p.entry is entry)
        sizes = ", ".join(f"int64_t {name}" for name in entry.sizes)
        written = {one.buffer.over for one in path.steps.laid}
        members = "".join(_member(one, one.name in written, entry.shown) for one in tensors_of(path.steps))
        text.append(f"""\
/* {entry.direction} of {entry.spelling},
   whose sizes come at run time: {", ".join(entry.sizes)}.{_noted(entry)} */
typedef struct flashtile_{entry.name}_tensors {{
{members}}} flashtile_{entry.name}_tensors;
flashtile_status flashtile_{entry.name}(const flashtile_{entry.name}_tensors *tensors, {sizes},
                       void *scratch, size_t scratch_bytes, void *stream);
flashtile_status flashtile_{entry.name}_scratch({sizes}, size_t *bytes);
""")
    text.append(declarations)
    text.append("#ifdef __cplusplus\n}\n#endif\n\n#endif\n")
    return "\n".join(text)


def _noted(entry: Entry) -> str:
    return "\n" + entry.note.rstrip() if entry.note else ""


def _member(one: Laid, written: bool, shown: Sequence[tuple[str, str]]) -> str:
    shape, strides = ", ".join(map(in_c, one.buffer.shape)), ", ".join(map(in_c, one.strides))
    for expression, instead in shown:
        strides = strides.replace(expression, instead)
    kind = "const void" if one.buffer.role == "input" and not written else "void"
    use = ("written over" if written else "read") if one.buffer.role == "input" else "written"
    return f"    {kind} *{identifier(one.name)}; /* {one.buffer.dtype} ({shape}), strides ({strides}); {use} */\n"
