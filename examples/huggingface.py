"""Fine-tunes a tiny Llama of transformers with flashtile's attention, and beside it with PyTorch's.

python examples/huggingface.py [--steps N]

Needs PyTorch and transformers, and downloads nothing: the model begins from random weights. It takes some seconds on a CPU,
and uses a GPU if there is one. A model of yours takes the same two lines, those with `register` and `attn_implementation`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flashtile.integrations.transformers import register

register()
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
TEXTS = [
    "Attention is computed tile by tile.",
    "No query sees the padding behind a short text.",
    "A gradient is as exact as its forward.",
    "The last query stands at the last key, whatever lies between.",
]


def batch(device: torch.device) -> dict[str, torch.Tensor]:
    """The texts as numbers, padded at the end, with the mask that says so."""
    width = max(map(len, TEXTS))
    ids = torch.tensor([[*map(ord, text), *[0] * (width - len(text))] for text in TEXTS], device=device)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def train(implementation: str, steps: int) -> list[float]:
    """The losses."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=implementation).to(device, dtype)
    optimizer, given, losses = torch.optim.AdamW(model.parameters(), 3e-3), batch(device), []
    for _ in range(steps):
        loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    runs = {name: train(name, steps) for name in ("flashtile", "sdpa")}
    for name, losses in runs.items():
        print(f"{name:10s} loss {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {steps}")
    print(f"They differ by {max(abs(a - b) for a, b in zip(*runs.values(), strict=True)):.1e} at most.")


if __name__ == "__main__":
    main()
