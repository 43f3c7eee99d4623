"""Tests of flashtile: one case list for every backend, judged against the float64 reference."""
