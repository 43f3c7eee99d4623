"""Score modifiers: one file per feature."""
