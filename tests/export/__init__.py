"""Exported C: what it launches, what it refuses, how it compiles."""
