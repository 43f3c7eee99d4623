"""Tests of flashtile.spec: host only, property-based."""
