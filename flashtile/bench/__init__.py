"""Benchmarks: suites of problems, providers that solve them, timing in rotation, CSV, tables and plots."""
