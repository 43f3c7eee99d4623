"""What only a GPU can show: CUDA graphs, streams, no waiting on the host, offsets and grids past 32 and 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashtile
from flashtile import Options, Softcap, dispatch
from flashtile.problem.options import Variant
from flashtile.torch.execute import replay
from flashtile.torch.execute.bound import device_of
from flashtile.torch.execute.graph import LaunchGraph
from flashtile.torch.routes.eager import prepare
from tests.backends import OF_KERNELS, PLAIN


def _hoppers() -> list[tuple[str, Variant]]:
    """Hopper's backend with the backwards that it has on this machine."""
    if not torch.cuda.is_available():
        return []
    place, hopper = device_of(torch.device("cuda", torch.cuda.current_device())), dispatch.backend_named("hopper")
    variants: tuple[Variant, ...] = ("split", "fused")
    return [("hopper", variant) for variant in variants if not hopper.unsupported(PLAIN, place, variant)]


pytestmark = pytest.mark.gpu
PORTABLE = pytest.mark.parametrize(("backend", "variant"), OF_KERNELS)
EVERY = pytest.mark.parametrize(("backend", "variant"), [*OF_KERNELS, *_hoppers()])

Step = Callable[[], list[torch.Tensor]]


@pytest.fixture
def given(device: torch.device) -> list[torch.Tensor]:
    """q, k, v as leaves, and dout."""
    made = [torch.randn(2, 300, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    return [t.requires_grad_(i < 3) for i, t in enumerate(made)]


@pytest.fixture
def step(given: list[torch.Tensor], backend: str, variant: Variant) -> Step:
    """out, lse, dq, dk, dv of what `given` holds at the time."""
    q, k, v, dout = given

    def compute() -> list[torch.Tensor]:
        options = Options(backend=backend, backward=variant)
        out, lse = flashtile.attention(q, k, v, causal=True, window=(200, 0), return_lse=True, options=options)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, [q, k, v], dout)]

    return compute


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Every synchronisation of the host with the device is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def agree(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """Equal but for the order of the fused backward's sums."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the step, and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


@EVERY
def test_a_cuda_graph_replays_on_new_inputs(given: list[torch.Tensor], step: Step) -> None:
    graph, made = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for tensor in given:
                tensor.normal_()
        graph.replay()
        agree(made, step())


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_cuda_graph_that_appends_reads_new_lengths_and_tables(device: torch.device, backend: str | None) -> None:
    """Between replays items grow over borders of pages, one gets another page, and one is rolled back."""
    torch.manual_seed(0)
    dense = torch.randn(2, 3, 48, 2, 64, device=device, dtype=torch.bfloat16)  # keys and values of three items
    pools = torch.full((2, 10, 16, 2, 64), torch.nan, device=device, dtype=torch.bfloat16)
    table = torch.tensor([[4, 1, 7], [0, 8, 3], [6, 2, 5]], dtype=torch.int32, device=device)
    used = torch.tensor([5, 14, 30], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(3, 1, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for item, count in enumerate(used.tolist()):
        for row in range(count):
            pools[:, table[item, row // 16], row % 16] = dense[:, item, row]

    def step() -> torch.Tensor:
        options = Options(backend=backend)
        with torch.no_grad():
            return flashtile.attention_cached(
                q, pools[0], pools[1], table, seqused_k=used, append=(k, v), causal=True, options=options
            )

    graph, made = captured(step)
    for time in range(16):
        for tensor in (q, k, v):
            tensor.normal_()
        if time == 6:  # copied elsewhere, and poisoned where it was
            pools[:, 9] = pools[:, 0]
            pools[:, 0] = torch.nan
            table[1, 0] = 9
        if time == 9:
            used[0] -= 7
        graph.replay()
        for item, count in enumerate(used.tolist()):
            dense[:, item, count] = torch.stack([k[item, 0], v[item, 0]])
            keys, values = (one[item : item + 1, : count + 1].float().repeat_interleave(2, 2) for one in dense)
            p = torch.einsum("bqhd,bkhd->bhqk", q[item : item + 1].float(), keys).div(8).softmax(-1)
            torch.testing.assert_close(
                made[item : item + 1].float(), torch.einsum("bhqk,bkhd->bqhd", p, values), rtol=1e-2, atol=1e-2
            )
            held = pools[:, table[item].long()].flatten(1, 2)[:, : count + 1]
            assert torch.equal(held, dense[:, item, : count + 1])
        used += 1


@EVERY
@pytest.mark.usefixtures("_no_waiting")
def test_the_host_never_waits(step: Step) -> None:
    step()
    torch.cuda.set_sync_debug_mode("error")
    step()


@EVERY
@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeated_calls_agree_bit_for_bit(head_dim: int, device: torch.device, backend: str, variant: Variant) -> None:
    """What no order of sums may change: as once where a bias tile was overwritten while it was read."""
    torch.manual_seed(0)
    q, dout = (torch.randn(1, 333, 2, head_dim, device=device, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 128, 2, head_dim, device=device, dtype=torch.float16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    score = (flashtile.Bias(torch.randn(1, 2, 333, 128, device=device, dtype=torch.float16)),)

    def once() -> list[torch.Tensor]:
        out = flashtile.attention(q, k, v, score=score, options=Options(backend=backend, backward=variant))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]  # of one key tile dq, too, is one product

    runs = [once() for _ in range(200)]
    for run in runs:
        for one, other in zip(run, runs[0], strict=True):
            assert torch.equal(one, other)


@EVERY
def test_work_goes_to_the_current_stream(given: list[torch.Tensor], step: Step) -> None:
    """The inputs arrive late, on the side stream alone: whoever ran elsewhere would have read what was there before."""
    expected = step()
    late = [t.detach().clone() for t in given]
    with torch.no_grad():
        for tensor in given:
            tensor.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(50_000_000)
        for tensor, value in zip(given, late, strict=True):
            tensor.copy_(value)
    with torch.cuda.stream(side):
        made = step()
    side.synchronize()
    agree(made, expected)


@EVERY
def test_kernels_wait_for_what_comes_before_them(given: list[torch.Tensor], step: Step) -> None:
    """Those that begin early too: inputs are written just before a call, and written over just after it."""
    sources = [t.detach().clone() for t in given]

    def write(factor: float) -> None:
        with torch.no_grad():
            for tensor, source in zip(given, sources, strict=True):
                tensor.copy_(source).mul_(factor)

    expected: list[list[torch.Tensor]] = []
    for factor in (1.0, 0.5, 2.0):
        write(factor)
        torch.cuda.synchronize()
        expected.append(step())
        torch.cuda.synchronize()
    for _ in range(50):
        found: list[list[torch.Tensor]] = []
        for factor in (1.0, 0.5, 2.0):
            write(factor)
            found.append(step())
            write(float("nan"))
        for one, other in zip(found, expected, strict=True):
            agree(one, other)


@EVERY
def test_a_cuda_graph_waits_for_another_stream(given: list[torch.Tensor], step: Step) -> None:
    sources, side, branch = [t.detach().clone() for t in given], torch.cuda.Stream(), torch.cuda.Stream()
    expected = step()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        branch.wait_stream(side)
        with torch.cuda.stream(branch), torch.no_grad():
            for tensor, source in zip(given, sources, strict=True):
                tensor.copy_(source)
        side.wait_stream(branch)
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for tensor in given:
                tensor.fill_(float("nan"))
        graph.replay()
        agree(captured, expected)


@EVERY
def test_launches_on_the_same_memory_become_a_graph(
    given: list[torch.Tensor], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what is there when it is launched, and work behind it waits for it."""
    made: list[LaunchGraph] = []
    monkeypatch.setattr(replay, "LaunchGraph", lambda *given: made.append(LaunchGraph(*given)) or made[-1])
    sources, expected = [t.detach().clone() for t in given], dict[float, list[torch.Tensor]]()
    for _ in range(replay.MEETINGS):
        for factor in (1.0, 0.5, 2.0):
            with torch.no_grad():
                for tensor, source in zip(given, sources, strict=True):
                    tensor.copy_(source).mul_(factor)
            found = [t.clone() for t in step()]
            agree(found, expected.setdefault(factor, found))
    assert len(made) >= 2  # of a forward and a backward


@EVERY
def test_calls_without_an_lse_agree_with_those_that_return_it(device: torch.device, backend: str, variant: Variant) -> None:
    """Where nobody wants it some plans make none, once their kernels are compiled and again as a graph."""
    q, k, v = (torch.randn(2, 333, 2, 64, device=device, dtype=torch.float16) for _ in range(3))
    options = Options(backend=backend, backward=variant)
    expected, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, options=options)
    for _ in range(replay.MEETINGS + 3):
        assert torch.equal(flashtile.attention(q, k, v, causal=True, options=options), expected)
    assert torch.equal(flashtile.attention(q, k, v, causal=True, return_lse=True, options=options)[1], lse)


