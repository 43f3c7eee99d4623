"""A small GPT in flax that trains on its own source, with flashtile's attention, norms, rotary and loss.

python examples/jax_gpt.py [--steps N] [--attention jax.nn]

Needs jax, flax and optax. On a CPU it takes about a minute; on an NVIDIA GPU the same file runs flashtile's kernels.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flashtile.jax import cross_entropy, dot_product_attention, rms_norm, rotary

WIDTH, HEADS, HEADS_KV, LAYERS, SEQLEN, BATCH, CLASSES = 64, 4, 2, 2, 64, 8, 128
HEAD_DIM = WIDTH // HEADS
ANGLES = np.outer(np.arange(SEQLEN), 10000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
COS, SIN = jnp.asarray(np.cos(ANGLES), jnp.float32), jnp.asarray(np.sin(ANGLES), jnp.float32)


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, rngs: nnx.Rngs, attention: Any):
        self.attention = attention
        self.norm_1, self.norm_2 = (nnx.Param(jnp.ones(WIDTH)) for _ in range(2))
        self.sinks = nnx.Param(jnp.zeros(HEADS))
        self.qkv = nnx.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        qkv = self.qkv(rms_norm(x, self.norm_1[...])).reshape(*x.shape[:2], -1, HEAD_DIM)
        q, k, v = jnp.split(qkv, (HEADS, HEADS + HEADS_KV), axis=2)
        q, k = rotary(q, k, COS, SIN)
        x = x + self.out(self.attention(q, k, v, self.sinks[...]).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(rms_norm(x, self.norm_2[...]))))


class Model(nnx.Module):
    """Token ids (batch, SEQLEN) to logits."""

    def __init__(self, rngs: nnx.Rngs, attention: Any):
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, attention) for _ in range(LAYERS)])
        self.norm = nnx.Param(jnp.ones(WIDTH))
        self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(rms_norm(x, self.norm[...]))


ATTENTIONS = {
    "flashtile": lambda q, k, v, sinks: dot_product_attention(q, k, v, is_causal=True, sinks=sinks),
    "jax.nn": lambda q, k, v, sinks: jax.nn.dot_product_attention(q, k, v, is_causal=True),
}


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, ids: Any, labels: Any) -> Any:
    """One step of training; the loss before it."""
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(ids), labels))(model)
    optimizer.update(model, grads)
    return loss


def train(steps: int, attention: str = "flashtile") -> list[float]:
    """Losses."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32) % CLASSES
    model = Model(nnx.Rngs(0), ATTENTIONS[attention])
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        starts = rng.integers(0, len(text) - SEQLEN - 1, BATCH)
        ids, labels = (np.stack([text[s + shift : s + shift + SEQLEN] for s in starts]) for shift in (0, 1))
        losses.append(float(step(model, optimizer, jnp.asarray(ids), jnp.asarray(labels))))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--attention", choices=ATTENTIONS, default="flashtile")
    chosen = parser.parse_args()
    started = time.perf_counter()
    losses = train(chosen.steps, chosen.attention)
    for i in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"step {i:4d}  loss {losses[i]:.3f}")
    print(f"step {len(losses) - 1:4d}  loss {losses[-1]:.3f}   {time.perf_counter() - started:.0f} s on {jax.devices()[0]}")
