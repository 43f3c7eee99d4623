"""Other libraries' names, each against that library's own formula in plain PyTorch."""
