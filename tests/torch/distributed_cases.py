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
from flashtile import Alibi, Band, Dilated, Dropout, InvalidProblem, KeyPadding, NotSupported, Softcap, TopLeft, ops
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
    q, k, v, slopes, _ = leaves()  # one item: the second rank has none
    score, one = (Alibi(slopes),), [t.detach()[:1] for t in (q, k, v)]
    laid = [distribute_tensor(t, mesh, [Shard(0)]) for t in one]
    torch.testing.assert_close(flashtile.attention(*laid, score=score).full_tensor(), flashtile.attention(*one, score=score))
    with pytest.raises(NotSupported, match="all are laid as that one is"):
        flashtile.attention(one[0], *laid[1:])
    with pytest.raises(NotSupported, match="seqused is a mask with holes"):
        flashtile.attention(*laid, seqused_k=torch.ones(1, 18, dtype=torch.bool))
    for refused, arguments in ((Shard(1), {}), (Shard(0), {"dropout": Dropout(0.5)})):
        laid = [distribute_tensor(t.detach(), mesh, [refused]) for t in leaves()[:3]]
        with pytest.raises(NotSupported, match="attention of DTensors"):
            step([*laid, *leaves()[3:]], **arguments)


def check_shared_keys(mesh: Any) -> None:
    """Queries sharded over heads, beside one head of keys and values; and masks that go by positions alone."""
    q, k, v, slopes, sink = leaves()
    whole: list[Any] = [q, *(t[:, :, :1].detach().requires_grad_() for t in (k, v)), slopes, sink]
    expected = step(whole)
    for keys in (Replicate(), Shard(0)):
        placed = zip(whole[:3], (Shard(2), keys, keys), strict=True)
        given = [distribute_tensor(t.detach(), mesh, [laid]).requires_grad_() for t, laid in placed]
        for a, b in zip(step([*given, slopes, sink]), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    laid = [distribute_tensor(t.detach(), mesh, [Shard(2)]) for t in (q, k, v)]
    for mask in (TopLeft(), Dilated(2) | Band(1, 1)):
        got = flashtile.attention(*laid, mask=mask).full_tensor()
        torch.testing.assert_close(got, flashtile.attention(q, k, v, mask=mask))
    with pytest.raises(InvalidProblem, match="v has heads 1 and k has 2"):
        flashtile.attention(laid[0], laid[1], v[:, :, :1].detach())


def check_companions(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    with pytest.raises(NotSupported, match="an op on x, a DTensor"):
        ops.rms_norm(x)


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


class _Pass(torch.autograd.Function):
    """A tensor of the rank before; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _exchanged(tensor, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(grad, -1)


def _exchanged(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """What the rank `step` before this one has, which gets ours of the one after."""
    rank, ranks, got = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor).contiguous()
    sends = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + step) % ranks),
        dist.P2POp(dist.irecv, got, (rank - step) % ranks),
    ]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    return got


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's queries and all keys, which pass by; partial results are merged by their lse."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.full_like(q[..., 0].mT, -torch.inf)
    for passed in range(ranks):
        home = (rank - passed) % ranks  # whose keys these are; of a later rank a causal query sees none: out 0, lse -inf
        band = Band(right=(rank - home) * q.shape[1] if causal else None)
        part, part_lse = flashtile.attention(q, k, v, mask=band, score=(Softcap(4.0),), return_lse=True)
        merged = torch.logaddexp(lse, part_lse)
        out = out * (lse - merged).exp().mT[..., None] + part * (part_lse - merged).exp().mT[..., None]
        lse = merged
        if passed < ranks - 1:
            k, v = _Pass.apply(k), _Pass.apply(v)  # pyright: ignore[reportAssignmentType]
    return out, lse


def check_ring(rank: int, causal: bool) -> None:
    """Exact to 5e-7 of the largest number, gradients too, which flow through the lse of every part."""
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(2, 24, heads, 16, generator=generator).double().requires_grad_() for heads in (4, 2, 2)]
    mine = [t.detach().float().chunk(2, 1)[rank].clone().requires_grad_() for t in whole]
    q, k, v = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in whole)
    scores = 4 * ((q @ k.mT) / 16).tanh()  # a softcap of 4, of scores / sqrt(16)
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
    expected = ((scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1))
    weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).view(t.shape) for t in expected]
    sums = [t * w for t, w in zip(expected, weights, strict=True)]
    exact = [*expected, *torch.autograd.grad(sums[0].sum() + sums[1].sum(), whole)]
    got = ring(*mine, causal)
    parts = [w.chunk(2, axis)[rank].float() for w, axis in zip(weights, (1, 2), strict=True)]
    loss = (got[0] * parts[0]).sum() + (got[1] * parts[1]).sum()
    for axis, a, b in zip((1, 2, 1, 1, 1), (*got, *torch.autograd.grad(loss, mine)), exact, strict=True):
        part = b.chunk(2, axis)[rank]
        torch.testing.assert_close(a.double(), part, rtol=0, atol=5e-7 * b.abs().max().item())


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    check_dtensor(mesh)
    check_packed(mesh)
    check_shared_keys(mesh)
    check_companions(mesh)
    check_fsdp(mesh, rank)
    for causal in (False, True):
        check_ring(rank, causal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
