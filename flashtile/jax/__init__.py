"""flashtile from JAX: the same kernels and the same plans, without PyTorch. See docs/jax.md."""

from flashtile.jax.attention import dot_product_attention, dot_product_attention_varlen, mha
from flashtile.jax.run import target

__all__ = ["dot_product_attention", "dot_product_attention_varlen", "mha", "target"]
