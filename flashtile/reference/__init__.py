"""The yardstick: attention by its definition. For tests and benchmarks only."""
