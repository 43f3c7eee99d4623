"""What a GPU alone can show of the companions: more than 2^31 elements, CUDA graphs, no synchronisation, many launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashtile import nn, ops
from tests.companions.cases import Case, mlp
from tests.companions.judge import plain, result

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def last_rows_agree(made: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(made[-len(exact) :].float(), exact.float(), rtol=3e-2, atol=3e-2)


def test_norm_of_more_than_2_to_the_31_elements() -> None:
    rows, hidden = 2**19 + 300, 4096
    x = torch.randn(rows, hidden, device="cuda", dtype=BF16).requires_grad_()
    weight = torch.ones(hidden, device="cuda", dtype=BF16, requires_grad=True)
    out = ops.rms_norm(x, weight)
    dout = torch.ones(1, 1, device="cuda", dtype=BF16).expand(rows, hidden)
    dx, dweight = torch.autograd.grad(out, (x, weight), dout)
    tail = x.detach()[-64:].float().requires_grad_()
    exact = F.rms_norm(tail, (hidden,), eps=1e-6)
    last_rows_agree(out, exact)
    last_rows_agree(dx, torch.autograd.grad(exact.sum(), tail)[0])
    expected = sum(F.rms_norm(part.float(), (hidden,), eps=1e-6).double().sum(0) for part in x.detach().split(2**16))
    assert ((dweight.double() - expected).norm() / expected.norm()) < 1e-2  # type: ignore[union-attr]


def test_cross_entropy_of_more_than_2_to_the_31_elements() -> None:
    rows, classes = 2**14 + 40, 131_072
    x = torch.randn(rows, classes, device="cuda", dtype=BF16).requires_grad_()
    labels = torch.randint(classes, (rows,), device="cuda")
    loss = ops.cross_entropy(x, labels, reduction="sum")
    (grad,) = torch.autograd.grad(loss, x)
    tail = x.detach()[-16:].float().requires_grad_()
    last_rows_agree(grad, torch.autograd.grad(F.cross_entropy(tail, labels[-16:], reduction="sum"), tail)[0])


def test_rotary_and_softmax_of_more_than_2_to_the_31_elements() -> None:
    q = torch.randn(2, 2**18 + 100, 32, 128, device="cuda", dtype=BF16)
    angle = torch.rand(q.shape[1], 64, device="cuda")
    out = ops.rotary(q, None, angle.cos(), angle.sin(), inplace=False)
    tail = q[1, -8:].float()
    c, s = (t[-8:, None] for t in (angle.cos(), angle.sin()))
    exact = torch.cat([tail[..., :64] * c - tail[..., 64:] * s, tail[..., :64] * s + tail[..., 64:] * c], -1)
    last_rows_agree(out[1], exact)
    del q, out
    x = torch.randn(1, 9, 16384, 16384, device="cuda", dtype=BF16)
    y = ops.softmax(x, causal=True)
    last_rows_agree(y[0, -1], x[0, -1, -4:].float().masked_fill(
        torch.ones(4, 16384, dtype=torch.bool, device="cuda").triu(16381), -torch.inf).softmax(-1))  # fmt: skip


def test_a_block_in_a_cuda_graph() -> None:
    """Captured, hence without a synchronisation; dropout draws anew in each replay."""
    norm = nn.LayerNorm(256, dropout_p=0.5, prenorm=True, device="cuda", dtype=BF16)
    mlp = nn.MLP(256, device="cuda", dtype=BF16)
    x, residual = (torch.randn(64, 256, device="cuda", dtype=BF16) for _ in range(2))
    labels = torch.randint(256, (64,), device="cuda")

    def step() -> Any:
        out, h = norm(x, residual)
        return ops.cross_entropy(mlp(out) + h, labels), h

    def train() -> Any:
        loss, h = step()
        loss.backward()
        return loss, h

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    norm.zero_grad(), mlp.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, h = train()
    graph.replay()
    first = h.clone()
    graph.replay()
    assert loss.isfinite()
    assert not torch.equal(first, h)


@pytest.mark.parametrize("logits_bytes", [None, 1056 * 2**20], ids=["default", "all logits stored"])
def test_linear_cross_entropy_stays_within_its_memory(logits_bytes: int | None) -> None:
    """The gradients, 1066 MiB, what logits may take, and of dx in float32, 128 MiB, what is left when dx is made of it."""
    x = (torch.randn(8192, 4096, device="cuda", dtype=BF16) * 0.1).requires_grad_()
    weight = (torch.randn(128256, 4096, device="cuda", dtype=BF16) * 0.02).requires_grad_()
    labels = torch.randint(128256, (8192,), device="cuda")
    torch.autograd.grad(ops.linear_cross_entropy(x[:64], weight[:512], labels[:64] % 512), x)  # cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = ops.linear_cross_entropy(x, weight, labels, logits_bytes=logits_bytes)
    torch.autograd.grad(loss, (x, weight))
    most = 1.2 * 2**30 if logits_bytes is None else 1200 * 2**20 + logits_bytes
    assert torch.cuda.max_memory_allocated() - before <= most


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("offset", [0, 8, 1], ids=["aligned", "16 bytes", "2 bytes"])
@pytest.mark.parametrize("sizes", [(300, 512, 1024, 256), (4104, 2048, 4096, 4096)], ids=["small", "large"])
def test_gelu_within_products(dtype: torch.dtype, offset: int, sizes: tuple[int, int, int, int]) -> None:
    """What cuBLASLt does on the way out of products, Hopper's own product in a large backward, and what PyTorch does where
    addresses keep it from that.
    """
    rows, width, hidden, back = sizes
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        drawn = torch.randn(size + offset, device="cuda", dtype=dtype, generator=generator)[offset:].view(shape)
        return (drawn * shape[-1] ** -0.5 if len(shape) == 2 else drawn).requires_grad_()

    x, dout = random(rows, width), random(rows, back).detach()
    weights = random(hidden, width), random(hidden), random(back, hidden), random(back)
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    true = F.linear(F.gelu(F.linear(*exact[:3]), approximate="tanh"), *exact[3:])
    plain = [t.detach().clone().requires_grad_() for t in (x, *weights)]
    usual = F.linear(F.gelu(F.linear(*plain[:3]), approximate="tanh"), *plain[3:])
    out = ops.mlp(x, *weights)
    found = out, *torch.autograd.grad(out, (x, *weights), dout)
    truth = true, *torch.autograd.grad(true, exact, dout.double())
    theirs = usual, *torch.autograd.grad(usual, plain, dout)
    for mine, other, right in zip(found, theirs, truth, strict=True):
        assert (mine.double() - right).norm() <= 1.5 * (other.double() - right).norm()


@pytest.mark.parametrize("layout", ["dense", "gaps", "transposed"])
@pytest.mark.parametrize("options", ["activation='relu'", "activation='relu';recompute=True"])
def test_fp32_gradients_of_weights_are_autograds(layout: Any, options: str) -> None:
    """Bit for bit: cuBLAS rounds dout^T x and (x^T dout)^T differently, and autograd chooses by how a weight lies."""
    case = Case(mlp(300, 200, 512, 72, "fp32", "weight1 bias1 weight2", options), layout)
    tensors = case.tensors(torch.device("cuda"))
    made, theirs = result(case, tensors, "triton"), plain(case, tensors)
    for name in ("dweight1", "dweight2"):
        assert torch.equal(made[name], theirs[name]), name
