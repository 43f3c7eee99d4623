"""CPU backend in plain torch."""