@EVERY
def test_a_capture_is_given_kernels_not_graphs(device: torch.device, backend: str, variant: Variant) -> None:
    q, k, v = (torch.randn(1, 200, 2, 64, device=device, dtype=torch.float16) for _ in range(3))
    options, side = Options(backend=backend, backward=variant), torch.cuda.Stream()
    call, _ = prepare(q, k, v, options=options)
    call.forward((q, k, v), ())
    assert call.bound_forward is not None
    tensors = call.bound_forward.run({"q": q, "k": k, "v": v})
    repeat = call.bound_forward.replay
    assert repeat is not None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(replay.MEETINGS + 1):
            repeat(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        repeat(tensors)
    q.normal_()
    graph.replay()
    torch.testing.assert_close(tensors["out"], flashtile.attention(q, k, v, options=options), rtol=0, atol=0)


@PORTABLE
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_inputs_with_offsets_past_32_bits(axis: int, device: torch.device, backend: str, variant: Variant) -> None:
    shape, sizes = (2, 192, 2, 64), [2, 192, 2, 64]
    strides = [192 * 2 * 64, 2 * 64, 64, 1]
    strides[axis] = -(-(2**31 + 4096) // (sizes[axis] - 1) // 64) * 64
    if axis == 1:  # rows far apart: batches and heads fit between them
        strides[0], strides[2] = 128, 64
    storage = torch.zeros(2**31 + 2**26, dtype=torch.bfloat16, device=device)
    results = []
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    for apart in range(5):  # none, then q, k, v, dout
        moved = [storage.as_strided(shape, strides).copy_(t) if i + 1 == apart else t for i, t in enumerate(plain)]
        q, k, v = (t.detach().requires_grad_() for t in moved[:3])
        options = Options(backend=backend, backward=variant)
        out = flashtile.attention(q, k, v, causal=True, score=(Softcap(9.0),), options=options)
        results.append([out.detach(), *torch.autograd.grad(out, [q, k, v], moved[3])])
    for result in results[1:]:
        agree(result, results[0])


@PORTABLE
def test_outputs_with_offsets_past_32_bits(device: torch.device, backend: str, variant: Variant) -> None:
    """Every query sees its own key alone: out is v, and each v gets a gradient of 1 from every head."""
    seqlen, heads, head_dim = 2**17, 96, 192
    q = torch.zeros(1, seqlen, heads, head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(1, seqlen, 1, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    assert q.numel() > 2**31
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = flashtile.attention(q, k, v, window=(0, 0), options=Options(backend=backend, backward=variant))
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, k, v])
    for head in (0, heads // 2, heads - 1):
        assert torch.equal(out[:, :, head], v[:, :, 0])
        assert dq[:, :, head].abs().max() < 1.0
    assert torch.equal(dv, torch.full_like(dv, heads))
    assert dk.isfinite().all()


@PORTABLE
@pytest.mark.parametrize(("batch", "seqlen"), [(70_000, 1), (1, 2**24)], ids=["batch", "tiles"])
def test_grids_past_16_bits(batch: int, seqlen: int, device: torch.device, backend: str, variant: Variant) -> None:
    q, k, v = (torch.randn(batch, seqlen, 1, 16, dtype=torch.float16, device=device, requires_grad=True) for _ in range(3))
    out = flashtile.attention(q, k, v, window=(0, 0), options=Options(backend=backend, backward=variant))
    (dv,) = torch.autograd.grad(out.sum(), [v])
    assert torch.equal(out, v)
    assert torch.equal(dv, torch.ones_like(dv))
