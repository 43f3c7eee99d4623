"""Engines on two ranks: what they call, as they call it, beside one process.

device: a CPU, or this rank's GPU, where sequences are longer and float32 is less exact (`near`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import InvalidProblem, NotSupported
from flashtile.compat.sdpa import scaled_dot_product_attention
from flashtile.distributed import Context, attention, shard
from flashtile.integrations import megatron, torchtitan
from flashtile.torch.call.sharded import MODULE, over_ranks
from tests.distributed.cases import CU, STRETCH, WIDTHS, data


def near(device: Any, close: float = 1e-5) -> dict[str, float]:
    """How near results must be."""
    close = close if STRETCH == 1 else 1e-4
    return {"rtol": close, "atol": close}


def models_of_transformers_share_sequences(device: Any = "cpu") -> None:
    """Also two rows of packed sequences, which positions tell apart, past a sliding window; and within accelerate's context."""
    if find_spec("transformers") is None:
        return
    import transformers as hf

    from flashtile.integrations.transformers import register

    sizes: dict[str, Any] = dict(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=7, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    register()
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, attn_implementation="flashtile"))
    one = torch.arange(32)[None]
    packed = torch.cat([torch.arange(12), torch.arange(20)])[None]
    two = torch.cat([packed, torch.cat([torch.arange(25), torch.arange(7)])[None]])
    keep = torch.ones(2, 32, dtype=torch.long)
    keep[1, 29:] = 0
    laws: list[tuple[Any, torch.Tensor, dict[str, Any]]] = [
        ("zigzag", one, {}), ("zigzag", packed, {}), ("contiguous", two, {}), ("striped", two, {}),
        ("zigzag", one.expand(2, 32), {"attention_mask": keep}),
    ]  # fmt: skip
    weights = [p for p in model.parameters() if p.requires_grad]
    try:
        for layout, positions, named in laws:
            context = Context(layout=layout)
            ids = torch.randint(50, (len(positions), 32))
            made: list[Any] = []
            for given in (None, context):
                register(context=given)
                cut = (lambda t: t) if given is None else lambda t, c=given: shard(t, c)
                there = cut(named["attention_mask"] if named else torch.ones(len(positions), 32))
                logits = model(cut(ids), position_ids=cut(positions), **{n: cut(t) for n, t in named.items()}).logits
                logits = logits * there[..., None]
                made.append((logits, torch.autograd.grad(logits.square().sum(), weights)))
            (expected, truth), (logits, grads) = made
            torch.testing.assert_close(logits, shard(expected, context), **near(device))
            for mine, of_one in zip(grads, truth, strict=True):
                dist.all_reduce(mine)
                torch.testing.assert_close(mine, of_one, rtol=1e-4, atol=near(device)["atol"] * float(of_one.abs().max()))
        ids = torch.randint(50, (1, 16))
        with pytest.raises(InvalidProblem, match="position_ids begin at 0 on every rank"):
            model(ids)
        with pytest.raises(NotSupported, match="attention_mask, which says nothing of other ranks' shards"):
            model(ids, attention_mask=torch.ones(1, 1, 16, 16, dtype=torch.bool))
        register(context=Context(layout="zigzag"))
        dense = hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, "sliding_window": None}, attn_implementation="flashtile"))
        for layer in dense.model.layers:  # as accelerate does: `maybe_context_parallel` is this and torch's
            layer.self_attn.register_forward_pre_hook(
                lambda _, given, named: (given, {**named, "attention_mask": None, "is_causal": True}), with_kwargs=True
            )
        ids, at = torch.randint(50, (1, 32)), one.clone()
        register()
        with torch.no_grad():
            expected = dense(ids, position_ids=at).logits
        register(context=Context(layout="zigzag"))
        mesh, whole = init_device_mesh(torch.device(device).type, (dist.get_world_size(),)), ids.clone()
        with context_parallel(mesh, buffers=[ids, at], buffer_seq_dims=[1, 1]):
            logits = dense(ids, position_ids=at).logits
        assert torch.equal(ids, whole)
        torch.testing.assert_close(logits, shard(expected, Context(layout="zigzag")), **near(device))
    finally:
        register()


