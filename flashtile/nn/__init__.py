"""Modules: attention, and the ops in `flashtile.ops`."""

from flashtile.nn.attention import Attention
from flashtile.nn.cross_entropy import CrossEntropyLoss
from flashtile.nn.dense import MLP
from flashtile.nn.norm import LayerNorm, RMSNorm

__all__ = ["MLP", "Attention", "CrossEntropyLoss", "LayerNorm", "RMSNorm"]
