"""Attention over a key/value cache."""
