"""CPU backend: not there yet."""

from __future__ import annotations


class CpuBackend:
    name = "cpu"

    def unsupported(self, problem, device, variant="auto"):
        return ["not built yet"]


BACKEND = CpuBackend()
