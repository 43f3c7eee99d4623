"""What a measurement ran on, for the columns of the CSV."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from flashtile.triton_glue import language as _triton


def facts(device: torch.device) -> dict[str, str]:
    """Device and versions, as text; empty where there is none."""
    return {
        "device": cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "driver": "" if device.type == "cpu" else _driver(),
        "torch": torch.__version__,
        "triton": _triton.VERSION or "",
        "cudnn": str(torch.backends.cudnn.version() or "") if device.type != "cpu" else "",
        "flash_attn": _installed("flash-attn-4"),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout.strip() else ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
