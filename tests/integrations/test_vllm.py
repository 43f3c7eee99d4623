"""vLLM's backend CUSTOM: found by its entry point, right on batches of whole items, and on those that read its cache."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from copy import copy
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtile import Alibi, InvalidProblem, NotSupported, Softcap
from flashtile.integrations import vllm as ours
from flashtile.reference.attention import attention_reference
from tests.integrations import vllm_stub as vllm

ROOT = Path(__file__).parent.parent.parent
LENGTHS = (5, 1, 9)
HEADS, HEADS_KV, HEAD_SIZE = 4, 2, 16


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm.install(monkeypatch)
    yield
    sys.modules.pop("flashtile.integrations.vllm_backend", None)  # its classes are the stub's


def backend() -> Any:
    ours.register()
    return vllm.AttentionBackendEnum.CUSTOM.get_class()


def builder() -> Any:
    return backend().get_builder_cls()(None, ["layer.0"], None, torch.device("cpu"))


def common() -> vllm.CommonAttentionMetadata:
    """Of three items, and tensors as long as a fourth would need; two blocks of 8 each."""
    starts = torch.tensor([0, *LENGTHS, 0]).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor([*LENGTHS, 0], dtype=torch.int32)
    table = torch.tensor([[3, -1], [0, -1], [5, 2], [-1, -1]], dtype=torch.int32)
    slots = [int(table[i, t // 8]) * 8 + t % 8 for i, n in enumerate(LENGTHS) for t in range(n)]
    return vllm.CommonAttentionMetadata(
        starts, starts.clone(), seq_lens, 3, sum(LENGTHS), max(LENGTHS), int(seq_lens.max()),
        table, torch.tensor(slots),
    )  # fmt: skip


def tensors(padded: int = 3) -> tuple[torch.Tensor, ...]:
    """q, k, v of all tokens, and of some that pad the batch, whose contents are NaN."""
    made = tuple(torch.randn(sum(LENGTHS) + padded, heads, HEAD_SIZE) for heads in (HEADS, HEADS_KV, HEADS_KV))
    for tensor in made:
        tensor[sum(LENGTHS) :] = torch.nan
    return made


def entry_point() -> EntryPoint:
    """As pyproject.toml declares it: what is installed may be older."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = declared["vllm.general_plugins"].items()
    return EntryPoint(name, value, "vllm.general_plugins")


def test_the_entry_point_offers_flashtile_as_custom() -> None:
    for _ in range(2):  # vLLM may call a plugin more than once
        entry_point().load()()
    cls = vllm.AttentionBackendEnum.CUSTOM.get_class()
    assert f"{cls.__module__}.{cls.__qualname__}" == ours.BACKEND
    assert vllm.AttentionBackendEnum[cls.get_name()] is vllm.AttentionBackendEnum.CUSTOM  # a layer asks by this name


def test_another_s_custom_stays() -> None:
    vllm.register_backend(vllm.AttentionBackendEnum.CUSTOM, "theirs.Backend")
    with pytest.warns(UserWarning, match=r"CUSTOM is theirs\.Backend; flashtile leaves it so"):
        ours.plug_in()
    assert vllm.AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend"


def test_a_vllm_without_such_a_name_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, ours.REGISTRY, None)
    with pytest.warns(UserWarning, match="no attention backend CUSTOM"):
        ours.plug_in()


def test_vllm_is_told_what_there_is() -> None:
    cls = backend()
    kinds = [kind for kind in vllm.AttentionType if cls.supports_attn_type(kind)]
    assert kinds == [vllm.AttentionType.DECODER, vllm.AttentionType.ENCODER_ONLY]
    assert [size for size in (0, 1, 80, 512, 513) if cls.supports_head_size(size)] == [1, 80, 512]
    assert cls.supports_dtype(torch.float32)
    assert (cls.supports_sink(), cls.supports_kv_connector(), cls.supports_sliding_window()) == (True, True, True)
    assert [cls.supports_kv_cache_dtype(name) for name in ("auto", "fp8", "int8_per_token_head")] == [True, True, False]
    assert not cls.forward_includes_kv_cache_update
    assert builder()._cudagraph_support is vllm.AttentionCGSupport.ALWAYS


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "softcap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "all": {"sliding_window": 3, "logits_soft_cap": 2.0, "alibi_slopes": [0.1, 0.2, 0.3, 0.4], "sinks": torch.ones(4)},
}


