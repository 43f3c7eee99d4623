"""Tests of flashtile.bench: suites, rotation, judgement, reports, and the command on a CPU."""
