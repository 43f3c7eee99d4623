"""Second derivatives on Hopper."""
