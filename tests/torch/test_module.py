"""flashtile.nn.Attention beside torch's module and beside its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flashtile
from flashtile import InvalidProblem, Options, Softcap
from flashtile.nn import Attention

CPU = Options(backend="cpu")


def pair(**arguments: Any) -> tuple[Attention, torch.nn.MultiheadAttention]:
    """Ours and torch's with the same weights, biases that are not 0."""
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    ours = Attention(32, 4, options=CPU, **arguments)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def agree(ours: Attention, theirs: torch.nn.MultiheadAttention, got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same numbers, and the same gradients of all parameters."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    names = dict(ours.named_parameters())
    assert names.keys() == dict(theirs.named_parameters()).keys()
    weight = torch.linspace(-1, 1, got.numel()).view(got.shape)
    mine = torch.autograd.grad((got * weight).sum(), list(names.values()))
    true = torch.autograd.grad((expected * weight).sum(), [dict(theirs.named_parameters())[n] for n in names])
    for a, b in zip(mine, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_it_is_torchs_module() -> None:
    ours, theirs = pair()
    x, context = torch.randn(2, 9, 32), torch.randn(2, 13, 32)
    agree(ours, theirs, ours(x), theirs(x, x, x)[0])
    agree(ours, theirs, ours(x, context), theirs(x, context, context)[0])


def test_causal_and_padding() -> None:
    ours, theirs = pair(causal=True)
    x = torch.randn(2, 9, 32)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 6:] = False
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, key_padding_mask=~keep, attn_mask=hidden)[0]
    agree(ours, theirs, ours(x, padding_mask=keep), expected)


def test_blocks_and_padding() -> None:
    ids = (torch.arange(9) // 4).to(torch.int32)
    ours, theirs = pair(mask=flashtile.Blocks.build(flashtile.Document(ids), 9, 9))
    x = torch.randn(2, 9, 32)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 5:7] = False
    expected = theirs(x, x, x, key_padding_mask=~keep, attn_mask=ids[:, None] != ids)[0]
    agree(ours, theirs, ours(x, padding_mask=keep), expected)


ALL = dict(heads_kv=2, head_dim=16, bias=False, qk_norm=True, rotary_base=100.0, sinks=True)


def made(**changes: Any) -> Attention:
    torch.manual_seed(0)
    module = Attention(32, 4, causal=True, window=(5, None), score=(Softcap(2.0),), options=CPU, **{**ALL, **changes})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def test_every_part() -> None:
    """Grouped heads, norm, rotary, sinks, window, softcap: what the parts give one after another."""
    module, x = made(), torch.randn(2, 9, 32)
    q, k, v = F.linear(x, module.in_proj_weight).unflatten(-1, (8, 16)).split((4, 2, 2), 2)
    assert module.q_norm is not None
    assert module.k_norm is not None
    q = F.rms_norm(q, (16,), module.q_norm.weight, 1e-6)
    k = F.rms_norm(k, (16,), module.k_norm.weight, 1e-6)
    turn = torch.polar(torch.ones(9, 8), torch.outer(torch.arange(9.0), 100.0 ** (-torch.arange(8) / 8)))[:, None]
    q, k = (torch.view_as_real(torch.complex(*t.chunk(2, -1)) * turn).movedim(-1, -2).flatten(-2) for t in (q, k))
    out = flashtile.attention(
        q, k, v, causal=True, window=(5, None), score=(Softcap(2.0),), sink=module.sink, options=CPU
    )  # fmt: skip
    torch.testing.assert_close(module(x), F.linear(out.flatten(2), module.out_proj.weight), rtol=1e-4, atol=1e-3)
    module(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "rotary_base": None}], ids=["parts", "packed"])
def test_varlen_is_each_sequence_by_itself(changes: dict[str, Any]) -> None:
    module, x = made(**changes), torch.randn(17, 32)
    cu_seqlens = torch.tensor([0, 6, 6, 17], dtype=torch.int32)
    got = module(x, cu_seqlens=cu_seqlens, max_seqlen=11)
    expected = torch.cat([module(x[None, a:b])[0] for a, b in ((0, 6), (6, 17))])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_dropout_while_training_alone() -> None:
    module, x = Attention(32, 4, dropout_p=0.5, options=CPU), torch.randn(1, 9, 32)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    assert "dropout_p=0.5" in repr(module)


