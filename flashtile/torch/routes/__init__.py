"""How a call reaches kernels: eagerly, as an operator, under torch.func."""
