"""Kernels, one folder per architecture; backends never import each other."""
