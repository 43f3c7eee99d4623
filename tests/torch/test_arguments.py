"""What callers pass: masks, numbers and names as other libraries have them are taken, or refused with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import flashtile
from flashtile import Alibi, Band, Bias, Blocks, Dilated, Document, Dropout, InvalidProblem, KeyPadding, Prefix, Softcap, Stored
from flashtile.torch.call.arguments import EVERY, NAMES, Arguments, Keywords

IDS = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize("used", [None, torch.tensor([5, 8], dtype=torch.int32)], ids=["all", "used"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: KeyPadding(torch.ones(2, 12, dtype=torch.bool)), "key padding is (2, 12); its last axis must be seqlen_k, 8"),
        (lambda: KeyPadding(torch.ones(1, 12, dtype=torch.bool)), "key padding is (2, 12); its last axis must be seqlen_k, 8"),
        (lambda: Document(torch.zeros(12).int()), "document queries is (2, 12); its last axis must be seqlen_q, 8"),
        (lambda: Document(IDS, torch.zeros(2, 9).int()), "document keys is (2, 9); its last axis must be seqlen_k, 8"),
    ],
)  # fmt: skip
def test_masks_that_reach_beyond_the_keys_are_not_cut_in_silence(make: Callable[[], Any], name: str, used: Any) -> None:
    """A cache's mask has a column for each of its places: which of them are the keys is the caller's to say."""
    q = torch.randn(2, 8, 4, 16)
    for given in (make(), make() & Band(right=0)):
        for run in (flashtile.attention, torch.compile(flashtile.attention, backend="eager", dynamic=False)):
            with pytest.raises(Exception, match=re.escape(name)):
                run(q, q, q, mask=given, seqused_k=used)
    with pytest.raises(InvalidProblem, match=re.escape(name)):
        Blocks.build(make(), 8, 8, batch=2)


@pytest.mark.parametrize("kind", ["keep", "ids", "prefix", "stored"])
def test_ints_of_64_bits_are_read_as_they_are(backend: str, place: torch.device, kind: str) -> None:
    """Tokenizers and cumsum give them. Documents apart by 2 to the 32 are documents apart."""
    q = torch.randn(2, 8, 2, 16, device=place)
    keep, ids = torch.arange(16, device=place).view(2, 8) % 3 > 0, (IDS // 3).to(place)
    masks: dict[str, tuple[Any, Any]] = {
        "keep": (KeyPadding(keep), KeyPadding(keep.long())),
        "ids": (Document(ids), Document(ids.long() << 32)),
        "prefix": (Prefix(torch.tensor([3, 5], device=place).int()), Prefix(torch.tensor([3, 5], device=place))),
        "stored": (Stored(keep[:, None, None]), Stored(keep[:, None, None].long())),
    }
    options = flashtile.Options(backend=backend)
    for band in (Band(), Band(right=0)):
        want, got = (flashtile.attention(q, q, q, mask=mask & band, options=options) for mask in masks[kind])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    if kind in ("keep", "ids"):
        states = [Blocks.build(mask, 8, 8, batch=2, device=place).state for mask in masks[kind]]
        assert torch.equal(*states)


def test_a_stored_mask_of_two_axes_serves_all_items_and_heads(backend: str, place: torch.device) -> None:
    q, seen = torch.randn(2, 8, 2, 16, device=place), torch.rand(8, 8, device=place) < 0.7
    options = flashtile.Options(backend=backend)
    got, want = (flashtile.attention(q, q, q, mask=Stored(m), options=options) for m in (seen, seen[None, None]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- numbers --------------------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[float], Any]] = {
    "numpy": np.float32, "numpy64": np.float64, "array": np.array, "tensor": torch.tensor,
    "double": lambda n: torch.tensor(n, dtype=torch.float64),
}  # fmt: skip
INTS: dict[str, Callable[[int], Any]] = {"numpy": np.int64, "numpy32": np.int32, "array": np.array, "tensor": torch.tensor}
USES: dict[str, Callable[[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]], dict[str, Any]]] = {
    "scale": lambda real, whole, yes: {"scale": real(0.25)},
    "softcap": lambda real, whole, yes: {"score": Softcap(real(0.5))},
    "dropout": lambda real, whole, yes: {"dropout": Dropout(real(0.5), whole(7))},
    "causal": lambda real, whole, yes: {"causal": yes(True), "window": (whole(3), None)},
    "window": lambda real, whole, yes: {"window": [whole(3), whole(1)]},
    "band": lambda real, whole, yes: {"mask": Band(whole(3), whole(1))},
    "dilated": lambda real, whole, yes: {"mask": Dilated(whole(2)), "window": (whole(5), None), "causal": yes(True)},
    "blocks": lambda real, whole, yes: {
        "mask": Blocks.build(Band(right=0), 16, 16, block_size=(whole(64), whole(32))), "window": (whole(3), whole(2)),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["numpy", "array", "tensor"])
@pytest.mark.parametrize("use", USES)
def test_numbers_of_other_libraries(use: str, kind: str) -> None:
    q = torch.randn(2, 16, 2, 16)
    yes = {"numpy": np.bool_, "array": np.array, "tensor": torch.tensor}[kind]
    expected = flashtile.attention(q, q, q, **USES[use](float, int, bool))
    for _ in range(2):  # met anew, and again
        got = flashtile.attention(q, q, q, **USES[use](NUMBERS[kind], INTS[kind], yes))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_number_that_changes_in_its_tensor_is_read_anew() -> None:
    q, mask = torch.randn(1, 16, 2, 16), Blocks.build(Document(torch.zeros(16).int()), 16, 16)
    scale, left = torch.tensor(0.25), torch.tensor(3)
    flashtile.attention(q, q, q, mask=mask, scale=scale, window=(left, 0))
    scale.fill_(0.5)
    left.fill_(1)
    got = flashtile.attention(q, q, q, mask=mask, scale=scale, window=(left, 0))
    torch.testing.assert_close(got, flashtile.attention(q, q, q, scale=0.5, window=(1, 0)), rtol=0, atol=0)


def test_a_modifier_s_own_numbers() -> None:
    class Shifted(flashtile.Score):
        name = "shifted"

        def __init__(self, by: Any):
            self.by = by

        def scalars(self) -> tuple[Any, ...]:
            return (self.by,)

        @staticmethod
        def apply(score: Any, at: Any, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
            return score * scalars[0]

    q, by = torch.randn(1, 8, 2, 16), torch.tensor(2.0)
    for value in (2.0, 3.0):
        by.fill_(value)
        expected = flashtile.attention(q, q, q, scale=value / 4)
        for given in (by, np.float32(value)):
            torch.testing.assert_close(flashtile.attention(q, q, q, score=Shifted(given)), expected)


def test_a_learned_scale_multiplies_q() -> None:
    q, scale = torch.randn(1, 8, 2, 16), torch.tensor(0.3, requires_grad=True)
    remedy = re.escape("multiplies q: attention(q * scale, k, v, scale=1.0)")
    with pytest.raises(InvalidProblem, match=remedy):
        flashtile.attention(q, q, q, scale=scale)  # pyright: ignore[reportArgumentType]
    for given in (scale, scale.detach(), np.float32(0.3)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=remedy):
            torch.compile(flashtile.attention, backend="eager", fullgraph=True)(q, q, q, scale=given)
    learns = torch.compile(lambda scale: flashtile.attention(q * scale, q, q, scale=1.0), backend="aot_eager", fullgraph=True)
    out = learns(scale)
    (got,) = torch.autograd.grad(out.square().sum(), scale)
    theirs = F.scaled_dot_product_attention(*((t * f).transpose(1, 2) for t, f in ((q, scale), (q, 1), (q, 1))), scale=1.0)
    (expected,) = torch.autograd.grad(theirs.square().sum(), scale)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_numbers_of_ops_and_modules() -> None:
    x = torch.randn(3, 8)
    for number in NUMBERS.values():
        for run in (flashtile.ops.rms_norm, torch.compile(flashtile.ops.rms_norm, backend="eager")):
            torch.testing.assert_close(run(x, eps=number(0.25)), flashtile.ops.rms_norm(x, eps=0.25), rtol=0, atol=0)
    eps = torch.tensor(0.25)
    for _ in range(2):
        torch.testing.assert_close(flashtile.ops.rms_norm(x, eps=eps), flashtile.ops.rms_norm(x, eps=float(eps)))  # pyright: ignore[reportArgumentType]
        eps.fill_(0.5)
    with pytest.raises(InvalidProblem, match="eps is a Tensor that requires a gradient; it must be a number"):
        flashtile.ops.rms_norm(x, eps=eps.requires_grad_())  # pyright: ignore[reportArgumentType]
    for whole in INTS.values():
        how: dict[str, Any] = dict(heads_kv=whole(2), rotary_base=whole(10000), dropout_p=np.float32(0.5))
        layer = flashtile.nn.Attention(whole(32), whole(4), **how)
        assert layer(torch.randn(1, 5, 32)).shape == (1, 5, 32)
        assert layer.head_dim == 8


# -- lengths, one modifier ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
def test_lengths_of_other_ints(backend: str, place: torch.device, dtype: torch.dtype) -> None:
    options = flashtile.Options(backend=backend)
    q, packed, qkv = (torch.randn(*size, 2, 16, device=place) for size in ((2, 8), (12,), (12, 3)))
    cu, used = (torch.tensor(n, dtype=torch.int32, device=place) for n in ([0, 5, 12], [3, 8]))
    calls: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "dense": lambda cu, used: flashtile.attention(q, q, q, seqused_k=used, seqused_q=used, options=options),
        "varlen": lambda cu, used: flashtile.attention_varlen(*[packed] * 3, cu, max_seqlen_q=torch.tensor(8), options=options),
        "packed": lambda cu, used: flashtile.attention_qkvpacked(qkv, cu_seqlens=cu, max_seqlen=np.int64(8), options=options),
    }
    for call in calls.values():
        torch.testing.assert_close(call(cu.to(dtype), used.to(dtype)), call(cu, used), rtol=0, atol=0)
    layer = flashtile.nn.Attention(32, 2, rotary_base=1e4, causal=True)
    x = torch.randn(12, 32)
    torch.testing.assert_close(layer(x, cu_seqlens=cu.cpu().to(dtype)), layer(x, cu_seqlens=cu.cpu()), rtol=0, atol=0)
    if dtype is not torch.int16:  # which no kernel reads, and no tokenizer gives
        keep, both = torch.arange(24).view(2, 12) % 5 > 0, x.expand(2, -1, -1)
        torch.testing.assert_close(layer(both, padding_mask=keep.to(dtype)), layer(both, padding_mask=keep), rtol=0, atol=0)


@pytest.mark.parametrize("modifier", [Softcap(2.0), Alibi(torch.rand(2)), Bias(torch.randn(8, 8))], ids=lambda m: m.name)
def test_one_modifier_needs_no_tuple(modifier: Any) -> None:
    q = torch.randn(2, 8, 2, 16)
    expected = flashtile.attention(q, q, q, score=(modifier,))
    compiled = torch.compile(lambda q: flashtile.attention(q, q, q, score=modifier), backend="eager", fullgraph=True)
    for got in (flashtile.attention(q, q, q, score=modifier), compiled(q)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert str(flashtile.explain(q, q, q, score=modifier)) == str(flashtile.explain(q, q, q, score=(modifier,)))
    layer = flashtile.nn.Attention(32, 2, score=modifier)
    assert layer(torch.randn(2, 8, 32)).shape == (2, 8, 32)
    if modifier.name == "bias":
        with pytest.raises(InvalidProblem, match="seqused_k is a mask with holes, and bias"):
            flashtile.attention(q, q, q, score=modifier, seqused_k=torch.rand(2, 8) < 0.5)


# -- names ----------------------------------------------------------------------------------------------------------------

THEIRS = {
    "is_causal": "causal", "attn_mask": "mask=Stored(attn_mask)", "dropout_p": "dropout=Dropout(p)", "softmax_scale": "scale",
    "window_size": "window=(left, right)", "enable_gqa": "k and v may have fewer heads", "alibi_slopes": "score=Alibi(slopes)",
    "softcap": "score=Softcap(cap)", "key_padding_mask": "mask=KeyPadding(keep)", "return_attn_probs": "return_lse",
    "deterministic": "options=Options(deterministic=True)", "attn_bias": "score=Bias(", "casual": "causal", "scales": "scale",
    "precision": "options=Options(precision=",
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_other_libraries_names_are_told_apart(name: str) -> None:
    q, cu = torch.randn(2, 8, 2, 16), torch.tensor([0, 8])
    calls: tuple[Callable[..., Any], ...] = (
        lambda **how: flashtile.attention(q, q, q, **how),
        lambda **how: flashtile.attention_varlen(q[0], q[0], q[0], cu, **how),
        lambda **how: flashtile.attention_qkvpacked(torch.stack((q, q, q), 2), **how),
        lambda **how: flashtile.attention_kvpacked(q, torch.stack((q, q), 2), **how),
        lambda **how: flashtile.explain(q, q, q, **how),
    )
    for call in calls:
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; .*{re.escape(THEIRS[name])}"):
            call(**{name: None})
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(THEIRS[name])):
        torch.compile(lambda q: flashtile.attention(q, q, q, **{name: None}), backend="eager", fullgraph=True)(q)
    if name not in ("dropout_p", "return_attn_probs"):
        with pytest.raises(TypeError, match=re.escape(THEIRS[name])):
            flashtile.nn.Attention(32, 2, **{name: None})


def test_a_module_s_forward_says_what_it_takes() -> None:
    layer, x = flashtile.nn.Attention(32, 2), torch.randn(2, 8, 32)
    with pytest.raises(TypeError, match="padding_mask=~key_padding_mask"):
        layer(x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
    for name in ("is_causal", "attn_mask"):
        with pytest.raises(TypeError, match="masks are the module's own"):
            layer(x, **{name: True})


def test_the_names_that_are_said_are_those_that_there_are() -> None:
    code = flashtile.attention.__code__
    assert code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] == EVERY


# -- meta -----------------------------------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda t: {},
    "lse": lambda t: {"causal": True, "return_lse": True},
    "mask": lambda t: {"mask": Document(t(16).int()) & Band(left=3)},
    "score": lambda t: {"score": (Softcap(2.0), Bias(t(2, 1, 16, 16).requires_grad_()))},
    "sink": lambda t: {"sink": t(4), "dropout": Dropout(0.1)},
    "lengths": lambda t: {"seqused_k": t(2).long()},
    "backend": lambda t: {"options": flashtile.Options(backward="split", deterministic=True)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_meta_tensors_give_shapes(name: str, dtype: torch.dtype) -> None:
    """The shapes, strides and dtypes that a CPU's tensors give, gradients included."""
    found = []
    for device in ("cpu", "meta"):
        q = torch.zeros(2, 16, 4, 32, dtype=dtype, device=device).requires_grad_()
        k = torch.zeros(2, 2, 16, 32, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        how = SHAPES[name](lambda *size, device=device: torch.zeros(*size, device=device))
        made = flashtile.attention(q, k, k, **how)
        made = made if isinstance(made, tuple) else (made,)
        sum(t.sum() for t in made).backward()  # pyright: ignore[reportAttributeAccessIssue]
        assert q.grad is not None
        assert k.grad is not None
        found.append([(t.shape, t.stride(), t.dtype) for t in (*made, q.grad, k.grad)])
        assert all(t.device.type == device for t in made)
    assert found[0] == found[1]


def test_modules_and_ops_on_meta() -> None:
    from flashtile import ops

    def t(*size: int, dtype: Any = None) -> torch.Tensor:
        made = torch.empty(*size, device="meta", dtype=dtype)
        return made.requires_grad_() if dtype is None else made

    cu = t(3, dtype=torch.int64)
    layer = flashtile.nn.Attention(32, 4, heads_kv=2, rotary_base=1e4, qk_norm=True, sinks=True, causal=True, device="meta")
    results = {
        "module": (layer(t(2, 5, 32), padding_mask=t(2, 5, dtype=torch.bool)), (2, 5, 32)),
        "module of sequences": (layer(t(9, 32), cu_seqlens=cu), (9, 32)),
        "varlen": (flashtile.attention_varlen(t(9, 2, 8), t(9, 2, 8), t(9, 2, 8), cu), (9, 2, 8)),
        "packed": (flashtile.attention_qkvpacked(t(2, 5, 3, 2, 8)), (2, 5, 2, 8)),
        "rms_norm": (ops.rms_norm(t(2, 32), t(32)), (2, 32)),
        "layer_norm": (ops.layer_norm(t(2, 32), t(32), t(32), residual=t(2, 32), dropout=0.1), (2, 32)),
        "cross_entropy": (ops.cross_entropy(t(2, 32), t(2, dtype=torch.long)), ()),
        "head": (ops.linear_cross_entropy(t(2, 8), t(32, 8), t(2, dtype=torch.long)), ()),
        "linear_act": (ops.linear_act(t(2, 8), t(32, 8), t(32)), (2, 32)),
        "mlp": (ops.mlp(t(2, 8), t(32, 8), None, t(8, 32), None), (2, 8)),
        "softmax": (ops.softmax(t(1, 2, 4, 8)), (1, 2, 4, 8)),
        "rotary": (ops.rotary(t(1, 5, 2, 8), None, t(5, 4).detach(), t(5, 4).detach()), (1, 5, 2, 8)),
    }
    for name, (made, shape) in results.items():
        made = made[0] if isinstance(made, tuple) else made
        assert (made.shape, made.device.type) == (torch.Size(shape), "meta"), name
        made.sum().backward()


# -- nested tensors, float64 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors_of_offsets_of_their_own(causal: bool) -> None:
    """Nested apart from the same lengths, as a model's projections of three lists are."""
    parts = [[torch.randn(n, 2, 16) for n in (3, 7, 1)] for _ in "qkv"]
    q, k, v = (torch.nested.nested_tensor(some, layout=torch.jagged, requires_grad=True) for some in parts)
    out = flashtile.attention(q, k, v, causal=causal)
    for i, item in enumerate(out.unbind()):
        torch.testing.assert_close(item, flashtile.attention(*(some[i][None] for some in parts), causal=causal)[0])
    out.values().sum().backward()
    assert all(t.grad is not None for t in (q, k, v))
    other = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (4, 6, 1)], layout=torch.jagged)
    with pytest.raises(InvalidProblem, match="nested by the same offsets, one tensor: v = torch"):
        flashtile.attention(q, k, other)


