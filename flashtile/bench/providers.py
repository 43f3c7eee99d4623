"""Who is measured. A provider is one entry; a peer is imported only inside its own functions."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashtile import dispatch
from flashtile.bench.result import OWN
from flashtile.errors import NotSupported
from flashtile.plan.backend import Backend, Gradients
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.mask import CAUSAL, FULL
from flashtile.problem.options import VARIANTS, Options, Variant
from flashtile.torch.api.attention import attention
from flashtile.torch.execute.bound import device_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# SDPA's math backend holds several (seqlen_q, seqlen_k) matrices per head at once, and its kept graph some of them.
MATH_MOST_BYTES = {"cuda": 5 * 2**30, "cpu": 2**30}


def _accepts(problem: AttentionProblem, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """A way to compute a problem.

    make: the differentiable function of q, k, v for one problem; it may compile, and raise what `refusal` knows.
    refuse: a reason why this provider does not compute this problem, or None.
    heads_first: tensors are given as (b, h, s, d) views of (b, s, h, d) memory, outside the timed call.
    context: entered around every call, outside the timed loop.
    compiles: worth running ahead of time in a process of its own, because the result is cached on disk.
    """

    name: str
    make: Callable[[AttentionProblem, torch.device], Attend]
    refuse: Callable[[AttentionProblem, torch.device], str | None] = _accepts
    heads_first: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiles: bool = False


def providers(device: torch.device, also: Path | None = None) -> dict[str, Provider]:
    """Every provider by name: ours as `dispatch` lists them, the peers, and `PROVIDERS` of the Python file `also`."""
    listed = [*own_providers(device), *PEERS]
    if also is not None:
        found = runpy.run_path(str(also))
        if "PROVIDERS" not in found:
            raise SystemExit(f"{also.name} has no PROVIDERS; it must be a list of flashtile.bench.providers.Provider.")
        listed += found["PROVIDERS"]
    return {provider.name: provider for provider in listed}


def refusal(error: BaseException) -> str | None:
    """Why an exception means 'cannot run this' instead of a failure; None if it is a failure."""
    if isinstance(error, NotSupported):
        return "; ".join(f"{name}: {line}" for name, lines in error.reasons.items() for line in lines)
    if isinstance(error, (NotImplementedError, ImportError)):
        return first_line(error)
    if isinstance(error, RuntimeError) and "No available kernel" in str(error):
        return "SDPA: no available kernel"
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return f"does not compile: {first_line(error.__cause__ or error)}"
    return None


def first_line(error: BaseException) -> str:
    """What went wrong, in one line of at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


# -- ours -----------------------------------------------------------------------------------------------------------


def own_providers(device: torch.device) -> list[Provider]:
    """One provider per backend and per backward variant that the backend tells apart."""
    return [_own(backend, variant) for backend in dispatch.BACKENDS for variant in _variants(backend, device)]


def _variants(backend: Backend, device: torch.device) -> list[Variant]:
    """The variants whose plans differ on this device; ["auto"] when there is no choice."""
    probe = AttentionProblem(
        batch=1, seqlen_q=128, seqlen_k=128, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64, dtype=DType.FP32
    )  # fmt: skip
    place = device_of(device)
    found: dict[Any, Variant] = {}
    for variant in VARIANTS:
        if variant != "auto" and not backend.unsupported(probe, place, variant):
            found.setdefault(backend.backward(probe, place, Gradients(), variant).calls, variant)
    return list(found.values()) if len(found) > 1 else ["auto"]


def _own(backend: Backend, variant: Variant) -> Provider:
    def refuse(problem: AttentionProblem, device: torch.device) -> str | None:
        if problem.score:
            return "the benchmark makes no tensors for score modifiers"
        return "; ".join(backend.unsupported(problem, device_of(device), variant)) or None

    def make(problem: AttentionProblem, device: torch.device) -> Attend:
        options = Options(backend.name, variant, problem.deterministic or None, problem.precision)
        # As a user would write it: causal as a flag, everything else as a mask.
        mask: dict[str, Any] = {"causal": True} if problem.mask == CAUSAL else {"mask": problem.mask}
        if problem.mask == FULL:
            mask = {}
        return lambda q, k, v: attention(q, k, v, scale=problem.scale, options=options, **mask)

    name = OWN + backend.name + ("" if variant == "auto" else f"/{variant}")
    return Provider(name, make, refuse, compiles=True)


