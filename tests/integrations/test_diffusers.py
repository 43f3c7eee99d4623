"""diffusers' models with the attention backend "flashtile", beside its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"

from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend, dispatch_attention_fn

from flashtile import InvalidProblem, NotSupported, Options
from flashtile.integrations import diffusers as ours


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """flashtile is registered, on the CPU backend; the list tells how often it ran."""
    ran: list[Any] = []
    original = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *given, **named: (ran.append(named), original(*given, **named))[1])
    ours.register(options=Options(backend="cpu"))
    before = _AttentionBackendRegistry.get_active_backend()[0]
    yield ran
    _AttentionBackendRegistry.set_active_backend(before)  # set_attention_backend makes its own everybody's


def flux() -> tuple[Any, dict[str, Any]]:
    """A tiny model whose weights are large enough for mistakes to show, and its inputs."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(16.0)[:, None] * torch.tensor([0.0, 1.0, 0.5])
    given = dict(
        hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 8, 32), timestep=torch.tensor([1.0]),
        pooled_projections=torch.randn(1, 32), img_ids=ids, txt_ids=torch.zeros(8, 3), return_dict=False,
    )  # fmt: skip
    return model, given


def step(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    (out,) = model(**given)
    loss = (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum()
    return [out, *torch.autograd.grad(loss, list(model.parameters()))]


def test_flux_gives_the_same_sample_and_gradients(calls: list[Any]) -> None:
    model, given = flux()
    expected = step(model, given)
    assert not calls
    model.set_attention_backend("flashtile")
    got = step(model, given)
    assert len(calls) == 2  # a block of two streams, and one of one
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
    model.set_attention_backend("native")
    step(model, given)
    assert len(calls) == 2


CALLS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.9},
    "keys": {"attn_mask": torch.arange(24).view(2, 12) % 5 != 1},
    "keys-4d": {"attn_mask": (torch.arange(24).view(2, 12) % 5 != 1)[:, None, None]},
    "all": {"attn_mask": torch.ones(9, 12, dtype=torch.bool).tril(4)[None, None]},
    "added": {"attn_mask": torch.linspace(-2, 2, 9 * 12).view(1, 1, 9, 12)},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_means_what_it_does_to_diffusers(calls: list[Any], name: str) -> None:
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((9, 4), (12, 2), (12, 2)))
    made = []
    for backend in ("native", "flashtile"):
        with attention_backend(backend):
            made.append(dispatch_attention_fn(q, k, v, enable_gqa=True, **CALLS[name]))
    assert len(calls) == 1
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)
    assert (made[1] - dispatch_attention_fn(q, k, v, enable_gqa=True)).abs().max() > (-1.0 if name == "plain" else 1e-2)


def test_one_graph_under_compile(calls: list[Any]) -> None:
    q = torch.randn(2, 9, 4, 16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: dispatch_attention_fn(q, q, q), backend="aot_eager", fullgraph=True)
    with attention_backend("flashtile"):
        torch.testing.assert_close(compiled(q), dispatch_attention_fn(q, q, q))
    assert len(calls) == 2


@pytest.mark.usefixtures("calls")
def test_theirs_are_the_names_of_degrees_and_meshes() -> None:
    """tests/distributed/volumes.py computes with a stand-in of these names, on four ranks."""
    read = {"ring_degree", "ulysses_degree", "ulysses_anything", "ring_anything", "_mesh", "_ring_mesh", "_ulysses_mesh"}
    assert {field.name for field in fields(ContextParallelConfig)} >= read
    assert ContextParallelConfig(ring_degree=2).mesh_dim_names == ("ring", "ulysses")
    assert "context_parallel_config" in {field.name for field in fields(ParallelConfig)}
    registry = dispatch._AttentionBackendRegistry
    assert registry._is_context_parallel_available(dispatch.AttentionBackendName("flashtile"))


def test_what_it_cannot_do_raises(calls: list[Any]) -> None:
    q, k = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16)
    with pytest.raises(NotSupported, match="return_lse is asked for"):
        ours.attention_forward(q, q, q, return_lse=True)
    anything = ContextParallelConfig(ulysses_degree=2, ulysses_anything=True)
    with pytest.raises(NotSupported, match="ulysses_anything or ring_anything is asked for"):
        ours.attention_forward(q, q, q, _parallel_config=SimpleNamespace(context_parallel_config=anything))
    with pytest.raises(InvalidProblem, match="key has 2 heads and query 4"):
        ours.attention_forward(q, k, k)
    with pytest.raises(InvalidProblem, match="it must be one of them"):
        ours.attention_forward(q, q, q, torch.ones(9, 9, dtype=torch.bool), is_causal=True)
    with pytest.raises(InvalidProblem, match="lower case"):
        ours.register("Flashtile")
    assert not calls


def test_a_unet_is_reached_by_override_alone(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion's processors call SDPA themselves: docs/pytorch.md says what to do, for nothing else tells a caller."""
    from diffusers import UNet2DConditionModel

    from flashtile.compat import sdpa

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8,
    )  # fmt: skip
    given = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 77, 32)
    expected = model(*given).sample
    model.set_attention_backend("flashtile")
    assert torch.equal(model(*given).sample, expected)
    assert not calls
    keys: list[int] = []
    original = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", lambda q, k, v, **named: (keys.append(k.shape[1]), original(q, k, v, **named))[1])
    with sdpa.Override():
        torch.testing.assert_close(model(*given).sample, expected)
    for reached, place in ((True, sdpa.Override()), (False, nullcontext())):  # what docs/answers/models.md looks for
        with place, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(*given)
        assert ("aten::scaled_dot_product_attention" in {event.key for event in profile.key_averages()}) != reached
    layers = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    assert keys.count(77) == 2 * layers.count("attn2") > 0  # two calls within Override
    assert len(keys) == 2 * (layers.count("attn1") + layers.count("attn2"))
