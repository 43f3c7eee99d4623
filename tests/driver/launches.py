"""Launches every kernel of a problem through the JIT, then directly, then all of a plan, and prints what the driver got.

See test_launch.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

# What torch would answer on a machine with one H100.
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # pyright: ignore[reportAttributeAccessIssue]
torch._C._cuda_getCurrentRawStream = lambda device: 0
torch.cuda.is_current_stream_capturing = lambda: False
torch._C._cuda_getDevice = lambda: 0  # pyright: ignore[reportAttributeAccessIssue]
active: Any = CudaDriver()
active.get_current_stream = lambda device: 0
driver.set_active(active)

from flashtile.kernels.portable.backend import BACKEND as TRITON  # noqa: E402
from flashtile.kernels.sm90.backend import BACKEND as HOPPER  # noqa: E402
from flashtile.plan.backend import Gradients  # noqa: E402
from flashtile.plan.call import KernelCall  # noqa: E402
from flashtile.plan.device import H100  # noqa: E402
from flashtile.problem.attention import AttentionProblem  # noqa: E402
from flashtile.torch.execute.bound import TORCH_DTYPES, Bound, KernelLaunch  # noqa: E402
from flashtile.torch.execute.replay import MEETINGS, addresses_of  # noqa: E402
from flashtile.triton_glue.compile import compile_call  # noqa: E402


class Address:
    """What a launch reads of a tensor."""

    def __init__(self, address: int):
        self.data_ptr = lambda: address


def bound_of(plan: Any) -> tuple[Bound, dict[str, torch.Tensor]]:
    """A plan bound to tensors of the CPU as if these were on the card, and the tensors."""
    inputs = {b.name: torch.empty(b.shape, dtype=TORCH_DTYPES[b.dtype]) for b in plan.named("input")}
    bound = Bound(plan, inputs, torch.device("cpu"))
    bound.device, bound.ahead = Card, False  # pyright: ignore
    for launch in bound.launches:
        launch.device = Card  # pyright: ignore
    return bound, inputs


def on_card() -> Any:
    """While it is entered, tensors asked for on the card are the CPU's."""
    return patch.object(
        torch, "empty_strided", lambda shape, strides, dtype, device: EMPTY_STRIDED(shape, strides, dtype=dtype)
    )


def replayed(plan: Any, file: Path) -> tuple[list[str], list[str], list[str]]:
    """What the driver gets from a plan's replay, from its graph, and from its launches one by one on the same addresses."""
    bound, inputs = bound_of(plan)
    with on_card():
        bound.run(dict(inputs))
        file.write_text("")
        bound.run(dict(inputs))
        replays = file.read_text().splitlines()
    assert bound.replay is not None
    (((_, *addresses), met),) = bound.replay.known.items()  # after the stream
    places = {name: Address(address) for name, address in zip(bound.replay.names, addresses, strict=False)}
    given = tuple(inputs.values())
    with on_card():
        outputs = bound.replay.direct(given, addresses_of(given), whole=False)
    assert [output is None for output in outputs] == [b.name in plan.optional for b in plan.named("output")]
    told = [*inputs.values(), *outputs]
    assert [*bound.replay.known][-1][1 : 1 + len(told)] == tuple(0 if t is None else t.data_ptr() for t in told)
    bound.replay.graphs_left = 1
    with patch.object(torch, "empty_strided", lambda *_, **__: Address(addresses[-1])):  # the scratch
        met.times = MEETINGS
        with patch.dict(os.environ, FAIL="cuGraphInstantiateWithFlags"), pytest.warns(RuntimeWarning, match="recorded driver"):
            bound.replay(places)  # pyright: ignore
        assert met.graph is None
        assert bound.replay.graphs_left == 0
        bound.replay.graphs_left = 1
        bound.replay(places)  # pyright: ignore
        assert met.graph is not None
        file.write_text("")
        bound.replay(places)  # pyright: ignore
        graphs = file.read_text().splitlines()
    ends = [0]
    for name, offset in bound.replay.offsets.items():
        assert offset >= ends[-1]
        assert offset % 256 == 0
        buffer = next(b for b in plan.buffers if b.name == name)
        ends.append(offset + torch.empty(buffer.shape, dtype=TORCH_DTYPES[buffer.dtype], device="meta").nbytes)
        places[name] = Address(addresses[-1] + offset)
    assert ends[-1] <= bound.replay.scratch_bytes
    file.write_text("")
    for launch in bound.launches:
        launch(places)  # pyright: ignore
    return replays, graphs, file.read_text().splitlines()


EMPTY_STRIDED = torch.empty_strided
EARLY = Path(os.environ["EARLY"])


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
        counts: list[int] = []
        for call in plan.calls:
            assert isinstance(call, KernelCall)
            ahead = compile_call(call, plan, H100)
            entry = ahead.asm["ptx"].split(".entry")[1].split(")")[0]
            counts.append(len(re.findall(r"\.param", entry)) - 2)  # two are Triton's own scratch
            os.environ["PARAMETERS"] = str(counts[-1])
            file.write_text("")
            launch = KernelLaunch(call, plan, {name: t.stride() for name, t in tensors.items()}, Card)  # pyright: ignore
            launch(tensors)  # through Triton's JIT
            direct = launch.compiled is not None
            known = direct and launch.compiled.hash == ahead.hash
            EARLY.write_text("")
            launch(tensors)
            launch(tensors)
            early = EARLY.read_text().split() == [ahead.metadata.name] * 2 * call.early
            print(plan.backend, call.kernel.fn.__name__, direct, known and early, file.read_text().splitlines(), sep="|")
        os.environ["PARAMETERS"] = str(min(counts))
        replays, graphs, launches = replayed(plan, file)
        print(plan.backend, "replay", replays, graphs, launches, sep="|")


if __name__ == "__main__":
    main()
