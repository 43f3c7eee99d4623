"""Runs the plain kernel in the emulator as it stands, then with each mistake, and prints what became of it.

python -m gluon_emulator.tests.run
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import gluon_emulator

MISTAKES: dict[str, dict[str, Any]] = {"as it stands": {}, "early": {"EARLY": True}, "unfenced": {"FENCED": False}}


def main() -> None:
    gluon_emulator.install()
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gluon_emulator.tests.plain import product

    torch.manual_seed(0)
    a, b = torch.randn(150, 100).half(), torch.randn(64, 100).half()
    for name, mistake in MISTAKES.items():
        c = torch.full((150, 64), torch.nan).half()
        blocks = ((a, [64, 32]), (b, [64, 32]), (c, [64, 64]))
        described = [TensorDescriptor.from_tensor(x, block) for x, block in blocks]
        try:
            product[(3,)](*described, STEPS=4, BLOCK=32, num_warps=4, **mistake)
            torch.testing.assert_close(c.float(), a.float() @ b.float().T, rtol=2e-3, atol=2e-2)
            print(f"{name}: right")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}".replace("\n", " "))
    assert not any(name.startswith("flashtile") for name in sys.modules)


if __name__ == "__main__":
    main()
