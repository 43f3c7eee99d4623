"""Tests of flashtile: one case list for every backend, judged against the float64 reference."""

import os

# Before numpy and PyTorch are imported, here and in processes that tests start. xdist gives every core a worker of its own:
# two of OpenBLAS's threads that wait for one another there take 2,320 us of the cores for a product of 128 x 128, and one 50.
# What a process emulates costs twice as much with two of OpenMP's, which each of a block's roles would have of its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
