"""Launches every kernel of a problem through the JIT, then directly, and prints what the driver got. See test_launch.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

# What torch would answer on a machine with one H100.
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # pyright: ignore[reportAttributeAccessIssue]
torch._C._cuda_getCurrentRawStream = lambda device: 0
active: Any = CudaDriver()
active.get_current_stream = lambda device: 0
driver.set_active(active)

from flashtile.export.compile import compile_call  # noqa: E402
from flashtile.kernels.hopper.backend import BACKEND as HOPPER  # noqa: E402
from flashtile.kernels.triton.backend import BACKEND as TRITON  # noqa: E402
from flashtile.plan.backend import Gradients  # noqa: E402
from flashtile.plan.call import KernelCall  # noqa: E402
from flashtile.plan.device import H100  # noqa: E402
from flashtile.spec.attention import AttentionProblem  # noqa: E402
from flashtile.torch.run import TORCH_DTYPES, KernelLaunch  # noqa: E402


class Card:
    """What the executor reads of a torch.device."""

    type, index = "cuda", 0


def main() -> None:
    problem = AttentionProblem.parse(sys.argv[1])
    file = Path(os.environ["LAUNCHES"])
    gradients = Gradients(dlse=True)
    plans = [backend.forward(problem, H100) for backend in (HOPPER, TRITON)]
    plans += [HOPPER.backward(problem, H100, gradients, "fused"), TRITON.backward(problem, H100, gradients, "split")]
    for plan in plans:
        tensors = {b.name: torch.empty(b.shape, dtype=TORCH_DTYPES[b.dtype]) for b in plan.buffers}
        for call in plan.calls:
            assert isinstance(call, KernelCall)
            entry = compile_call(call, plan, H100).asm["ptx"].split(".entry")[1].split(")")[0]
            os.environ["PARAMETERS"] = str(len(re.findall(r"\.param", entry)) - 2)  # two are Triton's own scratch
            file.write_text("")
            launch = KernelLaunch(call, plan, {name: t.stride() for name, t in tensors.items()}, Card)  # pyright: ignore
            launch(tensors)  # through Triton's JIT
            direct = launch.compiled is not None
            launch(tensors)
            launch(tensors)
            print(plan.backend, call.kernel.fn.__name__, direct, file.read_text().splitlines(), sep="|")


if __name__ == "__main__":
    main()
