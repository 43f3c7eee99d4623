"""explain: how a problem runs on a device, why not otherwise, and what it costs at least."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashtile import dispatch
from flashtile.errors import InvalidProblem, NotSupported, check_names
from flashtile.kernels.device.available import NO_TRITON
from flashtile.plan.backend import Backend, Direction, Gradients
from flashtile.plan.call import HostCall, KernelCall, Plan
from flashtile.plan.device import CARDS, NAMED, Device
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.cache import CachedProblem, why_split
from flashtile.problem.dtype import DType
from flashtile.problem.options import DEFAULT, Options
from flashtile.problem.statistics import Wish, wish_of
from flashtile.triton_glue import language as _triton

AXES = ("batch", "row", "head")  # of q, k and v; the last axis is head_dim

ARGUMENTS = (
    "problem", "k", "v", "device", "causal", "window", "mask", "score", "scale", "sink", "dropout", "return_lse", "returns",
    "options",
)  # fmt: skip
SCALES = {"q_scale", "k_scale", "v_scale"}
STATISTICS = {"max_logit": "peak", "entropy": "entropy"}  # of rows, by the names of buffers
LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"}

# Rate of fp32 products against the 16-bit peak: TF32 runs at half of it on every device in NAMED, and "tf32x3" takes
# three products for one; so does q k^T under "tf32", whose other products are three of bf16 on sm90, as is q k^T backward
# there. "ieee" does not use the matrix units, whose peak is the only one known here.
FP32_RATE = {"tf32": 1 / 2, "tf32x3": 1 / 6}
TWO_PARTS_RATE = 1 / 3


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """What `explain` found. Its `str` and `repr` are the text, so that it shows itself at a prompt or in a notebook."""

    problem: AttentionProblem
    device: Device
    forward: Plan
    backward: Plan
    refusals: dict[str, tuple[str, ...]]  # other backend -> why it does not run this
    layout: tuple[str, ...] = ()
    statistics: tuple[tuple[str, Plan], ...] = ()  # which, and the plan that makes them, beside out or behind it

    def __str__(self) -> str:
        lines = [self.problem.spell(), f"on {_name(self.device)}"]
        lines += ["", f"forward: {self.forward.backend}", *_pass_lines(self.forward, self.problem, self.device, "forward")]
        ways = (self.backward.backend, self.backward.variant)
        lines += [
            "",
            f"backward: {', '.join(w for w in ways if w)}",
            *_pass_lines(self.backward, self.problem, self.device, "backward"),
        ]
        for what, plan in self.statistics:
            lines += ["", f"{what}: {plan.backend}", *(f"  {line}" for line in (*map(_call_line, plan.calls), *plan.notes))]
        if self.refusals:
            lines += ["", "other backends", *(f"  {name}: {line}" for name, why in self.refusals.items() for line in why)]
        if self.layout:
            lines += ["", "layout", *(f"  {line}" for line in self.layout)]
        return "\n".join(lines)

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.text import Text

        text = Text(str(self))
        text.highlight_regex(r"(?m)^\S.*$", "bold")
        return text


@dataclass(frozen=True, repr=False, eq=False)
class CachedExplanation:
    """What `explain` found of attention over a key/value cache, which has no backward of its own; shown as `Explanation` is."""

    problem: CachedProblem
    device: Device
    forward: Plan
    refusals: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.problem.spell(), f"on {_name(self.device)}", "", f"forward: {self.forward.backend}"]
        costs = self.problem.attention.flops("forward"), self.problem.bytes
        arithmetic = _arithmetic_ms(self.problem.attention, self.device, "forward")
        made = [_call_line(call) for call in self.forward.calls] + list(self.forward.notes)
        made += [why_split(self.problem), f"of items of all rows: {_bound_line(*costs, arithmetic, self.device)}"]
        if self.forward.scratch_bytes:
            made.append(f"scratch {_scaled(self.forward.scratch_bytes, 'B')}")
        lines += [f"  {line}" for line in made]
        if self.refusals:
            lines += ["", "other backends", *(f"  {name}: {line}" for name, why in self.refusals.items() for line in why)]
        return "\n".join(lines)

    __repr__ = __str__
    __rich__ = Explanation.__rich__


def explain_cached(problem: CachedProblem, place: Device, backend: str | None) -> CachedExplanation:
    """How a problem over a cache runs there."""
    chosen = dispatch.plan_cached(problem, place, backend)
    others: dict[str, tuple[str, ...]] = {}
    for one in dispatch.BACKENDS:
        if one.name != chosen.backend:
            able = f"options.backend asks for {chosen.backend}" if backend else f"{chosen.backend} comes first"
            others[one.name] = tuple(one.unsupported_cached(problem, place)) or (f"could run it, but {able}",)
    return CachedExplanation(problem, place, chosen, others)


def explain(
    problem: Any,
    k: Any = None,
    v: Any = None,
    *,
    device: Device | str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    score: Any = (),
    scale: float | None = None,
    sink: Any = None,
    dropout: Any = None,
    return_lse: bool = False,
    returns: Any = None,
    options: Options | None = None,
    **lengths: Any,
) -> Explanation | CachedExplanation:
    """An Explanation: backends, kernels, tiles, FLOPs, bytes and roofline time of a problem; nothing is launched.

    problem: an AttentionProblem or a CachedProblem, its spelling, or the tensor q, followed by k, v and the arguments of
        `attention`, or by a `PagedCache` and those of its `attention`.
    lengths: seqused_q and seqused_k as `attention` takes them, or with cu_seqlens_q the lengths of `attention_varlen`; and
        q_scale, k_scale, v_scale.
    returns: statistics, as `attention` takes them, which a problem's spelling does not say.
    device: a `Device`, an architecture ("sm90") or a name ("H100"); the tensors' own, or this machine's, by default.

    Raises InvalidProblem and NotSupported as `attention` would. Needs PyTorch for tensors only. Without Triton (macOS,
    Windows) it says which backend of a GPU would run, and what the problem costs, but not its kernels and tiles.
    """
    asked = dict(causal=causal, window=window, mask=mask, score=score, scale=scale, sink=sink, return_lse=return_lse)
    wish = None if returns is None else wish_of(returns)
    cached = _over_a_cache((problem, k, v), dropout, {**asked, **lengths, **({} if wish is None else {"returns": returns})},
                           options, device)  # fmt: skip
    if cached is not None:
        return cached
    check_names("explain", lengths, LENGTHS | SCALES, ARGUMENTS)
    scales = {name: lengths.pop(name) for name in SCALES if name in lengths}
    options = DEFAULT if options is None else options
    wanted, layout, gathered = frozenset("qkv"), None, tuple[str, ...]()
    if isinstance(problem, (str, AttentionProblem)):
        given = {"k": k, "v": v, "causal": causal, "window": window, "mask": mask, "score": score, "scale": scale}
        _check_alone({**given, "sink": sink, "dropout": dropout, "return_lse": return_lse, **lengths, **scales})
        described = AttentionProblem.parse(problem) if isinstance(problem, str) else problem
        place = device_named(device) or this_machine()
    else:
        if not isinstance(problem, getattr(sys.modules.get("torch"), "Tensor", ())):
            spelled = "attention(q=1x4096x16x128,kv=4096x16x128,bf16,band=:0)"
            raise InvalidProblem(
                f"q is a {type(problem).__name__}; it must be a torch.Tensor, or the problem's spelling, such as {spelled!r}."
            )
        from flashtile.torch.api.stored import describe_stored, is_stored
        from flashtile.torch.call.arguments import Arguments
        from flashtile.torch.call.describe import make_problem
        from flashtile.torch.call.holes import counts, holes
        from flashtile.torch.call.lengths import given_lengths
        from flashtile.torch.execute.bound import device_of

        moved = holes((problem, k, v), lengths.get("seqused_q"), lengths.get("seqused_k"), mask, score)
        named = given_lengths(**{name: counts(value) for name, value in lengths.items()})
        if named is not None and named.varlen:
            problem, k, v = (t.unsqueeze(0) for t in (problem, k, v))
        arguments = Arguments(causal, window, mask, score, scale, sink, dropout, return_lse, options)
        if is_stored(k, options, scales):
            packs = (problem, k, v) if named is None or not named.varlen else (problem[0], k[0], v[0])
            described, options = describe_stored(packs, named, arguments, scales)
        else:
            described, options = make_problem(problem, k, v, arguments, named)
        place = device_named(device) or device_of(problem.device)
        layout = {"q": problem, "k": k, "v": v}
        wanted = frozenset(name for name, tensor in layout.items() if tensor.requires_grad) or wanted
        gathered = () if moved is None else moved.notes()
    if options.deterministic and not described.deterministic:
        described = replace(described, deterministic=True)
    without = _without_triton(described, place, options)
    if without is None:
        asked = options.backward if described.stored is None else None
        chosen = dispatch.select(described, place, options.backend, asked)
        forward = dispatch.plan_forward(described, place, options.backend)
        through = described.dequantised  # what computes gradients where q, k or v are stored
        backward = dispatch.plan_backward(through, place, Gradients(wanted), options.backend, options.backward)
    else:
        chosen, forward, backward = without
    return Explanation(
        described,
        place,
        forward,
        backward,
        {b.name: _refusal(b, described, place, options, chosen) for b in dispatch.BACKENDS if b is not chosen},
        (*gathered, *_copies(forward, layout), *_layout_notes(layout, forward.backend)) if layout else (),
        () if wish is None or without is not None else _statistics(wish, described, place, options.backend),
    )


def _statistics(wish: Wish, problem: AttentionProblem, place: Device, backend: str | None) -> tuple[tuple[str, Plan], ...]:
    """What makes the statistics that are wished for. Raises NotSupported."""
    asked, found = {"max_logit": wish.max_logit, "entropy": wish.entropy}, list[tuple[str, Plan]]()
    rows = frozenset(STATISTICS[name] for name, there in asked.items() if there)
    named = ", ".join(name for name, there in asked.items() if there)
    without = replace(problem, dropout=None)
    if rows:
        plan = dispatch.plan_watched(problem, place, rows, backend)
        if plan is not None:
            found.append((f"{named}, beside out", plan))
        else:
            plan = dispatch.plan_pass("statistics", without, place, Direction(wanted=rows), backend)
            found.append((f"{named}, behind the forward", plan))
    if wish.mass:
        direction = Direction(wanted=frozenset({"mass"}), last=wish.last)
        found.append(("mass, behind the forward", dispatch.plan_pass("statistics", without, place, direction, backend)))
    if wish.entropy:
        try:
            plan = dispatch.plan_pass("entropy", without, place, Direction(wanted=frozenset("qk")), backend)
            found.append(("the entropy's gradient", plan))
        except NotSupported as refusal:  # which is raised where it is wanted
            reasons = tuple(line for lines in refusal.reasons.values() for line in lines)
            found.append(("the entropy's gradient", Plan(without, "none", "", (), (), reasons)))
    return tuple(found)


def _over_a_cache(
    three: tuple[Any, Any, Any], dropout: Any, asked: dict[str, Any], options: Options | None, device: Device | str | None
) -> CachedExplanation | None:
    """The explanation of a problem over a cache, its spelling, or a call; None of anything else. three: `explain`'s first."""
    problem, k, v = three
    backend = None if options is None else options.backend
    if isinstance(problem, CachedProblem) or (isinstance(problem, str) and problem.strip().startswith("cached(")):
        _check_alone({"k": k, "v": v, "dropout": dropout, **asked})
        cached = CachedProblem.parse(problem) if isinstance(problem, str) else problem
        return explain_cached(cached, device_named(device) or this_machine(), backend)
    if k is None or not hasattr(k, "page_table"):
        return None
    if v is not None or dropout is not None:
        raise InvalidProblem(f"{'dropout' if v is None else 'v'} is given beside a PagedCache, which has none.")
    from flashtile.torch.execute.bound import device_of

    cached = k.problem(problem, **asked, options=options)
    return explain_cached(cached, device_named(device) or device_of(k.k.device), backend)