@pytest.mark.parametrize("kind", [vllm.AttentionType.DECODER, vllm.AttentionType.ENCODER_ONLY])
@pytest.mark.parametrize("case", CASES)
def test_whole_items_are_attended_to(case: str, kind: vllm.AttentionType) -> None:
    given, options = common(), CASES[case]
    encoder = kind is vllm.AttentionType.ENCODER_ONLY
    if encoder:  # what EncoderOnlyAttention's builder does before it calls ours
        given = copy(given)
        given.causal = False
    metadata = builder().build(0, given, False)
    impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3, HEADS_KV, attn_type=kind, **options)
    q, k, v = tensors()
    output = torch.full_like(q, torch.nan)
    cache = pool(6, 8, "NHD")
    impl.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
    assert impl.forward(None, q, k, v, cache, metadata, output) is output

    window, cap, slopes = (options.get(name) for name in ("sliding_window", "logits_soft_cap", "alibi_slopes"))
    score = (*([Softcap(cap)] if cap else []), *([Alibi(torch.tensor(slopes))] if slopes else []))
    reach = None if window is None else (window - 1, window - 1 if encoder else 0)
    ends = given.query_start_loc.tolist()
    for start, end in pairwise(ends[:4]):
        item = (t[None, start:end] for t in (q, k, v))
        expected, _ = attention_reference(
            *item, causal=not encoder, window=reach, score=score, scale=0.3, sink=options.get("sinks")
        )  # fmt: skip
        torch.testing.assert_close(output[start:end], expected[0].float(), rtol=2e-5, atol=2e-5)


def test_memory_is_measured_without_a_batch() -> None:
    impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3)
    q = torch.randn(3, HEADS, HEAD_SIZE)
    assert not impl.forward(None, q, q, q, torch.empty(0), None, torch.full_like(q, torch.nan)).any()


