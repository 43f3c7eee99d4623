"""Predicates: one file per feature."""
