"""Tests of the yardstick itself."""
