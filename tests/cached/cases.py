"""Random calls over a cache that go through what combines: pages, layouts, dtypes, masks, packed queries, splits, 8 bits.

test_many.py judges them: a sample in `make test`, all in `make compile`, which takes the tests marked `whole`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.cached.draw import CPU, Drawn, draw
from tests.drafts import drafts

FIRST, COUNT = 20000, 300  # seeds of each backend; without a GPU the portable kernels are interpreted
KERNELS, CALLS = 200, 11  # on a GPU, where kernels are compiled: of so many, and so many calls of each


def drawn_case(seed: int, small: bool, device: torch.device = CPU, variant: int | None = None) -> Drawn:
    """A call of `draw`: of its variants, which are seeds unless named, one in three has a cache of 8 bits, one in four a tree
    for its mask.
    """
    chosen = seed if variant is None else variant
    drawn = draw(seed, small, device, chosen % 3 == 0, variant)
    if chosen % 4:
        return drawn
    cu = drawn.arguments.get("cu_seqlens_q")
    nodes = drawn.tensors[0].shape[1] if cu is None else max(int((cu[1:] - cu[:-1]).max()), 1)
    tree = drafts(len(drawn.arguments["seqused_k"]), nodes, device, seed)
    arguments = {k: v for k, v in drawn.arguments.items() if k not in ("window", "causal")} | {"mask": tree}
    return replace(drawn, arguments=arguments, about=f"{drawn.about}, a tree")


def kinds_of(drawn: Drawn) -> list[str]:
    """What a call has, in words that are counted."""
    q, k_cache, _, *table = drawn.tensors
    arguments = drawn.arguments
    mask = arguments.get("mask")
    said = [f"{q.dtype}", f"stored {k_cache.dtype}" if k_cache.dtype != q.dtype else "as q"]
    said += [f"page {k_cache.shape[1]}" if table else "contiguous", f"split {drawn.split}"]
    said += [name for name in ("cu_seqlens_q", "first_k", "sink", "window", "k_scale", "v_scale") if name in arguments]
    said += [type(one).__name__ for one in arguments["score"]]
    return [*said, type(mask).__name__ if mask is not None else "causal" if arguments.get("causal") else "all keys"]
