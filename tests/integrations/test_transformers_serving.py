"""transformers' generation over its caches, and continuous batching: token by token those of eager."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers as hf

from flashtile import InvalidProblem
from flashtile.integrations import transformers as ours
from flashtile.integrations import transformers_cache
from flashtile.problem.mask import Band
from tests.integrations.test_transformers import OPTIONS, build, models

INITIALIZATION = f"{transformers_cache.BATCHING}.initialization"
PROMPTS = [[5, 6, 7], list(range(8, 21)), [3], [30, 31, 32, 33, 34, 35, 36]]
NEW = 6


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    ours.register(options=OPTIONS)


class Calls(list[tuple[int, ...]]):
    """Shapes of queries, and what was given by name beside each."""

    named: list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What went through attention_cached, for which this CPU is taken for a GPU."""
    seen = Calls()
    seen.named = []
    original = transformers_cache.attention_cached

    def recorded(q: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.append(tuple(q.shape))
        seen.named.append(named)
        return original(q, *given, **named)

    monkeypatch.setattr(transformers_cache, "attention_cached", recorded)
    monkeypatch.setattr(
        ours, "is_decoding", lambda q, dropout, _: q.shape[1] <= 8 and not dropout and not torch.is_grad_enabled()
    )
    return seen


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_generation_over_a_cache(calls: Calls, name: str, cache: str | None) -> None:
    """Dynamic and static caches, sliding ones among them, with and without padding on the left."""
    ids = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[0, :4] = 0
    for mask in (torch.ones_like(keep), keep):
        how = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation=cache, disable_compile=True)
        eager, mine = (model.generate(ids, **how) for model in models(name))
        assert torch.equal(eager, mine)
    assert len(calls) == 2 * 2 * (NEW - 1)  # both runs and layers; all but the prompt's step
    assert set(calls) == {(2, 1, 4, 16)}


def test_padding_that_hides_nothing_is_no_mask_of_a_decoding_step() -> None:
    """A tokenizer's ones; but what a gradient may want, a prompt, one padded token, and keys that no padding names, keep it."""
    from transformers import masking_utils as theirs

    ones, causal = torch.ones(2, 7, dtype=torch.bool), theirs.causal_mask_function
    padded = ones.clone()
    padded[1, 0] = False
    with torch.no_grad():
        for offset in (6, torch.tensor(6)):  # of a dynamic cache, and of a static one, whose places are not all taken
            length = 16 if isinstance(offset, torch.Tensor) else 7
            made = ours.make_mask(2, 1, length, offset, 0, causal, ones)
            assert made.keep is None
            assert (made.used is None) == (length == 7)
            assert ours.make_mask(2, 1, length, offset, 0, causal, padded).keep.shape == (2, length)
            assert ours.make_mask(2, 1, length, offset, 0, causal, ones[:, :6]).keep is not None
            compiled = torch.compile(
                lambda mask, o=offset, n=length: ours.make_mask(2, 1, n, o, 0, causal, mask).keep, backend="eager"
            )
            assert torch.equal(compiled(ones)[:, :7], ones)
        assert ours.make_mask(2, 7, 7, 0, 0, causal, ones).keep is not None
        assert ours.make_mask(2, 1, 7, 6, 0, theirs.bidirectional_mask_function, ones).keep is not None
    assert ours.make_mask(2, 1, 7, 6, 0, causal, ones).keep is not None


def test_padding_on_the_left_of_a_decoding_step_says_where_keys_begin() -> None:
    """Any other padding, an item without a token, keys that no padding names, and a window's cache are told as a mask alone."""
    from transformers import masking_utils as theirs

    causal = theirs.causal_mask_function
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]])
    holes, right, empty = left.clone(), left.clone(), left.clone()
    holes[0, 3] = right[1, 6] = empty[2, 6] = 0
    with torch.no_grad():
        for offset in (6, torch.tensor(6)):
            length = 16 if isinstance(offset, torch.Tensor) else 7
            for padding in (left, left.bool(), torch.cat([left, left[:, :1]], 1)):  # and what comes behind is not asked
                made = ours.make_mask(3, 1, length, offset, 0, causal, padding)
                assert made.first.tolist() == [2, 0, 6]
                assert made.first.dtype == torch.int32
                assert made.keep.shape == (3, length)
                keys = torch.zeros(3, length, 1, 1)
                told = made.over_cache(keys)
                assert set(told) == {"mask", "seqused_k", "first_k"}
                assert told["seqused_k"].tolist() == [7] * 3
            for padding in (holes, right, empty, left[:, :6]):
                made = ours.make_mask(3, 1, length, offset, 0, causal, padding)
                assert made.first is None
                assert made.keep is not None
                told = made.over_cache(keys)
                assert set(told) == {"mask", "seqused_k"}
                assert not isinstance(told["mask"], Band)
        assert ours.make_mask(3, 1, 5, 6, 2, causal, left).first is None
        assert ours.make_mask(3, 7, 7, 0, 0, causal, left).first is None
    assert ours.make_mask(3, 1, 7, 6, 0, causal, left).first is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_of_unlike_lengths_are_decoded_as_by_eager(calls: Calls, side: str) -> None:
    """By their first key where padding lies on the left; whatever the cache, and of several items at a time."""
    ids = torch.randint(2, 64, (4, 11), generator=torch.Generator().manual_seed(4))
    keep = torch.ones_like(ids)
    for item, padded in enumerate((0, 10, 3, 7)):
        keep[item, slice(padded) if side == "left" else slice(11 - padded, None)] = 0
    for cache in (None, "static"):
        how = dict(attention_mask=keep, max_new_tokens=NEW, do_sample=False, cache_implementation=cache, disable_compile=True)
        eager, mine = (model.generate(ids.where(keep > 0, 0), **how) for model in models("llama"))
        assert torch.equal(eager, mine)
    assert len(calls) == 2 * 2 * (NEW - 1)
    assert all(("first_k" in named) == (side == "left") for named in calls.named)


