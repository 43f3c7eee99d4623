"""FlexAttention's signature against PyTorch's own, forward, and against the formula."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from flashtile import Bias, InvalidProblem, NotSupported, Options, Softcap
from flashtile.compat import asked
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
    "branch": (lambda s, b, h, q, k: s if q > 3 else s * 2, "it asks for a value"),
    "item": (lambda s, b, h, q, k: s + q.item(), "it asks for a value"),
    "numpy": (lambda s, b, h, q, k: s + float(k.numpy()), "it asks for a value"),
    "list": (lambda s, b, h, q, k: s * torch.tensor([q, k]).sum(), "it makes a tensor of a list of values"),
    "list-as": (lambda s, b, h, q, k: s * torch.as_tensor((q, k)).sum(), "it makes a tensor of a list of values"),
    "list-of-a-type": (lambda s, b, h, q, k: s * torch.FloatTensor([q, k]).sum(), "it asks for a value"),
    "list-index": (lambda s, b, h, q, k: s * torch.ones(9)[[q, 0], :1].sum(), "it indexes by a list of values"),
    "random": (lambda s, b, h, q, k: s + torch.rand(()), "it draws random numbers"),
    "boolean-index": (lambda s, b, h, q, k: s + torch.ones(4)[(q > k).expand(4)].sum(), "it indexes a tensor by a boolean"),
    "writes": (lambda s, b, h, q, k: s + WRITTEN.add_(1), "it changes a captured tensor in place"),
    "own-gradient": (lambda s, b, h, q, k: OwnGradient.apply(s), "it has a gradient of its own, OwnGradient"),
    "many-numbers": (lambda s, b, h, q, k: (s * torch.ones(100)).sum() / 100, "the score meets a tensor of 100 numbers"),
}
WRITTEN = torch.zeros(())


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


@pytest.mark.parametrize("name", REFUSED)
def test_refused_score_mods(name: str) -> None:
    mod, reason = REFUSED[name]
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(NotSupported, match=reason):
        flex_attention(q, q, q, mod)
    assert not WRITTEN.any()


def test_what_kernels_do_not_compute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(asked, "DEFAULT", Options(backend="triton"))
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(NotSupported, match=r"formula for kernels: it computes prims\.atan2, which they have no line for"):
        flex_attention(q, q, q, lambda s, b, h, q, k: torch.atan2(s, k + 1.0))


@pytest.mark.parametrize(
    ("mod", "reason"),
    [
        (lambda s, b, h, q, k: 3.0, "score_mod returns a float; it must return a tensor of no dimensions"),
        (lambda s, b, h, q, k: s + torch.ones(1), r"score_mod returns the shape \(1,\)"),
        (lambda s, b, h, q, k: s * 1j, "it must return a real number"),
        (lambda s, b, h, q, k: s + torch.ones(3)[k], "indexes a tensor of shape .3,. by kv_idx, which goes to 3"),
        (lambda s, b, h, q, k: s + torch.ones(3)[k + 1].exp(), "score_mod indexes beyond a tensor"),
    ],
)
def test_score_mods_without_meaning(mod: Any, reason: str) -> None:
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(InvalidProblem, match=reason):
        flex_attention(q, q, q, mod)


def test_a_mask_mod_without_meaning() -> None:
    q = torch.randn(1, 1, 4, 16)
    block_mask = theirs.create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    for mask_mod, error, reason in (
        (lambda b, h, q, k: q - k, InvalidProblem, "mask_mod returns torch.int64; it must return a boolean"),
        (lambda b, h, q, k: q.item() >= k, NotSupported, "flex_attention with this mask_mod.*\n.*it asks for a value"),
    ):
        block_mask.mask_mod = mask_mod
        with pytest.raises(error, match=reason):
            flex_attention(q, q, q, block_mask=block_mask)


def test_the_dtype_that_a_score_mod_is_shown_is_the_queries() -> None:
    """As in torch: `score.dtype` is q's, though the score itself is float32; conversions are made as they are said."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 16).bfloat16()
    table = torch.randn(2, 6)
    for mod in (
        lambda s, b, h, q, k: s + table[h, k].to(s.dtype),
        lambda s, b, h, q, k: (s * 8).to(s.dtype).float() / 8,
        lambda s, b, h, q, k: s.to(torch.bfloat16) + table[h, k],
        lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo((s * 2).dtype).min / 2),
        lambda s, b, h, q, k: s * (2 if (s + table[h, k]).dtype == torch.float32 else 3),
        lambda s, b, h, q, k: s * (2 if s.float().dtype == torch.float32 else 3) * (1 if q.dtype == torch.int32 else 2),
    ):
        with torch.no_grad():
            wanted, lse = theirs.flex_attention(q, k, v, mod, return_lse=True)  # pyright: ignore[reportArgumentType]
            out, mine = flex_attention(q, k, v, mod, return_lse=True)
        torch.testing.assert_close(mine, lse.float(), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


def test_positions_cost_no_memory_and_no_gradient_is_lost(through: str, place: torch.device) -> None:
    """Arithmetic on what queries and keys have each is done at every score: no tensor is as large as all of them."""
    q, k, v, left, right = heads_first((1, 2, 40, 16), (1, 2, 48, 16), (1, 2, 48, 16), (40,), (48,), place=place)
    ids = (torch.arange(48, device=place) // 9).to(torch.int32)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        far = (i - j).abs() * 0.01 + torch.exp(left[i] * 0.1) * right[j]
        return torch.where(ids[i] == ids[j], s * 0.5 + far, s - 3.0)

    _, (modifier,) = modifiers_of(mod, (1, 2, 40, 48), place)
    sizes = [t.numel() for t in modifier.tensors(1, 2)]
    assert max(sizes) == 48
    out = flex_attention(q, k, v, mod)
    at = [torch.arange(n, device=place) for n in (40, 48)]
    scores = q.double() @ k.double().mT / 4
    far = (at[0][:, None] - at[1]).abs() * 0.01 + torch.exp(left.double() * 0.1)[:, None] * right.double()
    scores = torch.where(ids[:40, None] == ids, scores * 0.5 + far, scores - 3.0)
    true = scores.softmax(-1) @ v.double()
    close(out, true)
    leaves, dout = [q, k, v, left, right], torch.randn_like(out)
    for mine, other in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(true, leaves, dout.double()), strict=True
    ):
        close(mine, other)


def test_numbers_and_tensors_of_a_score_mod_change_without_another_modifier(place: torch.device) -> None:
    def made(number: float, table: torch.Tensor) -> Any:
        return modifiers_of(lambda s, b, h, q, k: torch.relu(s * number - 0.5) + table[k] * s, (1, 1, 4, 5), place)[1][0]

    first, second = made(2.0, torch.ones(5, device=place)), made(3.0, torch.zeros(5, device=place))
    assert type(first) is type(second)
    assert (first.scalars(), second.scalars()) == ((2.0, 0.5), (3.0, 0.5))


def test_a_large_addend_is_made_in_parts(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    (table, w) = heads_first((6, 4), (5, 4), place=place)
    q, k = torch.randn(2, 1, 1, 6, 16, device=place)
    mod = lambda s, b, h, i, j: s + torch.relu(table[i] * w[j]).sum()  # noqa: E731
    results: list[list[torch.Tensor]] = []
    for most in (2**24, 64):
        monkeypatch.setattr("flashtile.torch.api.spread.MOST_AT_ONCE", most)
        out = flex_attention(q, k[:, :, :5], k[:, :, :5], mod)
        results.append([out, *torch.autograd.grad(out.square().sum(), [table, w])])
    for mine, other in zip(*results, strict=True):
        close(mine, other)
    assert results[0][1].any()


def test_a_mask_mod_goes_by_items_and_heads_that_its_blocks_do_not(through: str, place: torch.device) -> None:
    """As torch has it: the lists were made for one, the function is asked of each."""
    q, k, v = heads_first((2, 3, 140, 16), (2, 3, 140, 16), (2, 3, 140, 16), place=place)
    reach = torch.tensor([[3, 50, 200], [130, 20, 1]], device=place)
    for goes_by in (
        lambda b, h, i, j: (i >= j) & (i - j < reach[b, h]),
        lambda b, h, i, j: (i >= j) & (i - j < reach[1][h]),
    ):
        block_mask = theirs.create_block_mask(goes_by, None, None, 140, 140, device=str(place))
        places = product(range(2), range(3), range(0, 140, 23), range(140))
        seen = torch.tensor([bool(goes_by(*at)) for at in places]).view(2, 3, -1, 140)
        out = flex_attention(q, k, v, block_mask=block_mask)[:, :, ::23]
        scores = (q[:, :, ::23].double() @ k.double().mT / 4).masked_fill(~seen.to(place), -torch.inf)
        close(out, scores.softmax(-1) @ v.double())


def test_a_mask_mod_s_tensor_that_is_written_to_is_read_again(place: torch.device) -> None:
    (q,) = heads_first((1, 1, 40, 16), place=place)
    ids = torch.zeros(40, dtype=torch.int64, device=place)
    block_mask = theirs.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 40, 40, device=str(place))
    block_mask.full_kv_num_blocks = block_mask.full_kv_indices = None
    block_mask.kv_num_blocks.fill_(1)
    for split in (0, 17):
        ids[split:] = 1
        out = flex_attention(q, q, q, block_mask=block_mask)
        close(out, attend(*[q.transpose(1, 2)] * 3, ids[:, None] == ids)[0].transpose(1, 2))


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


@pytest.mark.parametrize("kind", ["addend", "general"])
def test_score_mods_within_torch_func_and_torch_compile(kind: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    table, rows = torch.randn(2, 6), torch.randn(6, 3)

    def made(captured: torch.Tensor) -> Any:
        if kind == "addend":
            return lambda s, b, h, i, j: s + captured[h, j] + torch.dot(rows[i], rows[j])
        return lambda s, b, h, i, j: torch.relu(s) * captured[h][j] + torch.dot(rows[i], rows[j]) * (i - j).abs()

    def mine(q: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, made(captured))

    def plain(q: torch.Tensor, captured: torch.Tensor) -> torch.Tensor:
        s, dots, wide = q @ k.mT / 8**0.5, rows @ rows.T, captured[:, None]
        far = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        return (s + wide + dots if kind == "addend" else s.relu() * wide + dots * far).softmax(-1) @ v

    both = [torch.func.grad(lambda *given, f=f: f(*given).square().sum(), (0, 1))(q, table) for f in (mine, plain)]
    for gradient, other in zip(*both, strict=True):
        close(gradient, other)
    tables = torch.stack([table, table * 2])
    close(torch.vmap(mine, (None, 0))(q, tables), torch.vmap(plain, (None, 0))(q, tables))
    close(torch.compile(mine)(q, table), plain(q, table))
    with torch.inference_mode():
        close(mine(q, table), plain(q, table))


def test_a_score_mod_that_is_first_met_in_inference_has_its_gradients_later(through: str, place: torch.device) -> None:
    (q,) = heads_first((1, 1, 5, 8), place=place)
    mod = lambda s, b, h, i, j: torch.sigmoid(s * 3.0) * (i - j * 2).cos()  # noqa: E731
    with torch.inference_mode():
        first = flex_attention(q, q, q, mod)
    out = flex_attention(q, q, q, mod)
    at = torch.arange(5, device=place)
    true = (torch.sigmoid(q @ q.mT / 8**0.5 * 3.0) * (at[:, None] - at * 2).cos()).softmax(-1) @ q
    close(first, true)
    close(torch.autograd.grad(out.square().sum(), q)[0], torch.autograd.grad(true.square().sum(), q)[0])
