"""What machines check of the kernels: every kernel for every architecture, and its machine code."""
