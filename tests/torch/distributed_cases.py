"""What two processes check together; `python -m tests.torch.distributed_cases RANK FILE`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashtile
from flashtile import Alibi, Dropout, KeyPadding, NotSupported, Softcap
from flashtile.nn import Attention


def leaves() -> list[torch.Tensor]:
    """q, k, v, slopes, sink: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 12, 4, 16), (2, 18, 2, 16), (2, 18, 2, 16), (4,), (4,))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def step(given: list[Any], **arguments: Any) -> list[torch.Tensor]:
    """out, lse and the gradients of all, as whole tensors."""
    q, k, v, slopes, sink = given
    keep = torch.arange(36).view(2, 18) % 5 != 2
    out, lse = flashtile.attention(
        q, k, v, causal=True, mask=KeyPadding(keep), score=(Softcap(4.0), Alibi(slopes)), sink=sink, return_lse=True,
        **arguments,
    )  # fmt: skip
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in (out, lse)]
    if hasattr(out, "placements"):
        weights = [distribute_tensor(w, t.device_mesh, t.placements) for w, t in zip(weights, (out, lse), strict=True)]
    loss = (out * weights[0]).sum() + (lse * weights[1]).sum()
    made = [out, lse, *torch.autograd.grad(loss, given)]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in made]  # pyright: ignore


def check_dtensor(mesh: Any) -> None:
    expected = step(leaves())
    for placement in (Shard(0), Shard(2), Replicate()):
        given: list[Any] = leaves()
        for i in range(3):
            laid = Shard(0) if (i, placement) == (1, Shard(2)) else placement  # k comes laid otherwise
            given[i] = distribute_tensor(given[i].detach(), mesh, [laid]).requires_grad_()
        for a, b in zip(step(given), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for refused, arguments in ((Shard(1), {}), (Shard(0), {"dropout": Dropout(0.5)})):
        laid = [distribute_tensor(t.detach(), mesh, [refused]) for t in leaves()[:3]]
        with pytest.raises(NotSupported, match="attention of DTensors"):
            step([*laid, *leaves()[3:]], **arguments)


def check_packed(mesh: Any) -> None:
    qkv = torch.randn(2, 10, 3, 4, 16, generator=torch.Generator().manual_seed(1))
    expected = flashtile.attention_qkvpacked(qkv, causal=True)
    for placement in (Shard(0), Shard(3)):
        got = flashtile.attention_qkvpacked(distribute_tensor(qkv, mesh, [placement]), causal=True)
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def check_fsdp(mesh: Any, rank: int) -> None:
    torch.manual_seed(0)
    plain = Attention(32, 4, 2, qk_norm=True, sinks=True, causal=True)
    sharded = Attention(32, 4, 2, qk_norm=True, sinks=True, causal=True)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(4, 9, 32)
    plain(x).square().mean().backward()
    sharded(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for (name, a), b in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        grad: Any = a.grad
        torch.testing.assert_close(grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    check_dtensor(mesh)
    check_packed(mesh)
    check_fsdp(mesh, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
