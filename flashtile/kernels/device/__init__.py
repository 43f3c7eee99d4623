"""Device helpers usable from Triton and Gluon kernels."""
