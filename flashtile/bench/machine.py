"""What a measurement ran on, for the columns of the CSV."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from flashtile.plan.device import cpu_name
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
