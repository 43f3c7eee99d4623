"""Ops that are not attention, from call to launch."""
