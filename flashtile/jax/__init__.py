"""flashtile from JAX: the same kernels and the same plans, without PyTorch. See docs/jax.md."""

from flashtile.jax import flax
from flashtile.jax.attention import dot_product_attention, dot_product_attention_varlen, mha
from flashtile.jax.cache import append_to_cache, attention_cached
from flashtile.jax.context import dot_product_attention_sharded, shard_order, shard_positions
from flashtile.jax.head import linear_cross_entropy
from flashtile.jax.ops import cross_entropy, layer_norm, rms_norm, rotary, softmax
from flashtile.jax.run import target

__all__ = [
    "append_to_cache",
    "attention_cached",
    "cross_entropy",
    "dot_product_attention",
    "dot_product_attention_sharded",
    "dot_product_attention_varlen",
    "flax",
    "layer_norm",
    "linear_cross_entropy",
    "mha",
    "rms_norm",
    "rotary",
    "shard_order",
    "shard_positions",
    "softmax",
    "target",
]
