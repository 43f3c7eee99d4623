"""Attention of a sequence that ranks share: local calls of `attention`, and what ranks exchange around them."""