def _check_alone(given: dict[str, Any]) -> None:
    """Raise InvalidProblem for what is given besides a problem."""
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise InvalidProblem(f"{name} is given besides a problem; the problem itself must say it.")


def _without_triton(problem: AttentionProblem, place: Device, options: Options) -> tuple[Backend, Plan, Plan] | None:
    """Where Triton is missing: a GPU's backend and plans without calls. None where plans can be made."""
    if _triton.VERSION is not None or place.kind == "cpu":
        return None
    asked = dispatch.BACKENDS if options.backend is None else (dispatch.backend_named(options.backend),)
    found: list[Backend] = []
    for variant in (None, options.backward):
        reasons = {b.name: b.unsupported(problem, place, variant) for b in asked}
        able = next((b for b in asked if reasons[b.name] in ([], [NO_TRITON])), None)
        if able is None:
            raise NotSupported(f"{problem.spell()} on {place.target}", reasons)
        found.append(able)
    note = f"{NO_TRITON}: its kernels and tiles are not known here"
    forward, backward = (Plan(problem, b.name, "", (), (), (note,)) for b in found)
    return found[1], forward, backward


def device_named(device: Device | str | None) -> Device | None:
    if device is None or isinstance(device, Device):
        return device
    plain = _plain(str(device))
    for known in (*NAMED.values(), *CARDS):
        if plain in (_plain(known.target), _plain(known.name)):
            return known
    names = ", ".join(f"{d.target} ({d.name})" if d.kind != "cpu" else d.target for d in NAMED.values())
    cards = ", ".join(f"{card.name} ({card.target})" for card in CARDS)
    raise InvalidProblem(f"device is {device!r}; it must be one of {names}, or {cards}.")


