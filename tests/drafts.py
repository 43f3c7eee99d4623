"""Random trees of drafted tokens."""

from __future__ import annotations

import torch

from flashtile import Tree


def drafts(items: int, nodes: int, device: torch.device, seed: int = 2) -> Tree:
    """Of each item another tree, some of whose nodes are roots."""
    up = torch.rand(items, nodes, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, nodes + 1)
    return Tree((up.int() - 1).to(device))
