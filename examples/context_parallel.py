"""Trains a small GPT on one process, then on two that share every sequence, and compares.

Run `python examples/context_parallel.py`. On GPUs: `torchrun --nproc_per_node 2`, `torch.cuda.set_device` and "nccl" in the
place of `spawn` and "gloo", and tensors on the device. No GPU has run it yet.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import spawn

import flashtile
from flashtile.distributed import Context, attention, position_ids, shard

RANKS, STEPS, BATCH, SEQLEN, VOCABULARY, WIDTH, HEADS = 2, 50, 4, 64, 16, 32, 4
IGNORED = -100


class Block(nn.Module):
    """A layer; `context` says which ranks share the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Context | None) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if context is None:
            out = flashtile.attention(q, k, v, causal=True)
        else:
            out = attention(q, k, v, context=context, causal=True)
        x = x + self.project(out.flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """The model; tokens and positions are a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: Context | None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their labels: sequences that count in steps of their own, with some noise."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQLEN)) % VOCABULARY
    noise = torch.rand(tokens.shape, generator=generator) < 0.05
    tokens = torch.where(noise, torch.randint(0, VOCABULARY, tokens.shape, generator=generator), tokens)
    labels = torch.cat([tokens[:, 1:], tokens.new_full((BATCH, 1), IGNORED)], 1)  # shifted before they are shared out
    return tokens, labels


def train(context: Context | None) -> tuple[list[float], int]:
    """The losses, and the bytes that a step keeps for its backward."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, kept = list[float](), dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for step in range(STEPS):
        tokens, labels = batch(step)
        count = (labels != IGNORED).sum()  # of the whole batch: every rank's loss is its part of the mean
        positions = torch.arange(SEQLEN)
        if context is not None:
            tokens, labels, positions = shard(tokens, context), shard(labels, context), position_ids(SEQLEN, context)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(tokens, positions, context)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        optimizer.zero_grad()
        loss.backward()
        if context is not None:
            for tensor in (loss.data, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor, group=context.group)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, sum(kept.values())


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    context = Context(method="ring", layout="zigzag")
    result: Any = train(context)
    if rank == 0:
        qkv = [torch.empty(BATCH, SEQLEN // RANKS, HEADS, WIDTH // HEADS) for _ in range(3)]
        print(context.explain(*qkv, causal=True))
        torch.save(result, Path(folder) / "result")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    alone, bytes_alone = train(None)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (folder,), nprocs=RANKS)
        shared, bytes_shared = torch.load(Path(folder) / "result")
    for step in (0, 10, 20, 30, 40, STEPS - 1):
        print(f"step {step:2d}: loss {alone[step]:.6f} on one process, {shared[step]:.6f} on {RANKS}")
    print(f"largest difference of the loss in {STEPS} steps: {max(abs(a - b) for a, b in zip(alone, shared, strict=True)):.1e}")
    share = bytes_shared / bytes_alone
    print(f"kept for the backward: {bytes_alone:,} bytes on one process, {bytes_shared:,} a rank ({share:.2f} of it)")


if __name__ == "__main__":
    main()