def _name(device: Device) -> str:
    return "the CPU" if device.kind == "cpu" else f"{device.name} ({device.target})"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def this_machine() -> Device:
    """The GPU that PyTorch would use, else the CPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return NAMED["cpu"]
    from flashtile.torch.execute.bound import device_of

    return device_of(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"))


def _refusal(backend: Any, problem: AttentionProblem, place: Device, options: Options, chosen: Any) -> tuple[str, ...]:
    reasons = backend.unsupported(problem, place, options.backward if problem.stored is None else None)
    if reasons:
        return tuple(reasons)
    if options.backend is not None:
        return (f"could run it, but options.backend asks for {chosen.name}",)
    return (f"could run it, but {chosen.name} comes first",)


def _pass_lines(plan: Plan, problem: AttentionProblem, device: Device, direction: Literal["forward", "backward"]) -> list[str]:
    lines = [_call_line(call) for call in plan.calls] + list(plan.notes)
    lines.append(_cost_line(problem, device, direction))
    if any(isinstance(call, KernelCall) for call in plan.calls):
        lines.append(f"scratch {_scaled(plan.scratch_bytes, 'B')}")
    return [f"  {line}" for line in lines]


def _call_line(call: KernelCall | HostCall) -> str:
    if isinstance(call, HostCall):
        function: Any = getattr(call.function, "func", call.function)  # of a partial
        return f"PyTorch: {function.__module__.rpartition('.')[2]}.{function.__name__}"
    name = getattr(call.kernel, "fn", call.kernel).__name__
    return f"{name}: grid {'x'.join(map(str, call.grid))}, warps {call.num_warps}, stages {call.num_stages}"


def _cost_line(problem: AttentionProblem, device: Device, direction: Literal["forward", "backward"]) -> str:
    return _bound_line(problem.flops(direction), problem.bytes(direction), _arithmetic_ms(problem, device, direction), device)


def _bound_line(flops: int, size: int, arithmetic: float | None, device: Device) -> str:
    line = f"{_scaled(flops, 'FLOP')}, {_scaled(size, 'B')}"
    if size:
        line += f", {flops / size:.1f} FLOP/B"
    bounds = {
        "arithmetic": arithmetic,
        "memory": None if device.peak_gbps is None else size / (device.peak_gbps * 1e6),
    }
    known = {name: ms for name, ms in bounds.items() if ms is not None}
    if not known:
        return f"{line}; the peaks of {_name(device)} are not known"
    name = max(known, key=lambda n: known[n])
    return f"{line}; roofline {_duration(known[name])}, bound by {name}"


def _arithmetic_ms(problem: AttentionProblem, device: Device, direction: Literal["forward", "backward"]) -> float | None:
    flops: float = problem.flops(direction)
    if problem.dtype is DType.FP32:
        in_two = problem.precision == "tf32" and device.target == "sm90"
        rate = TWO_PARTS_RATE if in_two else FP32_RATE.get(problem.precision)
        if rate is None:
            return None
        scores = 0 if in_two and direction == "backward" else 2 * problem.visible_pairs * problem.head_dim
        flops = (flops - scores) / rate + scores / FP32_RATE["tf32x3"]
    return None if device.peak_tflops is None else flops / (device.peak_tflops * 1e9)


def _copies(plan: Plan, tensors: dict[str, Any]) -> tuple[str, ...]:
    """Inputs that each call copies first."""
    from flashtile.torch.execute.bound import staged_inputs

    return tuple(
        f"{name} is copied first: the bulk copy engine wants a dense last axis, other strides and the address multiples "
        "of 16 bytes"
        for name in staged_inputs(plan, tensors)
    )


def _layout_notes(tensors: dict[str, Any], backend: str) -> tuple[str, ...]:
    """What the tensors' strides and addresses cost."""
    notes: list[str] = []
    for name, tensor in tensors.items():
        strides, shape = tensor.stride(), tensor.shape
        if strides[3] != 1 and shape[3] > 1:
            cost = "loads are not vectorised, no copy is made" if backend == "triton" else "it is read through a dense copy"
            notes.append(f"{name}'s last stride is {strides[3]}: {cost}")
        still = [axis for axis, stride, size in zip(AXES, strides, shape, strict=False) if stride == 0 and size > 1]
        if still and backend != "hopper":
            notes.append(f"{name}'s {' and '.join(still)} stride is 0: the expanded tensor is read as it is")
        if backend != "triton":  # on the CPU, or whatever is not as hopper needs it is copied
            continue
        odd = [axis for axis, stride, size in zip(AXES, strides, shape, strict=False) if stride % 16 and size > 1]
        if odd:
            notes.append(f"{name}'s {' and '.join(odd)} stride is not a multiple of 16 elements: loads are narrower")
        if tensor.data_ptr() % 16:
            notes.append(f"{name} starts {tensor.data_ptr() % 16} bytes past a multiple of 16: loads are narrower")
    return tuple(notes)


def _duration(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{1000 * ms:.3g} us"


def _scaled(number: float, unit: str) -> str:
    power = 0
    while number >= 1000 and power < 5:
        number, power = number / 1000, power + 1
    return f"{number:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"
