"""Tests of the public PyTorch function, on every backend that runs here."""