# -- torch's scaled_dot_product_attention ---------------------------------------------------------------------------


def _sdpa(name: str, backend: str, cpu: bool = False, fp32: bool = False, groups: bool = True) -> Provider:
    """One backend of SDPA; `cpu`, `fp32`, `groups`: whether it runs on CPUs, with fp32 on GPUs, with shared heads."""

    def context() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, backend))  # pyright: ignore[reportUnknownVariableType]

    def refuse(problem: AttentionProblem, device: torch.device) -> str | None:
        if device.type == "cpu" and not cpu:
            return "needs a GPU"
        if device.type != "cpu" and problem.dtype is DType.FP32 and not fp32:
            return "dtype is fp32; supported are fp16 and bf16"
        if problem.group > 1 and not groups:
            return "heads_kv must equal heads_q"
        if name == "math":
            held = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k * 4
            limit = MATH_MOST_BYTES[device.type]
            if held > limit:
                return f"holds {held / 2**30:.1f} GiB of scores; limit here {limit / 2**30:.2g} GiB"
        if problem.mask == CAUSAL and problem.seqlen_q != problem.seqlen_k:
            return "is_causal aligns top-left, the case bottom-right, and seqlen_q != seqlen_k"
        return _plain_mask(problem)

    def make(problem: AttentionProblem, device: torch.device) -> Attend:
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        causal, scale, grouped = problem.mask == CAUSAL, problem.scale, problem.group > 1
        return lambda q, k, v: sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return Provider(f"sdpa/{name}", make, refuse, heads_first=True, context=context)


def _plain_mask(problem: AttentionProblem) -> str | None:
    if problem.score:
        return "has no score modifiers"
    return None if problem.mask in (CAUSAL, FULL) else "has no band mask"


# -- FlexAttention --------------------------------------------------------------------------------------------------


def _refuse_flex(problem: AttentionProblem, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "compiled for GPUs only here: no backward on CPUs"
    return "the benchmark writes no score_mod" if problem.score else None


def _make_flex(problem: AttentionProblem, device: torch.device) -> Attend:
    """flex_attention compiled for this problem alone, with a block mask in bottom-right alignment."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each case compiles anew; otherwise the recompilation limit falls back to eager silently
    # The backward is run many times on one graph, which donated buffers forbid.
    torch._functorch.config.donated_buffer = False
    band, mask = problem.mask, None
    lowest, highest = problem.shift - (band.left or 0), problem.shift + (band.right or 0)

    def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
        """No more than the bounds that exist, which is what its user would write."""
        if band.left is None:
            return key <= row + highest
        if band.right is None:
            return key >= row + lowest
        return (key >= row + lowest) & (key <= row + highest)

    if not band.unbounded:
        mask = create_block_mask(visible, None, None, problem.seqlen_q, problem.seqlen_k, device=str(device))
    flex: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]
    scale, grouped = problem.scale, problem.group > 1
    return lambda q, k, v: flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


# -- FlashAttention-4 -----------------------------------------------------------------------------------------------


def _refuse_fa4(problem: AttentionProblem, device: torch.device) -> str | None:
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        found = False
    if not found:
        return "flash_attn.cute is not installed"
    if device.type == "cpu":
        return "needs a GPU"
    if problem.dtype is DType.FP32:
        return "dtype is fp32; supported are fp16 and bf16"
    return _plain_mask(problem)


def _make_fa4(problem: AttentionProblem, device: torch.device) -> Attend:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # what another process compiled is found on disk
    module: Any = importlib.import_module("flash_attn.cute")
    flash_attn_func, causal, scale = module.flash_attn_func, problem.mask == CAUSAL, problem.scale

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)[0]  # always a tuple, its causal is bottom-right

    return attend


PEERS: tuple[Provider, ...] = (
    _sdpa("flash", "FLASH_ATTENTION", cpu=True),
    _sdpa("cudnn", "CUDNN_ATTENTION"),
    _sdpa("efficient", "EFFICIENT_ATTENTION", fp32=True, groups=False),
    _sdpa("math", "MATH", cpu=True, fp32=True),
    Provider("flex", _make_flex, _refuse_flex, heads_first=True, compiles=True),
    Provider("fa4", _make_fa4, _refuse_fa4, compiles=True),
)
