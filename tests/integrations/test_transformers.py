"""transformers' models with attn_implementation="flashtile": logits, gradients and generated tokens are those of eager.

initializer_range is 1 so that mistakes show: at the default a model's logits barely depend on its attention.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers as hf

from flashtile import Band, Dropout, InvalidProblem, NotSupported, Options
from flashtile.integrations import transformers as ours
from flashtile.integrations.transformers import Mask, attention_forward, make_mask, register
from tests.judge import FACTOR, FLOOR_ULP

OPTIONS = Options(backend="cpu")
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=64, initializer_range=1.0, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gpt-oss": lambda: hf.GptOssConfig(
        **SMALL,
        sliding_window=5,
        num_local_experts=2,
        num_experts_per_tok=1,
        experts_implementation="eager",  # the others know no float64
    ),
    "qwen": lambda: hf.Qwen3Config(**SMALL),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """On the CPU backend: interpreted kernels would take minutes, and are tested elsewhere."""
    register(options=OPTIONS)


def build(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model.eval()


@cache
def models(name: str) -> tuple[Any, Any]:
    """(eager, ours), of the same weights."""
    eager, mine = build(name, "eager"), build(name, "flashtile")
    mine.load_state_dict(eager.state_dict())
    return eager, mine


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(3))


def left_padding(length: int = 12) -> torch.Tensor:
    keep = torch.ones(2, length, dtype=torch.long)
    keep[0, :4] = 0
    return keep


Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


def compare(name: str, where: torch.Tensor, **given: Any) -> None:
    """Logits at `where` and the gradient of every parameter under a loss of those."""
    eager, mine = (step(model, lambda out: out.logits[where], **given) for model in models(name))
    agree(mine, eager)


def step(model: Any, seen: Callable[[Any], torch.Tensor], *tensors: torch.Tensor, **given: Any) -> Step:
    """What is seen of a model's outputs, (rows, features), and the gradient of every parameter under a loss of that."""
    model.zero_grad()
    out = seen(model(*tensors, **given))
    out.log_softmax(-1)[:, 7].sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def agree(ours: Step, eager: Step, unfelt: str | None = None) -> None:
    """unfelt: how the parameters' names end whose gradients are 0 but for rounding."""
    (got, mine), (expected, grads) = ours, eager
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())
    assert mine.keys() == grads.keys()
    largest = max(grad.abs().max().item() for grad in grads.values())
    for key, grad in grads.items():
        if unfelt is not None and key.endswith(unfelt):
            assert max(mine[key].abs().max().item(), grad.abs().max().item()) <= 1e-6 * largest
            continue
        torch.testing.assert_close(
            mine[key], grad, rtol=1e-3, atol=1e-3 * grad.abs().max().item() + 1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name: str) -> None:
    compare(name, torch.ones(2, 12, dtype=torch.bool), input_ids=tokens())


