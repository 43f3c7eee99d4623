"""Which module computes a problem whose items are alike: torch's own flash attention in several ways, or tiles in plain torch.

Planning needs no PyTorch, so these functions import the modules that do.
"""

from __future__ import annotations

from types import ModuleType

from flashtile.kernels.cpu.region import region_of, tiling_of
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType

DELEGATED = "cpu: delegates to torch's flash attention"
PLAIN_SUMS = ", whose float32 sums are plain PyTorch's (precision 'ieee' has stricter ones)"
LEAST_KEYS = 16  # beside a mask; `delegate.py` says what torch's flash attention makes of fewer


def delegates(p: AttentionProblem) -> bool:
    """Whether torch's flash attention knows this problem: `delegate.py` says what it does not know."""
    region = region_of(p)
    if p.score or p.where or p.sink is not None or p.dropout is not None or p.dtype is DType.FP64:
        return False
    if p.head_dim != p.head_dim_v or region.rows == 0 or region.keys == 1:  # of one key dq and dk are 0, and tiles make them so
        return False
    return region.full or (region.causal and p.scale_value > 0.0)


def takes_mask(p: AttentionProblem) -> bool:
    """Whether torch's flash attention computes this 16-bit forward, if with a float32 mask: `masked.py` and `scored.py`."""
    region = region_of(p)
    if not p.dtype.is_narrow or p.where or p.sink is not None or p.dropout is not None:
        return False
    return p.head_dim == p.head_dim_v and region.rows > 0 and region.keys >= LEAST_KEYS


def keeps_wide(p: AttentionProblem) -> bool:
    """Whether the forward hands the backward its out in float32, for delta, which would compute it again otherwise."""
    from flashtile.kernels.cpu.products import widens

    return delegates(p) and widens(p)


def forward_way(p: AttentionProblem) -> tuple[ModuleType, str]:
    """The module that computes the forward of items that are alike, and what `explain` says about it."""
    from flashtile.kernels.cpu import delegate, masked, scored

    otherwise = f"{', lse mended' * p.returns_lse}, and tiles where scores may be above {delegate.MOST_SCORE:.0f} or not finite"
    if not delegates(p):
        if takes_mask(p) and all(spec.kind.by_distance for spec in p.score) and (_mends(p) or not p.returns_lse):
            return masked, f"{DELEGATED} in {p.dtype} with an additive mask{otherwise}"
        if takes_mask(p) and scored.delegates_strips(p) and _mends(p) and not p.returns_lse:
            return scored, f"{DELEGATED} in {p.dtype} with a mask of scores{otherwise}"
        return _tiled(p)
    if p.dtype is DType.FP32:
        if not strict(p):
            return delegate, f"{DELEGATED}{PLAIN_SUMS}"
        return delegate, f"{DELEGATED} in fp64" if _few_keys(p) else f"{DELEGATED}, rows that few keys decide again"
    if not keeps_wide(p) and (not p.returns_lse or _mends(p)):
        return delegate, f"{DELEGATED} in {p.dtype}{otherwise}"
    return delegate, f"{DELEGATED}, {p.dtype} widened to fp32"


def backward_way(p: AttentionProblem, dlse: bool) -> tuple[ModuleType, str]:
    """The same of its backward."""
    from flashtile.kernels.cpu import delegate, peaked

    if p.dtype is DType.FP32 and delegates(p):
        if not (dlse or strict(p)):
            return delegate, f"{DELEGATED}{PLAIN_SUMS}, and tiles for items where scores are large"
        if not _few_keys(p):
            return peaked, _tiled(p)[1]
        return _tiled(p) if dlse else (delegate, f"{DELEGATED} in fp64")
    if not delegates(p) or dlse or _narrow(p) or region_of(p).keys < LEAST_KEYS:
        return _tiled(p)
    return delegate, f"{DELEGATED}, both passes, {p.dtype} widened to fp32, and tiles for items where scores are large"


def _tiled(p: AttentionProblem) -> tuple[ModuleType, str]:
    from flashtile.kernels.cpu import tiled

    region = region_of(p)
    about = f"tile {tiling_of(p, region).spell()}{_arithmetic(p)}" if region.rows else "no query sees a key"
    return tiled, f"cpu: tiled online softmax, {about}"


def strict(p: AttentionProblem) -> bool:
    """Whether its float32 sums are stricter than plain PyTorch's."""
    from flashtile.kernels.cpu import products

    return products.strict(p)


def _few_keys(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import FEW_KEYS

    return region_of(p).keys <= FEW_KEYS


def _narrow(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import product_dtype, score_dtype

    return product_dtype(p) is not score_dtype(p)


def _mends(p: AttentionProblem) -> bool:
    from flashtile.kernels.cpu.products import mends

    return mends(p)


def _arithmetic(p: AttentionProblem) -> str:
    import torch

    from flashtile.kernels.cpu.products import score_dtype

    if _narrow(p):
        return f", products with probabilities in {p.dtype}"
    return ", in fp64" if score_dtype(p) is torch.float64 else ""
