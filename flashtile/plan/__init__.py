"""The vocabulary of how: devices, buffers, kernel calls, plans. Standard library only."""
