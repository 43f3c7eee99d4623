"""Hopper's backward: producer, consumers, epilogue, tile scheduler."""
