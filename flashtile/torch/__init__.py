"""PyTorch front end."""
