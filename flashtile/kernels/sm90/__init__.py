"""Hopper's peak: warp-specialised kernels in Gluon (sm_90 only)."""
