"""Launches as one CUDA graph, which the host launches in the time of one kernel or less.

Stream capture and graphs of the CUDA driver API, by ctypes: PyTorch's own graphs bring a memory pool, a collection of garbage
and a synchronisation with them, and their launch takes the host half as long again.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do meanwhile is their own
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the capturing stream does not wait for the default one

Launches = Sequence[tuple[Callable[..., None], tuple[Any, ...]]]

_capturing = threading.Lock()


class LaunchGraph:
    """Launches, captured in order. `launch` puts them on the stream, in the current context.

    launches: Triton's launchers and their arguments, of which the fourth is the stream. `device`: its index, of the current
    context. The graph is freed with this object; what of it is still to run then does. RuntimeError has the driver's words.
    """

    def __init__(self, launches: Launches, stream: int, device: int):
        driver, graph, executable = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        with _capturing:
            own = _stream(device)
            check(driver.cuStreamBeginCapture_v2(own, THREAD_LOCAL))
            try:
                for launch, args in launches:
                    launch(*args[:3], own.value, *args[4:])
            finally:
                status = driver.cuStreamEndCapture(own, ctypes.byref(graph))
        check(status)
        try:
            check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
        finally:
            driver.cuGraphDestroy(graph)
        weakref.finalize(self, driver.cuGraphExecDestroy, executable).atexit = False
        self._function, self._executable, self._stream = driver.cuGraphLaunch, executable, ctypes.c_void_p(stream)

    def launch(self) -> None:
        check(self._function(self._executable, self._stream))


def check(status: int) -> None:
    """Raise RuntimeError with the driver's words for this status, unless it is 0."""
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _stream(_device: int) -> ctypes.c_void_p:
    """A stream of the device, whose context is current, for capturing alone: nobody else uses it, nothing ever runs there."""
    stream = ctypes.c_void_p()
    check(_driver().cuStreamCreate(ctypes.byref(stream), NON_BLOCKING))
    return stream
