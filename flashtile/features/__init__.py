"""Features: one file each."""