class Exact(TorchFunctionMode):
    """What a model computes in float32, whatever its weights are, it computes in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if given is torch.float32 else given for given in args]
        return func(*args, **{n: torch.float64 if given is torch.float32 else given for n, given in (kwargs or {}).items()})


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_keep_the_accuracy_rule(name: str) -> None:
    """Beside eager, against the model in float64. Over many sequences: outside attention rounding differs by luck."""
    pair = models(name)
    truth = deepcopy(pair[0]).double()
    worst: dict[str, list[float]] = {}  # eager's largest error, ours, and the largest number
    for seed in range(16):
        ids = torch.randint(2, 64, (2, 32), generator=torch.Generator().manual_seed(seed))
        made = [step(model, lambda out: out.logits.flatten(0, 1), input_ids=ids) for model in pair]
        with Exact():
            made.append(step(truth, lambda out: out.logits.flatten(0, 1), input_ids=ids))
        eager, mine, exact = ({"logits": out, **grads} for out, grads in made)
        assert exact["logits"].dtype is torch.float64
        for key, true in exact.items():
            found = ((t.double() - true).abs().max().item() for t in (eager[key], mine[key]))
            seen = (*found, true.abs().max().item())
            worst[key] = [max(both) for both in zip(worst.get(key, (0.0, 0.0, 0.0)), seen, strict=True)]
    for key, (plain, ours_off, largest) in worst.items():
        assert ours_off <= max(FACTOR * plain, FLOOR_ULP * torch.finfo(torch.float32).eps * largest), key


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding(name: str) -> None:
    keep = left_padding()
    positions = (keep.cumsum(-1) - 1).clamp(min=0)
    compare(name, keep.bool(), input_ids=tokens(), attention_mask=keep, position_ids=positions)


@pytest.mark.parametrize("name", ["qwen", "mistral"])
def test_packed_sequences_by_their_positions(name: str) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    compare(name, torch.ones(2, 12, dtype=torch.bool), input_ids=tokens(), position_ids=positions, use_cache=False)


def test_packed_sequences_by_cu_seq_lens() -> None:
    ids = tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    eager, _ = models("qwen")
    mine = models("qwen")[1]
    expected = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
    seen: list[Any] = []

    def record(module: Any, q: Any, k: Any, v: Any, mask: Any, **named: Any) -> Any:
        seen.append(named["cu_seq_lens_q"])
        return attention_forward(module, q, k, v, None, **named)

    hf.AttentionInterface.register("flashtile", record)
    try:
        got = mine(input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu).logits
    finally:
        register(options=OPTIONS)
    assert len(seen) == 2
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("name", "compiled", "given"),
    [
        ("qwen", False, {}),
        ("qwen", True, {}),
        ("mistral", False, {}),
        ("mistral", False, {"attention_mask": torch.ones(1, 12)}),
        ("qwen", False, {"attention_mask": torch.ones(1, 1, 12, 12).tril() > 0}),
        ("qwen", False, {"attention_mask": torch.ones(1, 1, 12, 12).tril().log()}),
    ],
    ids=["cache", "compiled", "window", "mask of keys", "whole mask", "numbers"],
)
def test_packed_sequences_by_cu_seq_lens_beside_a_cache_or_a_mask(name: str, compiled: bool, given: dict[str, Any]) -> None:
    """What transformers' collator of flattened batches gives; neither of those says it."""
    ids, cu = tokens()[:1], torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    eager, mine = models(name)
    run = torch.compile(mine.forward, backend="aot_eager") if compiled else mine
    packed = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=7, max_length_k=7)
    with torch.no_grad():
        expected = torch.cat([eager(input_ids=part).logits for part in ids.split([5, 7], 1)], 1)
        got = run(input_ids=ids, position_ids=positions, **packed, **given).logits
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_token_for_token(name: str, cache_kind: str) -> None:
    """With left padding, past the window; a static cache is longer than what is in it."""
    written = []
    for model in models(name):
        made = model.generate(
            tokens(8), attention_mask=left_padding(8), max_new_tokens=9, do_sample=False, cache_implementation=cache_kind,
            disable_compile=True,
        )  # fmt: skip
        written.append(made)
    assert torch.equal(*written)


def test_bert_with_padding() -> None:
    config = hf.BertConfig(**{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads", "eos_token_id")})
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[0, 9:] = 0
    made = []
    for implementation in ("eager", "flashtile"):
        torch.manual_seed(0)
        model = hf.BertModel._from_config(config, attn_implementation=implementation).eval()
        made.append(step(model, lambda out: out.last_hidden_state[keep.bool()], tokens(), attention_mask=keep))
    agree(made[1], made[0], unfelt="key.bias")  # it moves all scores of a query alike


@pytest.mark.parametrize("longer", ["source", "target"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_sees_all_that_its_encoder_saw(name: str, longer: str) -> None:
    sizes = dict(vocab_size=64, d_model=32, pad_token_id=0, decoder_start_token_id=1)
    source, target = (tokens(12), tokens(7)) if longer == "source" else (tokens(7), tokens(12))
    keep = torch.ones_like(source)
    keep[0, -3:] = 0
    made = []
    for implementation in ("eager", "flashtile"):
        torch.manual_seed(0)
        if name == "bart":
            blocks = {
                f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4))
            }
            config: Any = hf.BartConfig(**sizes, **blocks, dropout=0.0, init_std=1.0, eos_token_id=None)
        else:
            config = hf.T5Config(**sizes, d_kv=16, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
        model = hf.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation).eval()
        given = dict(input_ids=source, attention_mask=keep, decoder_input_ids=target)
        made.append(step(model, lambda out: out.logits.flatten(0, 1), **given))
    agree(made[1], made[0], unfelt="k_proj.bias")


def test_models_that_add_their_mask_to_scores() -> None:
    """Nothing is added where nothing is hidden; otherwise it is refused."""
    config = hf.BeitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        use_relative_position_bias=True, initializer_range=1.0,
    )  # fmt: skip
    made = []
    for implementation in ("eager", "flashtile"):
        torch.manual_seed(0)
        model = hf.BeitModel._from_config(config, attn_implementation=implementation).eval()
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        made.append(step(model, lambda out: out.last_hidden_state.flatten(0, 1), pixels))
    agree(made[1], made[0])
    config = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    bloom = hf.AutoModelForCausalLM.from_config(config, attn_implementation="flashtile")
    with pytest.raises(NotSupported, match="adds its mask to scores"):
        bloom(tokens())


def test_models_that_take_their_mask_for_a_tensor() -> None:
    config = hf.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="flashtile")
    with pytest.raises(NotSupported, match="asks its mask for 'to', and it is no tensor"):
        model(tokens())
    mask = Mask((1, 1, 4, 4), Band(right=0), torch.ones(1, 4, dtype=torch.bool))
    assert not hasattr(mask, "to")  # accelerate asks
    assert deepcopy(mask).shape == mask.shape
    with pytest.raises(NotSupported, match="asks its mask for 'repeat'"):
        mask.repeat(1, 2, 1, 1)


