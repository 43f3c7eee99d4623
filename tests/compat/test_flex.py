"""FlexAttention's signature against PyTorch's own, forward, and against the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from flashtile import Bias, InvalidProblem, NotSupported, Softcap
from flashtile.compat.flex import flex_attention
from flashtile.compat.score_mod import modifiers_of
from tests.compat.formula import attend
from tests.compat.test_flash_attn import close
from tests.compat.test_torch_signatures import heads_first

BATCH, HEADS, ROWS, KEYS = 2, 3, 5, 8


def mods(place: torch.device) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Functions, with the tensors that they capture."""
    whole, rows, heads, keys = heads_first((BATCH, HEADS, ROWS, KEYS), (KEYS, ROWS), (HEADS,), (KEYS + 3,), place=place)
    return {
        "identity": (lambda s, b, h, q, k: s, []),
        "factor": (lambda s, b, h, q, k: -2 * s / 3.0, []),
        "softcap": (lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), []),
        "tanh": (lambda s, b, h, q, k: (s * 0.3).tanh() * 4, []),
        "element": (lambda s, b, h, q, k: s + whole[b, h, q, k], [whole]),
        "turned": (lambda s, b, h, q, k: rows[k, q] + s, [rows]),
        "head": (lambda s, b, h, q, k: s - heads[h], [heads]),
        "arithmetic": (lambda s, b, h, q, k: (s * 0.5 + torch.exp(heads[h]) * k).to(torch.float32), [heads]),
        "keys": (lambda s, b, h, q, k: torch.add(s, keys[k + 2] * 2) + (q > 2), [keys]),
        "slope": (lambda s, b, h, q, k: s + heads[h] * (k - q), [heads]),
        "slopes": (lambda s, b, h, q, k: s - (q - k) * torch.exp2(-(h + 1.0)) / 2 + -(k - q).float(), []),
        "minus": (lambda s, b, h, q, k: heads[h] - s, [heads]),
        "several": (lambda s, b, h, q, k: 3 * torch.tanh((s + rows[k, q]) / 3) + whole[b, h, q, k], [rows, whole]),
    }


@pytest.mark.parametrize("name", mods(torch.device("cpu")))
def test_score_mod(through: str, place: torch.device, name: str) -> None:
    mod, captured = mods(place)[name]
    packs = heads_first((BATCH, HEADS, ROWS, 16), (BATCH, HEADS, KEYS, 16), (BATCH, HEADS, KEYS, 16), place=place)
    out, lse = flex_attention(*packs, mod, scale=0.4, return_lse=True)
    with torch.no_grad():
        how = dict(scale=0.4, return_aux=theirs.AuxRequest(lse=True))
        plain, aux = theirs.flex_attention(*(t.detach() for t in packs), mod, **how)  # pyright: ignore[reportArgumentType]
    close(out, plain)
    close(lse, aux.lse)
    b, h, q, k = (torch.arange(n, device=place).view([-1 if i == axis else 1 for i in range(4)])
                  for axis, n in enumerate((BATCH, HEADS, ROWS, KEYS)))  # fmt: skip
    scores = mod(torch.einsum("bhqd,bhkd->bhqk", packs[0], packs[1]) * 0.4, b, h, q, k)
    true = scores.double().softmax(-1) @ packs[2].double()
    dout = torch.randn_like(out)
    leaves = [*packs, *captured]
    wanted = torch.autograd.grad(true, leaves, dout.double())
    for mine, other in zip(torch.autograd.grad(out, leaves, dout), wanted, strict=True):
        close(mine, other)


