"""Plans without Python: compiling them ahead for an architecture that need not be present."""
