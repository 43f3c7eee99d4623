"""The only conditional import of Triton. Without it the CPU backend works and the others refuse."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import getclosurevars
from threading import Lock, RLock, Thread
from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton import jit, knobs  # pyright: ignore[reportAssignmentType] (the stand-in below has a plainer type)
    from triton.language import constexpr

    VERSION: str | None = triton.__version__
    INTERPRETED = bool(knobs.runtime.interpret)
except ImportError:
    VERSION, INTERPRETED = None, False
    knobs: Any = None

    def constexpr(value: Any) -> Any:
        return value

    def jit(function: Any = None, **options: Any) -> Any:
        """Leave the function as it is: nothing will launch it."""
        return function if function is not None else jit

    class _Missing:
        constexpr = object

    tl: Any = _Missing()


if INTERPRETED:
    from flashtile.triton_glue.interpreter import mend

    mend()


def shared(function: Any) -> Any:
    """A plain host function, callable from kernels too (the interpreter runs it as it is)."""
    return function if INTERPRETED else jit(function)


# Runtime integers of every attention kernel. Left out of Triton's specialisation (on 1 and on multiples of 16), so that
# new lengths, head counts and window sizes meet compiled kernels.
PLAIN_INTEGERS = ["seqlen_q", "seqlen_k", "heads", "group", "left", "right"]


class JitTuple(tuple):
    """A constexpr tuple of `@jit` functions, possibly nested.

    Triton keys its disk cache by the *names* of functions inside a tuple; `cache_key` covers their sources, so that an
    edited modifier never meets a stale kernel.
    """

    @property
    def cache_key(self) -> str:
        return "(" + "+".join(getattr(f, "cache_key", str(f)) for f in self) + ")"


def tile_layout(block: list[int], dtype: str, swizzled: bool) -> Any:
    """How the bulk copy engine leaves a tile in shared memory: as matrix operands need it, or row by row."""
    from triton.experimental.gluon import language as gl

    element: Any = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32, "uint8": gl.uint8}[dtype]
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(block, element)
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=element.primitive_bitwidth, rank=len(block))


SOUND_PTXAS = (12, 9)
_COMPILING = RLock()


@cache
def assembler() -> str | None:
    """The path of the assembler for NVIDIA GPUs that kernels are to be compiled with, where it is not Triton's own choice.

    That is where its ptxas is older than SOUND_PTXAS, and it brings a newer one: SHARED_ADDRESS in `workarounds.py`. Whoever
    sets TRITON_PTXAS_PATH has chosen.
    """
    if "TRITON_PTXAS_PATH" in os.environ or not hasattr(knobs.nvidia, "ptxas_blackwell"):
        return None
    own, newer = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    return newer.path if _release(own) < SOUND_PTXAS <= _release(newer) else None


def _release(tool: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in tool.version.split("."))


_DIGESTING: list[Thread] = []


@cache
def digest_ahead() -> None:
    """Begin, in a thread, what Triton does first when it looks for a kernel on disk: it reads and hashes all of its own files.

    That takes a third of a second, without Python's lock, in which others import and plan. `compiling` waits for it.
    """
    if INTERPRETED or VERSION is None:
        return
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # a release that calls it otherwise digests where it looks
        return
    _DIGESTING.append(Thread(target=triton_key, name="flashtile-digest", daemon=True))
    _DIGESTING[0].start()


def compiling(kind: str) -> Any:
    """A context in which Triton compiles for GPUs of this kind ("cuda", "hip") with `assembler`; one thread at a time.

    Kernels get no line numbers, unless TRITON_DISABLE_LINE_INFO says 0, and Python's collector waits until they are done.
    """
    return nullcontext() if INTERPRETED else _compiling(assembler() if kind == "cuda" else None)


class _Threads(ThreadPoolExecutor):
    """Builds each kernel's launcher, too, beside the kernel: some releases make it of C, a quarter of a second each.

    Front ends take turns: they are Python's, so two at a time only delay the one that was asked for first. Once a kernel turns
    out not to be on disk, `then` is called, in a thread, and may submit further ones, which nothing waits for before the end.
    """

    def __init__(self, threads: int | None, then: Callable[[_Threads], None] | None = None):
        super().__init__(threads)
        self.launchers, self.turn, self.then = ThreadPoolExecutor(), Lock(), then
        self.following: Future[None] | None = None

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        source = getclosurevars(fn).nonlocals["src"]  # what it compiles, private to Triton; 3.6 to 3.9 call it so
        make_ir = source.make_ir

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            with self.turn:
                made, then, self.then = make_ir(*args, **kwargs), self.then, None
            if then is not None:
                self.following = ThreadPoolExecutor.submit(self, then, self)
            return made

        source.make_ir = in_turn
        self.launchers.submit(_build_launcher, source)
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self.following is not None:
            self.following.exception()  # waits until it has submitted
        super().shutdown(wait, cancel_futures=cancel_futures)
        self.launchers.shutdown(wait, cancel_futures=cancel_futures)


def _build_launcher(source: Any) -> None:
    """Leave the launcher of a kernel on disk, where its first launch finds it: its text does not depend on the compiled code.

    A release whose launchers want more of it than this goes on without.
    """
    from triton.runtime import driver

    active: Any = driver.active
    descriptors = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in source.signature.values())
    sizes = dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"), 0)
    active.launcher_cls(
        source,
        SimpleNamespace(
            tensordesc_meta=[{}] * descriptors, warp_size=active.get_current_target().warp_size, num_ctas=1,
            launch_cooperative_grid=False, launch_pdl=False, **sizes,
        ),
    )  # fmt: skip


@contextmanager
def side_by_side(kind: str, threads: int | None = None, then: Callable[[_Threads], None] | None = None) -> Generator[None]:
    """As `compiling`: what kernels' `warmup` asks for inside is compiled in threads, and there at the end.

    threads: how many at most. then: submits what is to be compiled beside it, if any of it was not on disk. What fails is left
    to whoever launches it, who then hears why.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    with compiling(kind):
        if active_mode.get() is not None:  # a caller's own, which cannot be nested
            yield
            return
        with _Threads(threads, then) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield


