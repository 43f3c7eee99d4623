"""Other libraries' hooks for an attention. Nothing is registered on import."""
