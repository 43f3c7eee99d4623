"""The measuring process: owns the device, holds one case at a time, and answers one request per line of JSON."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashtile.bench import timing
from flashtile.bench.cases import Direction
from flashtile.bench.machine import facts
from flashtile.bench.providers import Provider, first_line, providers, refusal
from flashtile.bench.yardstick import Yardstick, tolerance
from flashtile.problem.attention import AttentionProblem
from flashtile.torch.execute.bound import TORCH_DTYPES

Reply = dict[str, Any]


class DeviceLostError(RuntimeError):
    """The device answers nothing any more; only a new process gets it back."""


class Run:
    """One provider on one case: its function, its views of the tensors, its kept graph."""

    def __init__(self, provider: Provider, problem: AttentionProblem, inputs: dict[str, torch.Tensor], device: torch.device):
        self.provider = provider
        self.attend = provider.make(problem, device)
        self.given = tuple(self.turn(inputs[name]) for name in "qkv")
        self.dout = self.turn(inputs["dout"])
        self.leaves: tuple[torch.Tensor, ...] = ()
        self.out: torch.Tensor | None = None
        self.ms: dict[Direction, float] = {}  # only of what was found right

    def turn(self, tensor: torch.Tensor) -> torch.Tensor:
        """(b, s, h, d) to what the provider takes, and back."""
        return tensor.transpose(1, 2) if self.provider.heads_first else tensor

    def forward(self) -> torch.Tensor:
        """The output, without a graph."""
        return self.attend(*self.given)

    def keep_graph(self) -> torch.Tensor:
        """The output of a forward whose graph `backward` walks again and again."""
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in self.given)
        self.out = self.attend(*self.leaves)
        return self.out

    def backward(self) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv: the backward alone."""
        assert self.out is not None
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def step(self) -> tuple[torch.Tensor, ...]:
        """Forward and backward, as in training."""
        return torch.autograd.grad(self.attend(*self.leaves), self.leaves, self.dout)


