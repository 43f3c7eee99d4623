"""vLLM's backend CUSTOM: found by its entry point, right on batches of whole items, and a refusal where a cache is read."""

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


def config(runner: str = "pooling", chunked: bool = False, cached: bool = False) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(runner_type=runner),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=cached),
    )


def backend() -> Any:
    ours.register()
    return vllm.AttentionBackendEnum.CUSTOM.get_class()


def builder(given: Any = None) -> Any:
    return backend().get_builder_cls()(None, ["layer.0"], given or config(), torch.device("cpu"))


def common(cached: tuple[int, ...] = (0, 0, 0), upper_bound: bool = True) -> vllm.CommonAttentionMetadata:
    """Of three items, and tensors as long as a fourth would need."""
    starts = torch.tensor([0, *LENGTHS, 0]).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor([*(n + c for n, c in zip(LENGTHS, cached, strict=True)), 0], dtype=torch.int32)
    return vllm.CommonAttentionMetadata(
        starts, starts.clone(), seq_lens, 3, sum(LENGTHS), max(LENGTHS), int(seq_lens.max()),
        torch.zeros(4, 2, dtype=torch.int32), torch.zeros(sum(LENGTHS), dtype=torch.int64),
        seq_lens_cpu_upper_bound=seq_lens.clone() if upper_bound else None,
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
    assert (cls.supports_sink(), cls.supports_kv_connector()) == (True, False)
    assert cls.get_kv_cache_shape(7, 16, HEADS_KV, HEAD_SIZE) == (7, 2, 16, HEADS_KV, HEAD_SIZE)


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
    assert impl.forward(None, q, k, v, torch.empty(0), metadata, output) is output

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


def test_lengths_are_asked_of_the_device_where_the_host_has_none() -> None:
    assert builder().build(0, common(upper_bound=False)).tokens == sum(LENGTHS)
    with pytest.raises(NotSupported, match="1 of 3 items have keys in the cache"):
        builder().build(0, common((0, 7, 0), upper_bound=False))


def test_memory_is_measured_without_a_batch() -> None:
    impl = backend().get_impl_cls()(HEADS, HEAD_SIZE, 0.3)
    q = torch.randn(3, HEADS, HEAD_SIZE)
    assert not impl.forward(None, q, q, q, torch.empty(0), None, torch.full_like(q, torch.nan)).any()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (config(runner="generate"), "a runner that generates decodes from a paged cache"),
        (config(chunked=True), "chunked prefill reads"),
        (config(cached=True), "prefix caching reads"),
    ],
)
def test_vllm_does_not_start_with_what_would_read_the_cache(given: Any, reason: str) -> None:
    with pytest.raises(NotSupported, match=reason):
        builder(given)


def test_a_batch_with_keys_in_the_cache_is_refused() -> None:
    build = builder().build
    with pytest.raises(NotSupported, match="2 of 3 items have keys in the cache, from which there is no reading"):
        build(0, common((3, 0, 16)))
    with pytest.raises(NotSupported, match="a prefix that items share"):
        build(16, common())
    mixed = common()
    mixed.causal = torch.tensor([True, False, True])
    with pytest.raises(NotSupported, match="causality differs between items"):
        build(0, mixed)


def test_a_layer_that_needs_more_is_refused() -> None:
    make = backend().get_impl_cls()
    for kind in (vllm.AttentionType.ENCODER, vllm.AttentionType.ENCODER_DECODER):
        with pytest.raises(NotSupported, match=f"attn_type is {kind.value}; supported"):
            make(HEADS, HEAD_SIZE, 0.3, attn_type=kind)
    with pytest.raises(NotSupported, match="keys are another layer's"):
        make(HEADS, HEAD_SIZE, 0.3, kv_sharing_target_layer_name="layer.0")
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
