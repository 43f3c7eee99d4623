"""Attention of 8 bits, beside queries of 16 or of 8."""
