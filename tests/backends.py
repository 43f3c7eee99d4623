"""The backends that can run on this machine, and the backwards that each of them has."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashtile import dispatch
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType
from flashtile.problem.options import Variant
from flashtile.torch.execute.bound import device_of

PLAIN = AttentionProblem(1, 16, 16, 1, 1, 16, 16, DType.FP16)

# What a backend that promises everything refuses all the same. Others, for single architectures, refuse as they like.
PORTABLE = {"triton": (), "cpu": ("fused",)}


def _variants_here() -> dict[str, list[str]]:
    """Of the backends that promise everything: tests take any problem. Hopper's own run in test_attention and under `sm90`."""
    made: dict[str, list[str]] = {}
    for backend in dispatch.BACKENDS:
        if backend.name not in PORTABLE:
            continue
        on_gpu = torch.cuda.is_available() and backend.name != "cpu"
        place = device_of(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        variants = [variant for variant in ("split", "fused") if not backend.unsupported(PLAIN, place, variant)]
        assert variants, backend.unsupported(PLAIN, place)
        made[backend.name] = variants
    return made


VARIANTS_HERE = _variants_here()
OF_KERNELS = [(name, variant) for name, variants in VARIANTS_HERE.items() if name != "cpu" for variant in variants]


def unrepeatable(backend: str, place: torch.device, variant: Variant) -> list[str]:
    """Why a backend's variant does not promise the same bits twice; empty where it does."""
    asked = replace(PLAIN, deterministic=True)
    return dispatch.backend_named(backend).unsupported(asked, device_of(place), variant)
