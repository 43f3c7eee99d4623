"""Tests of the emulator, with a kernel of their own."""