def test_lengths_of_a_decoding_step_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels read them: a layer that must copy or make them launches once more."""
    from transformers import masking_utils as theirs

    causal, keys = theirs.causal_mask_function, torch.zeros(3, 16, 1, 1)
    static = ours.make_mask(3, 1, 16, torch.tensor(6), 0, causal, None)
    assert static.over_cache(keys)["seqused_k"] is static.used
    assert static.used.is_contiguous()
    assert static.used.tolist() == [7] * 3
    assert ours.make_mask(3, 1, 16, 15, 0, causal, None).whole is None  # of a CPU, which does not read it
    monkeypatch.setattr(torch, "full", lambda *given, device, _full=torch.full, **named: _full(*given, **named))
    dynamic = ours.make_mask(3, 1, 16, 15, 0, causal, None, device=torch.device("cuda"))
    assert dynamic.over_cache(keys)["seqused_k"] is dynamic.whole
    assert dynamic.whole.tolist() == [16] * 3
    assert dynamic.is_band
    assert dynamic.over_cache(keys[:, :9])["seqused_k"].tolist() == [9] * 3  # other keys than it was made for
    assert dynamic.over_cache(keys[:2])["seqused_k"].tolist() == [16] * 2


def test_a_gpu_decodes_from_caches_and_a_cpu_does_not(device: torch.device) -> None:
    q = torch.randn(1, 1, 2, 16, device=device)
    with torch.no_grad():
        assert transformers_cache.is_decoding(q, 0.0, None) == q.is_cuda
        assert not transformers_cache.is_decoding(q, 0.1, None)
    assert not transformers_cache.is_decoding(q, 0.0, None)


def batched(name: str, **how: Any) -> list[list[int]]:
    """What continuous batching makes of the prompts."""
    model = build(name, "flashtile")
    model.load_state_dict(models(name)[0].state_dict())
    config = hf.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = hf.ContinuousBatchingConfig(page_size=4, num_blocks=48, max_batch_tokens=8, **how)
    made = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=pages)
    by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in made.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


def alone(name: str) -> list[list[int]]:
    """What eager makes of each prompt by itself."""
    eager = models(name)[0]
    made = [eager.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0] for p in PROMPTS]
    return [tokens[len(prompt) :].tolist() for tokens, prompt in zip(made, PROMPTS, strict=True)]


@pytest.mark.skipif(not hasattr(hf, "ContinuousBatchingConfig"), reason="this transformers has another continuous batching")
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_continuous_batching(name: str) -> None:
    """Prompts in chunks beside requests that decode; windows are rings of pages there."""
    assert batched(name) == alone(name)


@pytest.mark.skipif(not hasattr(hf, "ContinuousBatchingConfig"), reason="this transformers has another continuous batching")
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_continuous_batching_over_pages(calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Batches that decode alone read and write the pages; transformers offers that on GPUs, by what is asked of here."""
    initialization = importlib.import_module(INITIALIZATION)
    assert initialization.is_flash_attention_requested(build(name, "flashtile").config, version=[2, 3])
    assert not initialization.is_flash_attention_requested(build(name, "eager").config, version=[2, 3])
    assert initialization.lazy_import_flash_attention("flashtile")[0][2] is not None
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    assert batched(name, max_blocks_per_request=8) == alone(name)
    assert {shape[1:] for shape in calls} == {(1, 4, 16)}
    assert max(shape[0] for shape in calls) > 1


def test_pages_that_are_none_are_named() -> None:
    x = torch.randn(1, 2, 3, 16)
    pool, cu = torch.randn(4, 4, 2, 16), torch.arange(4, dtype=torch.int32)
    table = torch.zeros(3, 1)
    with pytest.raises(InvalidProblem, match=r"page_table is torch\.float32"):
        ours.attention_forward(
            torch.nn.Module(), x, x, x, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, block_table=table, k_cache=pool, v_cache=pool
        )
