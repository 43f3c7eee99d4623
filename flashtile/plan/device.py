"""Devices as data, so that plans can be made for a GPU that is not there."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Device:
    """What a backend may know of the machine.

    `arch` is 10 * major + minor of the compute capability ("cuda"), the number in gfxNNN ("hip"), 0 for "cpu".
    `peak_tflops` (16-bit matrix units) and `peak_gbps` feed the roofline of `explain` and nothing else.
    """

    kind: Literal["cuda", "hip", "cpu"]
    name: str
    arch: int = 0
    sm_count: int = 1
    smem_bytes: int = 0  # per thread block
    peak_tflops: float | None = None
    peak_gbps: float | None = None

    @property
    def target(self) -> str:
        """Short name of the architecture: sm90, gfx942, cpu."""
        return {"cuda": f"sm{self.arch}", "hip": f"gfx{self.arch}", "cpu": "cpu"}[self.kind]

    @property
    def multiplies_float64(self) -> bool:
        """Whether there are matrix units for float64 that Triton uses well; a CPU has no others."""
        return self.target in ("sm80", "sm90", "cpu")


# Named devices for tests, export and the compile-only stage. Shared memory per block: CUDA C programming guide, table
# of compute capabilities; LDS of CDNA3: AMD's ISA guide. Peaks: vendors' datasheets (dense), H100: measured, see docs.
A100 = Device("cuda", "A100", 80, 108, 163 * 1024, 312, 2039)
RTX3090 = Device("cuda", "RTX 3090", 86, 82, 99 * 1024, 71, 936)
RTX4090 = Device("cuda", "RTX 4090", 89, 128, 99 * 1024, 165, 1008)
H100 = Device("cuda", "H100", 90, 132, 227 * 1024, 789, 3007)
B200 = Device("cuda", "B200", 100, 148, 227 * 1024, 2250, 8000)
RTX5090 = Device("cuda", "RTX 5090", 120, 170, 99 * 1024, 210, 1792)
MI300X = Device("hip", "MI300X", 942, 304, 64 * 1024, 1307, 5300)
CPU = Device("cpu", "cpu")

NAMED = {d.target: d for d in (A100, RTX3090, RTX4090, H100, B200, RTX5090, MI300X, CPU)}

# Further cards that `explain` knows by name. Peaks as above; those of an H100's arithmetic are the H100's.
CARDS = (
    Device("cuda", "H200", 90, 132, 227 * 1024, 789, 4800),
    Device("cuda", "GH200", 90, 132, 227 * 1024, 789, 4000),
    Device("cuda", "A10", 86, 72, 99 * 1024, 125, 600),
    Device("cuda", "L40S", 89, 142, 99 * 1024, 362, 864),
    Device("cuda", "T4", 75, 40, 64 * 1024, 65, 320),
)


def named(target: str) -> Device:
    """The named device of an architecture such as 'sm90'. Raises KeyError for one that is not listed."""
    return NAMED[target.replace("_", "")]


def cpu_name() -> str:
    """What this machine's processor is called."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