def test_what_is_recognised(place: torch.device) -> None:
    sizes = (BATCH, HEADS, ROWS, KEYS)
    functions = mods(place)
    assert modifiers_of(functions["softcap"][0], sizes, place) == (1.0, (Softcap(2.0),))
    assert modifiers_of(functions["tanh"][0], sizes, place) == (1.2, (Softcap(4.0),))
    assert modifiers_of(functions["factor"][0], sizes, place) == (-2 / 3, ())
    factor, (bias,) = modifiers_of(functions["element"][0], sizes, place)
    assert isinstance(bias, Bias)
    assert bias.bias.data_ptr() == functions["element"][1][0].data_ptr()  # nothing is copied
    assert modifiers_of(functions["head"][0], sizes, place)[1][0].bias.shape == (1, HEADS, 1, 1)
    assert factor == 1.0


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "relu": (lambda s, b, h, q, k: s.relu(), "it changes the score by relu"),
    "mask": (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), "it changes the score by where"),
    "square": (lambda s, b, h, q, k: s * s, "it uses the score twice"),
    "positions": (lambda s, b, h, q, k: s - (k - q).abs() * 0.5, r"of another form than slope \* \(kv_idx - q_idx\)"),
    "product": (lambda s, b, h, q, k: s + (k - q) * k, "of another form than slope"),
    "by-position": (lambda s, b, h, q, k: s * (q + 1), "something else than a number"),
    "inverse": (lambda s, b, h, q, k: 1.0 / s, "something else than a number"),
    "branch": (lambda s, b, h, q, k: s if q > 3 else s * 2, "it asks for a value"),
    "item": (lambda s, b, h, q, k: s + q.item(), "it asks for a value"),
    "without": (lambda s, b, h, q, k: q * 1.0, "its result does not depend on the score"),
    "later-factor": (lambda s, b, h, q, k: (s + q) * 2, "it multiplies a changed score"),
    "later-factor-and-sum": (lambda s, b, h, q, k: (s + q) * 2 + k, "it multiplies a changed score"),
    "other-cap": (lambda s, b, h, q, k: torch.tanh((s + q) / 2), r"other than by cap \* tanh"),
    "negative-cap": (lambda s, b, h, q, k: -torch.tanh(s), "which is not positive"),
    "alpha": (lambda s, b, h, q, k: torch.add(s, q, alpha=2), "it changes the score by add"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_score_mods(name: str) -> None:
    mod, reason = REFUSED[name]
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(NotSupported, match=reason):
        flex_attention(q, q, q, mod)


def test_block_mask(through: str, place: torch.device) -> None:
    packs = heads_first((1, 4, 140, 16), (1, 2, 150, 16), (1, 2, 150, 16), place=place)

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & ((k % 3 != 1) | (q - k < 9))

    block_mask = theirs.create_block_mask(sees, None, None, 140, 150, device=str(place))
    row, key = torch.arange(140)[:, None], torch.arange(150)
    turned = [t.transpose(1, 2) for t in packs]
    true, lse, _ = attend(*turned, sees(0, 0, row, key), softcap=2.0)
    for _ in range(2):  # the second call finds the blocks of the first
        out, aux = flex_attention(
            *packs, lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), block_mask, enable_gqa=True,
            return_aux=theirs.AuxRequest(lse=True),
        )  # fmt: skip
        close(out, true.transpose(1, 2))
        close(aux.lse, lse)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(true.transpose(1, 2), packs, dout.double())
    for mine, other in zip(torch.autograd.grad(out, packs, dout), wanted, strict=True):
        close(mine, other)


def test_another_mask_mod_of_a_block_mask_that_was_met(place: torch.device) -> None:
    """As decoding sets one at every step: what is visible in part goes by it, in the blocks that there are."""
    (q,) = heads_first((1, 2, 140, 16), place=place)
    block_mask = theirs.create_block_mask(lambda b, h, q, k: q >= k, None, None, 140, 140, device=str(place))
    for reach in (140, 5):
        block_mask.mask_mod = lambda b, h, q, k, reach=reach: (q >= k) & (q - k < reach)
        seen = block_mask.mask_mod(0, 0, torch.arange(140)[:, None], torch.arange(140))
        for _ in range(2):
            out = flex_attention(q, q, q, block_mask=block_mask)
            close(out, attend(*[q.transpose(1, 2)] * 3, seen)[0].transpose(1, 2))


def test_refusals() -> None:
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 6, 16)
    with pytest.raises(InvalidProblem, match="key has 2 heads and query 4"):
        flex_attention(q, k, k)
    with pytest.raises(InvalidProblem, match=r"query has shape \(4, 5, 16\)"):
        flex_attention(q[0], k, k)
    with pytest.raises(NotSupported, match="kernel_options are given"):
        flex_attention(q, q, q, kernel_options={"BLOCK_M": 64})
    with pytest.raises(NotSupported, match="max_scores"):
        flex_attention(q, q, q, return_aux=theirs.AuxRequest(max_scores=True))
    assert flex_attention(q, k, k, enable_gqa=True).shape == q.shape
