"""Forward mode on Hopper."""
