"""Ops around attention, one file each: the problem, its Triton kernels, its plan, and the same in plain PyTorch."""
