"""Attention over a cache on Hopper."""
