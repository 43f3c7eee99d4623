"""A mask of your own, as an object: what it says, a picture of it, its blocks, and a call with it.

python examples/own_mask.py [--output mask.png]

Needs PyTorch and Triton (Linux). It takes seconds on a CPU, and uses a GPU if there is one. The mask is that of a text whose
first tokens everybody sees, and whose other tokens see a neighbourhood that grows from head to head.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import flashtile


@triton.jit
def growing_visible(at, args):
    """For kernels: a boolean for every query and key of a tile. args: the scalars."""
    return (at.k < args[0]) | (tl.abs(at.q - at.k) < args[1] * (at.head + 1))


@dataclass(frozen=True)
class Growing(flashtile.Predicate):
    """Query i sees the first `anchors` keys, and in head h those that are nearer than `reach` * (h + 1)."""

    anchors: int
    reach: int

    name = "growing"
    visible = growing_visible

    def scalars(self) -> tuple[int, ...]:
        return self.anchors, self.reach

    @staticmethod
    def apply(at: Any, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        """The same in PyTorch, for CPUs and for the tests."""
        return (at.k < scalars[0]) | ((at.q - at.k).abs() < scalars[1] * (at.head + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the picture of the last head here")
    output = parser.parse_args().output
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    mask = Growing(anchors=2, reach=3) & flashtile.Band(right=0)  # and causal
    for head in (0, 3):
        print(f"Head {head}:", mask.show(24, heads=4, head=head), "", sep="\n")
    if output:
        mask.show(96, heads=4, head=3).save(output)

    seqlen = 512
    blocks = flashtile.Blocks.build(Growing(8, 32) & flashtile.Band(right=0), seqlen, seqlen, heads=4, device=device)
    print(
        f"Its blocks in head 0, {100 * blocks.density:.0f} % of which are visited in the four heads:",
        blocks.show(),
        "",
        sep="\n",
    )

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, seqlen, 4, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    out = flashtile.attention(q, k, v, mask=blocks)
    out.sum().backward()

    at = torch.arange(seqlen, device=device)
    distance, head = at[:, None] - at, torch.arange(4, device=device)[:, None, None]
    dense = ((at < 8) | (distance.abs() < 32 * (head + 1))) & (distance >= 0)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense).transpose(1, 2)
    print(f"Beside PyTorch with the same mask as a boolean for every score: {(out - expected).abs().max().item():.1e} at most.")


if __name__ == "__main__":
    main()
