"""Modules of the ops in `flashtile.ops`."""

from flashtile.nn.cross_entropy import CrossEntropyLoss
from flashtile.nn.norm import LayerNorm, RMSNorm

__all__ = ["CrossEntropyLoss", "LayerNorm", "RMSNorm"]