def test_override_leaves_float64_to_torch() -> None:
    from flashtile.compat.sdpa import Override

    q, layer = torch.randn(2, 4, 8, 16, dtype=torch.float64), torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
    x = q[:, 0]
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True), layer(x, x, x, need_weights=False)[0]
    with Override():
        got = F.scaled_dot_product_attention(q, q, q, is_causal=True), layer(x, x, x, need_weights=False)[0]
        ours = F.scaled_dot_product_attention(q.float(), q.float(), q.float(), is_causal=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(ours.double(), expected[0], rtol=1e-5, atol=1e-5)


def test_arguments_are_written_out_once_below_the_public_signatures() -> None:
    assert set(NAMES) == Keywords.__optional_keys__
    assert tuple(Arguments(*NAMES).named()) == tuple(Arguments(*NAMES).named().values()) == NAMES
    assert Arguments().named(causal=True)["causal"] is True


def test_calls_have_one_builder_of_their_problem() -> None:
    """Front ends, eager, traced and JAX, read arguments each in its own way; what they make of them is `describe`'s alone."""
    root = Path(flashtile.__file__).parent
    makers = {
        path.relative_to(root).as_posix(): re.findall(r"(?<!\w)AttentionProblem\(", path.read_text())
        for folder in ("torch", "jax")
        for path in (root / folder).rglob("*.py")
    }
    # a probe of a mask alone, and a problem of unknown sizes that is checked as one of known sizes
    assert {name for name, found in makers.items() if found} == {"torch/api/classify.py", "jax/symbolic.py"}