class Server:
    """Requests over one layer's cache, as vLLM's runner keeps them: pages of random order, a prefix that two share."""

    def __init__(self, layout: str, block: int = 4, **options: Any):
        self.block, self.cache, self.options = block, pool(40, block, layout), options
        self.impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3, HEADS_KV, **options)
        self.free = torch.randperm(39, generator=torch.Generator().manual_seed(0)).add(1).tolist()  # block 0 is nobody's
        self.blocks: list[list[int]] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def begin(self, like: int | None = None, rows: int = 0) -> int:
        """A new request; its first rows may be another's, whose blocks are full."""
        self.blocks.append([] if like is None else self.blocks[like][: rows // self.block])
        empty = torch.empty(0, HEADS_KV, HEAD_SIZE)
        self.keys.append(empty if like is None else self.keys[like][:rows])
        self.values.append(empty if like is None else self.values[like][:rows])
        return len(self.keys) - 1

    def step(self, batch: dict[int, int], padding: int = 0, causal: bool = True) -> None:
        """So many new tokens of each request in one call, each judged alone; padding: items and tokens that fill a graph."""
        starts = torch.tensor([0, *batch.values()]).cumsum(0, dtype=torch.int32)
        tokens, items = int(starts[-1]), len(batch)
        q, k, v = (torch.randn(tokens + padding, heads, HEAD_SIZE) for heads in (HEADS, HEADS_KV, HEADS_KV))
        slots: list[int] = []
        for (request, count), first in zip(batch.items(), starts.tolist(), strict=False):
            before = len(self.keys[request])
            self.keys[request] = torch.cat([self.keys[request], k[first : first + count]])
            self.values[request] = torch.cat([self.values[request], v[first : first + count]])
            while len(self.blocks[request]) * self.block < before + count:
                self.blocks[request].append(self.free.pop())
            slots += [
                self.blocks[request][t // self.block] * self.block + t % self.block for t in range(before, before + count)
            ]
        table = torch.zeros(items + padding, 12, dtype=torch.int32)
        for i, request in enumerate(batch):
            table[i, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        lengths = torch.tensor([*(len(self.keys[r]) for r in batch), *[0] * padding], dtype=torch.int32)
        starts = torch.cat([starts, starts[-1:].expand(padding)])
        given = vllm.CommonAttentionMetadata(
            starts, starts, lengths, items + padding, tokens + padding, max(batch.values()), 48, table,
            torch.tensor([*slots, *[-1] * padding]), causal,
        )  # fmt: skip
        metadata = builder().build(0, given)
        output = torch.full_like(q, torch.nan)
        with torch.inference_mode():
            self.impl.do_kv_cache_update(None, k, v, self.cache, metadata.slot_mapping)
            self.impl.forward(None, q, k, v, self.cache, metadata, output)
        window, cap, slopes = (self.options.get(name) for name in ("sliding_window", "logits_soft_cap", "alibi_slopes"))
        score = (*([Softcap(cap)] if cap else []), *([Alibi(torch.tensor(slopes))] if slopes else []))
        for (request, count), first in zip(batch.items(), starts.tolist(), strict=False):
            want, _ = attention_reference(
                q[None, first : first + count], self.keys[request][None], self.values[request][None], causal=causal,
                window=None if window is None else (window - 1, 0), score=score, scale=0.3, sink=self.options.get("sinks"),
            )  # fmt: skip
            torch.testing.assert_close(output[first : first + count], want[0].float(), rtol=2e-5, atol=2e-5)


def pool(blocks: int, size: int, layout: str) -> torch.Tensor:
    """A cache as vLLM's interface has it, in the memory order of a layout; NaN."""
    order = (blocks, size, HEADS_KV) if layout == "NHD" else (blocks, HEADS_KV, size)
    made = torch.full((*order, 2 * HEAD_SIZE), torch.nan)
    return made.transpose(1, 2) if layout == "NHD" else made


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", CASES)
def test_generation(case: str, layout: str) -> None:
    """Chunks of prompts beside requests that decode, a prefix in common, drafts to verify, batches padded for a graph."""
    server = Server(layout, **CASES[case])
    one, two = server.begin(), server.begin()
    server.step({one: 7})
    server.step({one: 6, two: 3})  # a prompt's second chunk beside another's first
    server.step({two: 1, one: 1}, padding=2)
    three = server.begin(like=one, rows=8)
    server.step({three: 5, one: 1, two: 1})
    server.step({one: 3, two: 3, three: 3})
    server.step({three: 1, two: 1, one: 1})


def test_a_decoder_that_is_not_causal() -> None:
    server = Server("NHD")
    request = server.begin()
    server.step({request: 5}, causal=False)
    server.step({request: 3}, causal=False)


def test_captures_and_other_groups_read_views() -> None:
    given = common()
    made = builder().build_for_cudagraph_capture(given)
    assert made.seq_lens.tolist() == given.seq_lens[:3].tolist() == [1, 1, 1]
    assert made.query_start_loc.data_ptr() == given.query_start_loc.data_ptr()
    table, slots = torch.ones(4, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    other = builder().update_block_table(made, table, slots)
    assert (other.block_table.data_ptr(), other.block_table.shape[0]) == (table.data_ptr(), 3)
    assert (other.slot_mapping, other.seq_lens) == (slots, made.seq_lens)


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_a_cache_in_fp8_is_bytes_times_the_layer_s_scales(kind: str) -> None:
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    metadata, (q, k, v) = builder().build(0, common(), False), tensors()
    made: list[torch.Tensor] = []
    for name in ("auto", kind):
        impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3, HEADS_KV, kv_cache_dtype=name)
        cache = torch.full_like(pool(6, 8, "NHD"), 0.0)
        if name != "auto":
            cache = torch.zeros(cache.shape, dtype=torch.uint8)
        impl.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)
        made.append(impl.forward(layer, q, k, v, cache, metadata, torch.zeros_like(q)))
    error = (made[0] - made[1]).abs().max() / made[0].abs().max()
    assert 0 < error < (0.1 if kind == "fp8" else 0.25)


def test_what_is_not_read_is_refused() -> None:
    mixed = common()
    mixed.causal = torch.tensor([True, False, True])
    with pytest.raises(NotSupported, match="causality differs between items"):
        builder().build(0, mixed)
    impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3, HEADS_KV)
    with pytest.raises(InvalidProblem, match=r"kv_cache has shape \(2, 6, 8, 2, 16\); it must be .* 32\)"):
        impl.forward(None, *tensors(), torch.zeros(2, 6, 8, 2, 16), builder().build(0, common()), tensors()[0])


def test_a_layer_that_needs_more_is_refused() -> None:
    make = backend().get_impl_cls()
    for kind in (vllm.AttentionType.ENCODER, vllm.AttentionType.ENCODER_DECODER):
        with pytest.raises(NotSupported, match=f"attn_type is {kind.value}; supported"):
            make(HEADS, HEAD_SIZE, 0.3, attn_type=kind)
    with pytest.raises(NotSupported, match="kv_cache_dtype is int8_per_token_head; it must be one of auto, float16"):
        make(HEADS, HEAD_SIZE, 0.3, kv_cache_dtype="int8_per_token_head")
    with pytest.raises(InvalidProblem, match=r"sinks has shape \(3,\)"):
        make(HEADS, HEAD_SIZE, 0.3, sinks=torch.zeros(3))
    q = torch.randn(3, HEADS, HEAD_SIZE)
    with pytest.raises(NotSupported, match="a quantised output"):
        make(HEADS, HEAD_SIZE, 0.3).forward(None, q, q, q, q, None, q, output_scale=torch.ones(1))


def test_nothing_is_registered_by_an_import() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend()
        vllm._registered.clear()
        sys.modules.pop("flashtile.integrations.vllm_backend")
        __import__("flashtile.integrations.vllm_backend")
    assert not vllm.AttentionBackendEnum.CUSTOM.is_overridden()
