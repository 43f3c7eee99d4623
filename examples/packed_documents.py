"""Trains a small GPT on documents of unequal lengths, packed one after another, without padding.

python examples/packed_documents.py [--steps N]

Needs PyTorch. It takes some seconds on a CPU, and uses a GPU if there is one. Each document is one topic of Python's own
help. A document never sees another one: the last lines check that, and that the same documents give the same logits when
they lie in a padded batch.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

from flashtile import Band, Document
from flashtile.nn import Attention, RMSNorm

WIDTH, HEADS, LAYERS, CHARACTERS = 64, 4, 2, 128


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, rotary_base=1e4, causal=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, **lengths: object) -> torch.Tensor:
        """(total, width) with cu_seqlens and max_seqlen, (batch, seqlen, width) without."""
        x = x + self.attention(self.norm_1(x), **lengths)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Characters to logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, ids: torch.Tensor, **lengths: object) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, **lengths)
        return self.head(x)


def documents() -> list[torch.Tensor]:
    """The beginnings of topics, 40 to 200 characters each."""
    topics = pydoc_data.topics.topics
    texts = [topics[name][: 40 + 7 * i % 160] for i, name in enumerate(sorted(topics))]
    return [torch.tensor([min(ord(c), CHARACTERS - 1) for c in text]) for text in texts]


def packed(some: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, dict[str, object]]:
    """Documents one after another, and where each begins: cu_seqlens is 0, len 0, len 0 + len 1, ..."""
    lengths = torch.tensor([0, *map(len, some)], dtype=torch.int32)
    cu_seqlens = lengths.cumsum(0, dtype=torch.int32).to(device)
    return torch.cat(some).to(device), {"cu_seqlens": cu_seqlens, "max_seqlen": int(lengths.max())}


def train(steps: int, device: torch.device) -> tuple[Model, list[float]]:
    """The model and its losses."""
    torch.manual_seed(0)
    model, texts = Model().to(device), documents()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses: list[float] = []
    for step in range(steps):
        some = [texts[(8 * step + i) % len(texts)] for i in range(8)]
        ids, lengths = packed(some, device)
        logits = model(ids, **lengths)
        labels = ids.roll(-1)
        labels[lengths["cu_seqlens"][1:] - 1] = -100  # nothing follows the last character of a document
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def apart(model: Model, device: torch.device) -> float:
    """The largest difference between logits of packed documents and of the same ones in a padded batch."""
    some = documents()[:4]
    ids, lengths = packed(some, device)
    together = model(ids, **lengths)
    rows = nn.utils.rnn.pad_sequence(some, batch_first=True).to(device)
    padded = model(rows)  # causal: what follows a document does not reach it
    alone = torch.cat([row[: len(text)] for row, text in zip(padded, some, strict=True)])
    return (together - alone).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = parser.parse_args().steps
    ids = torch.tensor([0] * 9 + [1] * 5 + [2] * 10, dtype=torch.int32)
    print("Three documents of 9, 5 and 10 characters, and what sees what:\n")
    print((Document(ids) & Band(right=0)).show(len(ids)))
    model, losses = train(steps, device)
    print(f"\nTrained on {device}: loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {steps}.")
    print(f"Logits packed and in a padded batch differ by {apart(model, device):.1e} at most.")


if __name__ == "__main__":
    main()
