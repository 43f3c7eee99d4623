"""Tests of flashtile.problem: host only, property-based."""
