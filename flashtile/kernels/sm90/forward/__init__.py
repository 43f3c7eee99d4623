"""Hopper's forward: producer, consumers, epilogue, tile scheduler."""
