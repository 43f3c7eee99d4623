"""A small transformer trained by mean flow, then by a gradient penalty: the losses beside those of plain attention.

    python examples/mean_flow.py [--steps 4] [--compile aot_eager]

Mean flow (arXiv 2505.13447) needs the model's tangent along (v, 0, 1), a gradient penalty the gradient of a gradient. Attention
and norms are flashtile's; beside it runs the same model with plain ones. --compile compiles the step of mean flow by that
backend of torch.compile ("inductor" wants a C++ compiler), in one graph. A penalty's step is not: PyTorch differentiates
no compiled backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

import flashtile
from flashtile import ops

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
WIDTH, HEADS, TOKENS = 32, 2, 16


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, attention: Attention, ours: bool):
        super().__init__()
        self.attention, self.ours = attention, ours
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight) if self.ours else nn.functional.rms_norm(x, (WIDTH,), weight, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x, self.first)).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        x = x + self.attention(q, k, v).flatten(2)
        return x + self.down(nn.functional.silu(self.up(self.norm(x, self.second))))


class Model(nn.Module):
    """The mean velocity between two times, of tokens at one of them."""

    def __init__(self, ours: bool):
        super().__init__()
        self.times = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block(flashtile.attention if ours else plain, ours) for _ in range(2))

    def forward(self, z: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        z = z + self.times(torch.stack((r, t), -1))[:, None]
        for block in self.blocks:
            z = block(z)
        return z


def mean_flow(model: Model, x: torch.Tensor, noise: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    v = noise - x
    z = x + t[:, None, None] * v
    dual: tuple[torch.Tensor, ...] = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    u, change = dual[0], dual[1]
    return (u - (v - (t - r)[:, None, None] * change).detach()).square().mean()


def penalty(model: Model, x: torch.Tensor, noise: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x, r, t).square().sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1.0).square().mean()


def train(ours: bool, steps: int, compiler: str | None) -> list[float]:
    torch.manual_seed(0)
    model, losses = Model(ours), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for loss_of in (torch.compile(mean_flow, backend=compiler, fullgraph=True) if compiler else mean_flow, penalty):
        for _ in range(steps):
            x, noise = torch.randn(2, 4, TOKENS, WIDTH).unbind()
            r, t = torch.rand(2, 4).sort(0).values.unbind()
            loss = loss_of(model, x, noise, r, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="of each loss")
    parser.add_argument("--compile", metavar="BACKEND", help="compile the step of mean flow")
    arguments = parser.parse_args()
    steps, compiler = arguments.steps, arguments.compile
    for i, (ours, theirs) in enumerate(zip(train(True, steps, compiler), train(False, steps, None), strict=True)):
        print(f"{'mean flow' if i < steps else 'penalty':9} flashtile {ours:.6f}  plain {theirs:.6f}")
        assert abs(ours - theirs) <= 1e-3 * max(abs(theirs), 1.0)


if __name__ == "__main__":
    main()
