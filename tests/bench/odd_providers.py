"""Providers that misbehave, one way each; given to the benchmark as `--also`."""

import os
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from flashtile.bench.providers import Provider
from flashtile.errors import NotSupported


def right(q, k, v):
    return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True).transpose(1, 2)


def elsewhere(q, k, v):
    """Wrong only in a head that the float64 answer does not cover."""
    out = right(q, k, v).clone()
    out[0, :, -1] = float("nan")
    return out


def unwritten(q, k, v):
    return torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k):
        return k.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class _Dying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        os.abort()


def unsupported(q, k, v):
    raise NotSupported("it", {"odd": ["not this one"]})


def made(name, attend, **rest):
    return Provider(f"odd/{name}", lambda problem, device: attend, **rest)


PROVIDERS = (
    made("right", right),
    made("wrong", lambda q, k, v: right(q, k, v) * 1.01),
    made("gradient", lambda q, k, v: right(q, _HalfGradient.apply(k), v)),
    made("nan", lambda q, k, v: right(q, k, v) * float("nan")),
    made("elsewhere", elsewhere),
    made("unwritten", unwritten),
    made("refuses", right, refuse=lambda problem, device: "only on Sundays"),
    made("raises", lambda q, k, v: {}["q"]),
    made("unsupported", unsupported),
    made("dies", lambda q, k, v: _Dying.apply(right(q, k, v))),
    made("hangs", lambda q, k, v: time.sleep(60)),
)