@contextmanager
def _compiling(ptxas: str | None) -> Generator[None]:
    for thread in _DIGESTING:
        thread.join()
    with _COMPILING, _uncollected(), _keyed(), knobs.compilation.scope(), _assembling(ptxas) if ptxas else nullcontext():
        if "TRITON_DISABLE_LINE_INFO" not in os.environ:
            knobs.compilation.disable_line_info = True  # a first call takes 3 to 6 % less, a binary a quarter
        yield


@contextmanager
def _uncollected() -> Generator[None]:
    """What Triton's front end makes is collected afterwards: meanwhile, beside torch's objects, it is 4 to 17 % of a call."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _keyed() -> Generator[None]:
    """A kernel's key on disk is the same whatever else the process, or another thread, has looked for: KEY_BY_ORDER."""
    from triton.runtime.jit import DependenciesFinder

    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None:  # a later release
        yield
        return

    def with_known_key(self: Any, function: Any) -> None:
        getattr(function, "cache_key", None)  # makes it, and what it is made of
        update(self, function)

    DependenciesFinder._update_hash = with_known_key  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        DependenciesFinder._update_hash = update  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _assembling(ptxas: str) -> Generator[None]:
    from triton.backends.nvidia import compiler

    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = ptxas  # pyright: ignore[reportAttributeAccessIssue] (it takes paths)
        version = compiler.get_ptxas_version  # part of the disk cache's key, and remembered
        compiler.get_ptxas_version = cache(version.__wrapped__)
        try:
            yield
        finally:
            compiler.get_ptxas_version = version


__all__ = [
    "INTERPRETED", "PLAIN_INTEGERS", "VERSION", "JitTuple", "assembler", "compiling", "constexpr", "digest_ahead", "jit",
    "shared", "side_by_side", "tile_layout", "tl",
]  # fmt: skip