def test_siglip_2_pools_what_is_no_padding() -> None:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4, num_patches=16)
    generator = torch.Generator().manual_seed(3)
    given = dict(
        pixel_values=torch.randn(2, 16, 48, generator=generator), spatial_shapes=torch.tensor([[4, 4], [2, 4]]),
        pixel_attention_mask=torch.tensor([[1] * 16, [1] * 8 + [0] * 8]),
    )  # fmt: skip
    made = []
    for implementation in ("eager", "flashtile"):
        torch.manual_seed(0)
        model = hf.Siglip2VisionModel._from_config(hf.Siglip2VisionConfig(**sizes), attn_implementation=implementation).eval()
        made.append(step(model, lambda out: out.pooler_output, **given))
    agree(made[1], made[0], unfelt="k_proj.bias")


def test_masks_follow_layers_to_their_device() -> None:
    ids, keep, used = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, 4, dtype=torch.bool), torch.ones(1, dtype=torch.int32)
    made = Mask((1, 1, 4, 4), Band(right=0), keep, ids, used).arguments(torch.device("meta"))
    leaves = [leaf for term in made["mask"].terms for leaf in term if not isinstance(leaf, Band)]
    tensors = [made["seqused_k"], *(tensor for leaf in leaves for tensor in leaf.tensors(1, 1))]
    assert len(tensors) == 4
    assert {t.device.type for t in tensors} == {"meta"}


def test_vit() -> None:
    config = hf.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        initializer_range=1.0,
    )  # fmt: skip
    made = []
    for implementation in ("eager", "flashtile"):
        torch.manual_seed(0)
        model = hf.ViTModel._from_config(config, attn_implementation=implementation).eval()
        made.append(step(model, lambda out: out.last_hidden_state.flatten(0, 1), torch.ones(2, 3, 16, 16).cumsum(2)))
    agree(made[1], made[0], unfelt="k_proj.bias")


def test_implementations_are_switched_saved_and_loaded(tmp_path: Path) -> None:
    eager = build("mistral", "eager")
    eager.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashtile").eval()
    switched = build("mistral", "eager")
    switched.set_attn_implementation("flashtile")
    expected = eager(tokens()).logits
    for model in (loaded, switched):
        assert model.config._attn_implementation == "flashtile"
        got = model(tokens()).logits
        assert not torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


def test_gradient_checkpointing_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    original = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *given, **named: (ran.append(named), original(*given, **named))[1])
    model = build("gemma2", "flashtile").train()
    plain = step(model, lambda out: out.logits.flatten(0, 1), input_ids=tokens(), use_cache=False)
    assert len(ran) == 2
    model.gradient_checkpointing_enable()
    agree(step(model, lambda out: out.logits.flatten(0, 1), input_ids=tokens(), use_cache=False), plain)
    assert len(ran) == 6  # both layers, and both again for the backward


def test_masks_stay_linear() -> None:
    """What padding, windows, packing and static caches ask for is said without a tensor of all scores."""
    from transformers import masking_utils as theirs

    ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
    window = theirs.sliding_window_causal_mask_function(3)
    remap = getattr(theirs, "remap_positions_for_packed_sequence", lambda function, _: function)  # since transformers 5.23
    packed = theirs.and_masks(
        remap(window, torch.tensor([[0, 1, 0, 1, 2, 0]])),
        theirs.packed_sequence_mask_function(ids),
    )
    both_sides = theirs.sliding_window_bidirectional_mask_function(2)
    every = importlib.import_module("transformers.models.t5gemma2.modeling_t5gemma2").sliding_window_mask_function
    gemma = importlib.import_module("transformers.models.gemma3.modeling_gemma3")._bidirectional_window_overlay
    uneven = importlib.import_module("transformers.models.gemma4.modeling_gemma4").sliding_window_mask_function
    for function, offset, kv_length in (
        (theirs.causal_mask_function, 0, 6),
        (packed, 0, 6),
        (both_sides, 0, 6),
        (both_sides, 3, 9),
        (theirs.and_masks(both_sides, theirs.packed_sequence_mask_function(ids)), 0, 6),
        (theirs.or_masks(window, gemma(3)), 0, 6),
        (theirs.and_masks(theirs.bidirectional_mask_function, every(4, is_causal=False)), 0, 6),
        (theirs.and_masks(theirs.bidirectional_mask_function, every(4)), 0, 6),
        (theirs.and_masks(theirs.bidirectional_mask_function, uneven((3, 2))), 0, 6),
        (theirs.causal_mask_function, 2, 11),
    ):
        made = make_mask(1, 6, kv_length, offset, 0, function, torch.ones(1, kv_length, dtype=torch.bool))
        assert isinstance(made, Mask)
        dense = theirs.sdpa_mask(1, 6, kv_length, offset, 0, function, allow_is_causal_skip=False)
        q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, kv_length, 4)
        got, _ = attention_forward(torch.nn.Identity(), q, k, k, made)
        expected, _ = attention_forward(torch.nn.Identity(), q, k, k, dense)
        torch.testing.assert_close(got, expected)
    overlays = (
        lambda b, h, i, j: (i + j) % 2 == 0,
        theirs.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long)),
        theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, -1]]))),
    )
    for function in overlays:  # as the docs list them
        strange = make_mask(1, 6, 6, 0, 0, function, use_vmap=True)
        assert isinstance(strange, torch.Tensor)
        assert torch.equal(strange, theirs.sdpa_mask(1, 6, 6, 0, 0, function, allow_is_causal_skip=False, use_vmap=True))


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def modern_bert() -> Any:
    config = hf.ModernBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, local_attention=8,
        global_attn_every_n_layers=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    return hf.ModernBertModel, config


