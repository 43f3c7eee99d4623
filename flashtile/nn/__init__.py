"""Modules of the ops in `flashtile.ops`."""

from flashtile.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "RMSNorm"]