def test_compiled_without_a_graph_break() -> None:
    torch._dynamo.reset()
    module, x = made(), torch.randn(2, 9, 32)
    keep = torch.arange(18).view(2, 9) % 5 != 1
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, padding_mask=keep), module(x, padding_mask=keep), rtol=1e-4, atol=1e-3)


def test_compiled_for_other_lengths_before_it_meets_padding() -> None:
    torch._dynamo.reset()
    module = made()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seqlen in (9, 7):
        compiled(torch.randn(2, seqlen, 32))
    x, keep = torch.randn(2, 7, 32), torch.arange(14).view(2, 7) % 5 != 1
    torch.testing.assert_close(compiled(x, padding_mask=keep), module(x, padding_mask=keep), rtol=1e-4, atol=1e-3)


def padded(seqlen_k: int, context: Any = None) -> Any:
    return Attention(32, 4, options=CPU)(torch.randn(2, 9, 32), context, padding_mask=torch.ones(2, seqlen_k, dtype=torch.bool))


@pytest.mark.parametrize("name", ["nope", "return_lse", "sink", "dropout"])
def test_unknown_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^Attention\(\) got an unexpected keyword argument '{name}'"):
        Attention(32, 4, **{name: None})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(30, 4), "width must be a multiple of heads"),
        (lambda: Attention(32, 4, 3), "heads must be a multiple of heads_kv"),
        (lambda: Attention(12, 4, rotary_base=1e4), "must be even for rotary"),
        (lambda: Attention(32, 4, rotary_base=-1.0), "rotary_base is -1.0; it must be a positive, finite number or None"),
        (lambda: Attention(0, 4), "width is 0; it must be a positive int"),
        (lambda: Attention(32, 4.0), "heads is 4.0; it must be a positive int"),  # type: ignore[arg-type]
        (lambda: Attention(32, 4, 0), "heads_kv is 0; it must be a positive int"),
        (lambda: Attention(32, 4, head_dim=-8), "head_dim is -8; it must be a positive int"),
        (lambda: Attention(32, 4, dropout_p=1.0), "dropout p is 1.0; it must be a number, at least 0 and below 1"),
        (lambda: Attention(32, 4, causal=1), "causal is 1; it must be True or False"),
        (lambda: Attention(32, 4, window=3), "window is 3; it must be a pair"),
        (lambda: Attention(32, 4, window=(-1, 0)), "window left is -1; it must not be negative"),
        (lambda: Attention(32, 4, mask=torch.ones(9, 9)), "mask is a Tensor; it must be a flashtile mask such as Band"),
        (lambda: Attention(32, 4, score=3.0), "it must be a sequence of score modifiers"),
        (lambda: Attention(32, 4, score=(3.0,)), "score holds a float; it must hold score modifiers"),
        (lambda: Attention(32, 4, scale="1"), "scale is '1'; it must be a number or None"),
        (lambda: Attention(32, 4, options=Options(backend="gpu")), "backend is 'gpu'; it must be one of hopper, triton, cpu"),
        (lambda: Attention(32, 4, options="cpu"), "options is a str; it must be a flashtile.Options"),
        (lambda: Attention(32, 4)(torch.randn(9, 32)), r"it must be \(batch, seqlen, 32\)"),
        (lambda: Attention(32, 4, rotary_base=1e4)(torch.randn(1, 9, 32), torch.randn(1, 9, 32)), "has rotary"),
        (
            lambda: Attention(32, 4)(torch.randn(2, 9, 32), padding_mask=torch.zeros(2, 9)),
            "padding_mask is torch.float32; it must be bool",
        ),
        (lambda: Attention(32, 4)(torch.randn(2, 9, 32), max_seqlen=9), "max_seqlen is 9 without cu_seqlens"),
        (lambda: padded(8), r"padding_mask has shape \(2, 8\); it must be \(batch, seqlen_k\) = \(2, 9\)"),
        (lambda: padded(1), r"padding_mask has shape \(2, 1\)"),
        (lambda: padded(10), r"padding_mask has shape \(2, 10\)"),
        (
            lambda: padded(9, torch.randn(2, 7, 32)),
            r"padding_mask has shape \(2, 9\); it must be \(batch, seqlen_k\) = \(2, 7\)",
        ),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        make()