class Watching(TorchDispatchMode):
    """Somebody who sees operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def shards_of_torchs_context_parallel_are_not_taken_for_the_whole(device: Any = "cpu") -> None:
    """Calls by name are refused there, and told what is right there; so are DTensors in its balanced order."""
    d = data(torch.float32, 8).to(device)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    expected = flashtile.attention(d.q, d.k, d.v, causal=True)
    buffers = [t.transpose(1, 2).contiguous() for t in (d.q, d.k, d.v)]
    refused = pytest.raises(NotSupported, match=r"q, k and v are shards.*layout='zigzag'")
    compiled = torch.compile(lambda q, k, v: flashtile.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(d.q, d.k, d.v), expected)
    before, laid = F.scaled_dot_product_attention, [distribute_tensor(t, mesh, [Shard(1)]) for t in (d.q, d.k, d.v)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        shards = [t.transpose(1, 2) for t in buffers]
        calls: list[Callable[[], Any]] = [
            lambda: flashtile.attention(*shards, causal=True),
            lambda: flashtile.attention_qkvpacked(torch.stack([shards[0], shards[1], shards[1]], 2)),
            lambda: flashtile.attention_varlen(*(t[0] for t in shards), torch.tensor([0, 8], dtype=torch.int32)),
            lambda: flashtile.attention(*laid, causal=True),
        ]
        for call in calls:
            with refused:
                call()
        with refused:
            compiled(*shards)  # whose graph was made outside
        with over_ranks(), ThreadPoolExecutor(1) as another, refused:  # what one thread knows another does not
            another.submit(calls[0]).result()
        home = sys.modules[MODULE]
        names = {name: vars(home)[name] for name in ("_cp_options", "_replaced_functions", "custom_ops")}
        try:
            for name in names:  # a release that calls them otherwise
                delattr(home, name)
            with pytest.raises(NotSupported, match=r"q, k and v are shards.*the order in which torch balances"):
                flashtile.attention(shards[0], shards[1], shards[2], causal=True)
        finally:
            vars(home).update(names)
        out = attention(shards[0], shards[1], shards[2], context=Context(mesh, layout="zigzag"), causal=True)
        with Watching():
            watched = attention(shards[0], shards[1], shards[2], context=Context(mesh, layout="zigzag"), causal=True)
        torch.testing.assert_close(watched, out)
    compiled(d.q, d.k, d.v)
    torch.testing.assert_close(out, shard(expected, Context(layout="zigzag")), **near(device, 1e-6))
    with patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        flashtile.attention(d.q, d.k, d.v)  # another's function in torch's place is not torch's context
        ours = F.scaled_dot_product_attention
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), refused:
            F.scaled_dot_product_attention(buffers[0], buffers[1], buffers[2], is_causal=True)
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is before
    back = flashtile.attention(laid[0], laid[1], laid[2], causal=True)
    torch.testing.assert_close(back.full_tensor(), expected, **near(device, 1e-6))  # pyright: ignore[reportAttributeAccessIssue]


def a_kernel_of_torchtitan(device: Any = "cpu") -> None:
    """By the interface that its `use_cp_kernel` asks for: a class beside `VarlenAttention`, packed tokens, whole metadata."""

    class VarlenAttention(torch.nn.Module):
        @dataclass(kw_only=True, slots=True)
        class Config:
            window_size: tuple[int, int] = (-1, 0)

        def __init__(self, config: Any):
            super().__init__()
            self.window_size = config.window_size

    class ContextParallelKernel:
        cp_group = dist.group.WORLD

    common: dict[str, Any] = {
        name: ModuleType(name) for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common")
    }
    common["torchtitan.models.common.attention"] = SimpleNamespace(VarlenAttention=VarlenAttention)
    common["torchtitan.models.common.cp_attention"] = SimpleNamespace(ContextParallelKernel=ContextParallelKernel)
    with patch.dict(sys.modules, common):
        kernel = torchtitan.kernel()
    assert issubclass(kernel, ContextParallelKernel)
    assert issubclass(kernel.Config, VarlenAttention.Config)
    assert not kernel.Config.shard_attention_mask
    cu = CU.to(device)
    d, metadata = (
        data(torch.float32, 2).to(device),
        SimpleNamespace(cu_seq_q=cu, cu_seq_k=cu, max_q=17 * STRETCH, max_k=17 * STRETCH),
    )
    leaves = [t[0].detach().requires_grad_() for t in (d.q, d.k, d.v)]
    for window in ((-1, 0), (4, 0), (-1, -1)):
        left, right = (None if n < 0 else n for n in window)
        expected = flashtile.attention_varlen(leaves[0], leaves[1], leaves[2], cu, cu, window=(left, right), scale=0.3)
        truth = torch.autograd.grad(expected, leaves, d.dout[0])
        local = [shard(t.detach(), Context(), 0).requires_grad_() for t in leaves]
        out = kernel(kernel.Config(window_size=window))(*local, attention_masks=metadata, scale=0.3, enable_gqa=True)
        found = torch.autograd.grad(out, local, shard(d.dout[0], Context(), 0))
        for mine, of_one in zip((out, *found), (expected, *truth), strict=True):
            torch.testing.assert_close(mine, shard(of_one, Context(), 0), **near(device))
    with pytest.raises(NotSupported, match="the argument out_transform"):
        kernel(kernel.Config())(*local, attention_masks=metadata, out_transform=print)


def the_core_attention_of_megatron(device: Any = "cpu") -> None:
    """Built and called as a layer of Megatron's does: (seqlen, batch, heads, head_dim) in zigzag; and without ranks, packed."""
    d, causal = data(torch.float32, 2).to(device), SimpleNamespace(name="causal")
    groups = SimpleNamespace(cp=dist.group.WORLD, tp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(
        context_parallel_size=dist.get_world_size(), attention_dropout=0.0, window_size=(4, 0), window_attn_skip_freq=2,
        softmax_type="vanilla", apply_query_key_layer_scaling=False,
    )  # fmt: skip
    context, leaves = Context(layout="zigzag"), [t.clone().requires_grad_() for t in (d.q, d.k, d.v)]

    def layer(number: int, **named: Any) -> Any:
        given = {"attn_mask_type": causal, "attention_type": "self", "pg_collection": groups, **named}
        return megatron.DotProductAttention(config=config, layer_number=number, **given)

    for number, kind in ((1, "all_gather"), (2, "p2p"), (2, "a2a"), (1, None)):
        window = (4, 0) if number == 1 else None
        expected = flashtile.attention(leaves[0], leaves[1], leaves[2], causal=True, window=window, scale=0.3)
        truth = torch.autograd.grad(expected, leaves, d.dout)
        local = [shard(t.detach(), context).transpose(0, 1).contiguous().requires_grad_() for t in leaves]
        out = layer(number, cp_comm_type=kind, softmax_scale=0.3)(*local, None)
        assert out.shape == (*local[0].shape[:2], 8 * WIDTHS[1])
        found = torch.autograd.grad(out, local, shard(d.dout, context).transpose(0, 1).flatten(2))
        shards = [out.unflatten(2, (8, WIDTHS[1])), *found]
        for mine, of_one in zip(shards, (expected, *truth), strict=True):
            torch.testing.assert_close(mine.transpose(0, 1), shard(of_one, context), **near(device))
    cu = CU.to(device)
    packed = SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=17 * STRETCH, max_seqlen_kv=17 * STRETCH
    )
    with pytest.raises(NotSupported, match="packed_seq_params beside context parallelism"):
        layer(1)(*local, None, packed_seq_params=packed)
    for named, words in (({"cp_comm_type": "a2a+p2p"}, "cp_comm_type 'a2a"), ({"k_channels": 4}, "the argument k_channels")):
        with pytest.raises(NotSupported, match=words):
            layer(1, **named)
    with pytest.raises(NotSupported, match="a mask of type arbitrary"):
        layer(1)(*local, None, attn_mask_type=SimpleNamespace(name="arbitrary"))
    config.context_parallel_size = 1
    expected = flashtile.attention_varlen(d.q[0], d.k[0], d.v[0], cu, cu, causal=True, window=(4, 0))
    out = layer(1)(d.q[0], d.k[0], d.v[0], None, packed_seq_params=packed)
    torch.testing.assert_close(out, expected.flatten(1), **near(device, 1e-6))


ENGINES = (
    models_of_transformers_share_sequences, shards_of_torchs_context_parallel_are_not_taken_for_the_whole,
    a_kernel_of_torchtitan, the_core_attention_of_megatron,
)  # fmt: skip