class Session:
    """The state behind the requests. `burst` and `host` serve only what `prepare` found right."""

    def __init__(self, also: Path | None):
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.providers = providers(self.device, also)
        self.problem: AttentionProblem | None = None
        self.inputs: dict[str, torch.Tensor] = {}
        self.yardstick: Yardstick | None = None
        self.runs: dict[str, Run] = {}

    def answer(self, verb: str, arguments: Reply) -> Reply:
        """The reply to one request."""
        verbs: dict[str, Callable[..., Reply]] = {
            "hello": self.hello, "open": self.open, "compile": self.compile, "prepare": self.prepare,
            "burst": self.burst, "host": self.host, "close": self.close,
        }  # fmt: skip
        return verbs[verb](**arguments)

    def hello(self) -> Reply:
        """The machine, and the providers that can be asked for."""
        import flashtile

        compiling = [name for name, provider in self.providers.items() if provider.compiles]
        return {
            "facts": facts(self.device), "kind": self.device.type, "library": str(Path(flashtile.__file__).parents[1]),
            "providers": list(self.providers), "compiling": compiling,
        }  # fmt: skip

    def open(self, spelling: str, backward: bool, check: bool = True) -> Reply:
        """Make the tensors of a case, random and fresh, and their exact answer."""
        self.close()
        self.problem = problem = AttentionProblem.parse(spelling)
        q = (problem.batch, problem.seqlen_q, problem.heads_q)
        kv = (problem.batch, problem.seqlen_k, problem.heads_kv)
        d, dv = problem.head_dim, problem.head_dim_v
        shapes = {"q": (*q, d), "k": (*kv, d), "v": (*kv, dv), "dout": (*q, dv)}
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(spelling.encode()))
        dtype = TORCH_DTYPES[problem.dtype.value]
        for name, shape in shapes.items():
            self.inputs[name] = torch.randn(shape, generator=generator, dtype=dtype, device=self.device)
        if check:
            self.yardstick = Yardstick(problem, self.inputs, backward)
        self._release()
        return {}

    def compile(self, spelling: str, backward: bool, names: list[str]) -> Reply:
        """Run providers once, for the sake of what that leaves in the compilers' caches on disk."""
        self.open(spelling, backward, check=False)
        for name in names:
            provider = self.providers[name]
            assert self.problem is not None
            if provider.refuse(self.problem, self.device) is not None:
                continue
            try:
                with provider.context():
                    run = Run(provider, self.problem, self.inputs, self.device)
                    run.forward()
                    if backward:
                        run.keep_graph()
                        run.backward()
            except Exception as error:  # told when the provider is prepared for timing
                self._survive(error)
        return self.close()

    def prepare(self, name: str, direction: Direction) -> Reply:
        """Compute once and compare; status "ok" also gives a first guess of the milliseconds."""
        provider = self.providers[name]
        assert self.problem is not None
        reason = provider.refuse(self.problem, self.device)
        if reason is not None:
            return {"status": "refused", "reason": reason}
        try:
            with provider.context():
                run = self.runs.get(name)
                if run is None:
                    run = self.runs[name] = Run(provider, self.problem, self.inputs, self.device)
                error, wrong = self._check(run, direction)
                if wrong:
                    return {"status": "wrong", "reason": wrong, "error": error}
                call = run.forward if direction == "forward" else run.backward
                run.ms[direction] = timing.burst_ms(call, 1, self.device, idle_s=0)
                return {"status": "ok", "error": error, "ms": run.ms[direction]}
        except Exception as error:
            self._survive(error)
            reason = refusal(error)
            failure = f"{type(error).__name__}: {first_line(error)}"
            return {"status": "failed", "reason": failure} if reason is None else {"status": "refused", "reason": reason}

    def burst(self, name: str, direction: Direction) -> Reply:
        """Milliseconds per call."""
        run = self.runs[name]
        calls = timing.calls_for(run.ms[direction], self.device)
        with run.provider.context():
            call = run.forward if direction == "forward" else run.backward
            return {"ms": timing.burst_ms(call, calls, self.device)}

    def host(self, name: str, direction: Direction) -> Reply:
        """Host time of a forward call, or, for "backward", of forward and backward together."""
        run = self.runs[name]
        with run.provider.context():
            if direction == "forward":
                return {"us": timing.host_us(run.forward, run.ms["forward"])}
            return {"us": timing.host_us(run.step, run.ms["backward"] * 1.4)}

    def close(self) -> Reply:
        """Forget the case and give its memory back."""
        self.problem, self.yardstick, self.inputs, self.runs = None, None, {}, {}
        self._release()
        return {}

    def _check(self, run: Run, direction: Direction) -> tuple[float, str]:
        """The error to report, and why the result is wrong ("" if it is right)."""
        assert self.problem is not None
        assert self.yardstick is not None
        limit_out, limit_grad = tolerance(self.problem)
        self._poison()
        if direction == "forward":
            results, limits = {"out": run.forward()}, {"out": limit_out}
        else:
            out = run.keep_graph()
            grads = dict(zip(("dq", "dk", "dv"), run.backward(), strict=True))
            results, limits = {"out": out.detach(), **grads}, {"out": limit_out, **dict.fromkeys(grads, limit_grad)}
        errors = {name: self.yardstick.error(name, run.turn(result)) for name, result in results.items()}
        wrong = [f"{name} is off by {e:.1e}, limit {limits[name]:.0e}" for name, e in errors.items() if not e <= limits[name]]
        told = [e for name, e in errors.items() if direction == "forward" or name != "out"]
        return math.nan if any(map(math.isnan, told)) else max(told), "; ".join(wrong)

    def _poison(self) -> None:
        """Leave NaN in the memory that the next allocations are likely to get: what is not written shows."""
        held = [torch.full_like(t, math.nan, dtype=dtype) for t in self.inputs.values() for dtype in {t.dtype, torch.float32}]
        held += [torch.full_like(t, math.nan) for t in self.inputs.values()]
        del held

    def _survive(self, error: Exception) -> None:
        """Go on after an exception, or raise DeviceLostError if the device has died of it."""
        error.__traceback__ = None  # its frames hold tensors
        self._release()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception as dead:
                raise DeviceLostError(first_line(error)) from dead

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            try:
                torch.cuda.empty_cache()
            except Exception as dead:
                raise DeviceLostError(first_line(dead)) from dead


def serve(also: Path | None) -> None:
    """Answer requests from standard input until it ends; whatever else prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session = Session(also)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            reply = session.answer(verb, arguments)
        except Exception as error:  # only this process ends; the parent names the provider it was serving
            channel.write(json.dumps({"lost": f"{type(error).__name__}: {first_line(error)}"}) + "\n")
            raise
        channel.write(json.dumps(reply) + "\n")
