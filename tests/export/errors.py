"""Calls exported C wrongly, or where the driver does not play along, and prints what it answers. See test_errors.py.

python -m tests.export.errors LIBRARY CASE
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

NAMES = ("q", "k", "v", "out", "lse")


class Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES]


BACKWARD = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")


class BackwardTensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in BACKWARD]


def forward(library: Any, sizes: tuple[int, ...] = (2, 100, 130, 3), **wrong: int) -> int:
    tensors = Tensors(*(wrong.get(name, (i + 1) << 20) for i, name in enumerate(NAMES)))
    return library.flashtile_small_forward(ctypes.byref(tensors), *map(ctypes.c_int64, sizes), None, ctypes.c_size_t(0), None)


def backward(library: Any, scratch: int, scratch_bytes: int) -> int:
    tensors = BackwardTensors(*((i + 1) << 20 for i in range(len(BACKWARD))))
    sizes = map(ctypes.c_int64, (2, 100, 130, 3))
    return library.flashtile_small_backward(
        ctypes.byref(tensors), *sizes, ctypes.c_void_p(scratch), ctypes.c_size_t(scratch_bytes), None
    )


def scratch_of(library: Any) -> int:
    wanted = ctypes.c_size_t()
    status = library.flashtile_small_backward_scratch(*map(ctypes.c_int64, (2, 100, 130, 3)), ctypes.byref(wanted))
    return wanted.value if status == 0 else -status


CASES = {
    "right": lambda lib: forward(lib),
    "null": lambda lib: forward(lib, k=0),
    "misaligned": lambda lib: forward(lib, out=(1 << 20) + 8),
    "zero": lambda lib: forward(lib, (2, 0, 130, 3)),
    "negative": lambda lib: forward(lib, (-2, 100, 130, 3)),
    "large": lambda lib: forward(lib, (2, 2**31, 130, 3)),
    "product": lambda lib: forward(lib, (2**30, 2**30, 130, 3)),
    "limits": lambda lib: forward(lib, (1, 2**30, 1, 1)),
    "no-tensors": lambda lib: lib.flashtile_small_forward(None, *map(ctypes.c_int64, (2, 100, 130, 3)), None, 0, None),
    "no-result": lambda lib: lib.flashtile_small_forward_scratch(*map(ctypes.c_int64, (2, 100, 130, 3)), None),
    "scratch": lambda lib: backward(lib, 1 << 24, scratch_of(lib)),
    "no-scratch": lambda lib: backward(lib, 0, scratch_of(lib)),
    "little-scratch": lambda lib: backward(lib, 1 << 24, scratch_of(lib) - 1),
    "misaligned-scratch": lambda lib: backward(lib, (1 << 24) + 4, scratch_of(lib)),
    "prepare": lambda lib: lib.flashtile_prepare(),
}


def main() -> None:
    library: Any = ctypes.CDLL(sys.argv[1])
    library.flashtile_last_error.restype = library.flashtile_status_text.restype = ctypes.c_char_p
    status = CASES[sys.argv[2]](library)
    print(library.flashtile_status_text(status).decode(), library.flashtile_last_error().decode(), sep="|", end="")


if __name__ == "__main__":
    main()
