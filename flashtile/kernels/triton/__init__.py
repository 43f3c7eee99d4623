"""Portable kernels in Triton."""