def gemma_both_ways() -> Any:
    sizes = {**SMALL, "max_position_embeddings": 2048, "initializer_range": 0.2}
    config = hf.Gemma3TextConfig(
        **sizes, sliding_window=5, use_bidirectional_attention=True, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return hf.Gemma3TextModel, config


@pytest.mark.parametrize("make", [modern_bert, gemma_both_ways])
def test_windows_of_two_sides(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are eager's, with padding too; and a long call makes no tensor of all its scores."""
    kind, config = make()
    keep = torch.ones(2, 24, dtype=torch.long)
    keep[0, 20:] = 0
    for padding in (None, keep):
        made = []
        for implementation in ("eager", "flashtile"):
            torch.manual_seed(0)
            model = kind._from_config(config, attn_implementation=implementation).eval()
            seen = torch.ones(2, 24, dtype=torch.bool) if padding is None else padding.bool()
            made.append(step(model, lambda out, seen=seen: out.last_hidden_state[seen], tokens(24), attention_mask=padding))
        agree(made[1], made[0])
    masks: list[Any] = []
    monkeypatch.setattr(ours, "attention", lambda q, k, v, **named: (masks.append(named["mask"]), q)[1])
    length = 1536
    with torch.no_grad(), Largest() as largest:
        model(torch.ones(1, length, dtype=torch.long))
    assert len(masks) == 2
    assert all(isinstance(mask, Band) for mask in masks)
    assert largest.elements < length * 64 * 3, "what is linear: hidden states of 32, three times, and rotary tables"


def test_a_position_bias_without_a_mask_is_cropped_as_there() -> None:
    """An empty static cache has more keys than there are queries yet."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as theirs

    q, k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    for bias in (torch.randn(1, 2, 6, 11), torch.randn(2, 1, 1, 11)):
        for keys in (11, 6):
            given = (torch.nn.Identity(), q, k[:, :, :keys], v[:, :, :keys], None)
            wide = bias[..., :keys].requires_grad_()
            got, expected = (function(*given, position_bias=wide)[0] for function in (attention_forward, theirs))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), wide)[0] for out in (got, expected)))


def test_unknown_keywords_raise() -> None:
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Identity()
    attention_forward(module, q, q, q, None, position_ids=torch.arange(4), output_attentions=False, indexer=None)
    attention_forward(module, q, q, q, None, interpolate_pos_encoding=True, seq_idx=torch.zeros(1, 4))  # DINOv2, Mamba's kin
    with pytest.raises(NotSupported, match="knows no indexer"):
        attention_forward(module, q, q, q, None, indexer=3)
    with pytest.raises(NotSupported, match="knows no cache"):
        attention_forward(module, q, q, q, None, cache=object())
    with pytest.raises(InvalidProblem, match="attention_mask has shape"):
        attention_forward(module, q, q, q, torch.ones(1, 4))
    with pytest.raises(InvalidProblem, match="packed sequences must be one row"):
        attention_forward(module, q.expand(2, -1, -1, -1), q, q, None, cu_seq_lens_q=torch.tensor([0, 4]))


def test_dropout_is_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(ours, "attention", lambda q, k, v, **named: seen.update(named) or q)
    q = torch.randn(1, 2, 4, 8)
    attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.25)
    assert seen["dropout"] == Dropout(0.25)
    assert seen["causal"] is True


def test_compiled() -> None:
    eager, mine = models("mistral")
    compiled = torch.compile(mine.model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = eager.model(tokens(), use_cache=False).last_hidden_state
        got = compiled(tokens(), use_cache=False).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())
