"""Other libraries' module names: put in place, imported from, taken out."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import flashtile
from flashtile import InvalidProblem
from flashtile.compat import flash_attn, flash_attn_3, install, trees, uninstall
from flashtile.compat.flashinfer import append_paged_kv_cache, single_decode_with_kv_cache
from flashtile.compat.flashinfer_mla import BatchMLAPagedAttentionWrapper
from flashtile.compat.flex import flex_attention
from flashtile.compat.xformers import memory_efficient_attention


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    for library in list(trees._kept):
        uninstall(library)


@pytest.mark.parametrize("library", trees.TREES)
def test_every_module_is_importable_with_its_names(library: str) -> None:
    install(library)
    for name, sources in trees.TREES[library].items():
        module = importlib.import_module(name)
        assert importlib.util.find_spec(name) is module.__spec__
        for _, names in sources:
            for entry in names:
                assert hasattr(module, entry.partition("=")[0])
    uninstall(library)
    for name in trees.TREES[library]:
        assert name not in sys.modules


def test_imports_see_it() -> None:
    install("flash_attn")
    install("flash_attn")  # changes nothing
    import flash_attn  # pyright: ignore
    from flash_attn import flash_attn_func  # pyright: ignore
    from flash_attn.bert_padding import unpad_input  # pyright: ignore
    from flash_attn.ops.triton.layer_norm import rms_norm_fn  # pyright: ignore
    from flash_attn_2_cuda import bwd  # pyright: ignore

    from flashtile.compat import bert_padding, flash_attn_passes, layer_norm
    from flashtile.compat.flash_attn import flash_attn_func as ours

    assert flash_attn_func is ours
    assert unpad_input is bert_padding.unpad_input
    assert rms_norm_fn is layer_norm.rms_norm_fn
    assert bwd is flash_attn_passes.flash_attn_gpu.bwd
    assert flash_attn.__version__.startswith("2.")
    with pytest.raises(ImportError, match="no_such_name"):
        from flash_attn import no_such_name  # pyright: ignore  # noqa: F401
    assert not hasattr(flash_attn, "no_such_name")
    with pytest.raises(AttributeError, match=r"flashtile's translation and has no attribute 'other'; it has bert_padding, .*"
                                             r"uninstall\('flash_attn'\) gives back"):  # fmt: skip
        _ = flash_attn.other


def test_what_was_there_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, Any] = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.own", "flash_attn_other")}
    for name, module in before.items():
        monkeypatch.setitem(sys.modules, name, module)
    install("flash_attn")
    assert sys.modules["flash_attn"] is not before["flash_attn"]
    assert "flash_attn.own" not in sys.modules
    assert sys.modules["flash_attn_other"] is before["flash_attn_other"]
    uninstall("flash_attn")
    for name, module in before.items():
        assert sys.modules[name] is module


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidProblem, match=r"library is 'torch'; it must be one of flash_attn"):
        install("torch")
    with pytest.raises(InvalidProblem, match="'flash_attn'; it is not installed"):
        uninstall("flash_attn")
    monkeypatch.setitem(trees.TREES, "other", {"flash_attn": ()})
    install("other")
    with pytest.raises(
        InvalidProblem, match=r"'other' is installed, which has modules of the same names; uninstall\('other'\)"
    ):
        install("flash_attn")


def test_padding() -> None:
    from flashtile.compat.bert_padding import (
        index_first_axis_residual,
        pad_input,
        unpad_input,
        unpad_input_for_concatenated_sequences,
    )

    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    keep = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, indices, cu, longest, used = unpad_input(x, keep.bool())
    assert torch.equal(tokens, x[keep.bool()])
    assert cu.tolist() == [0, 2, 2, 6]
    assert cu.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (4, [2, 0, 4])
    whole = pad_input(tokens, indices, 3, 5)
    assert torch.equal(whole, x * keep[..., None, None])
    weight = torch.randn_like(whole)
    assert torch.equal(torch.autograd.grad((whole * weight).sum(), x)[0], weight * keep[..., None, None])
    _, _, cu, longest, used = unpad_input(x, keep, unused)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 3, 7], 4, [2, 0, 4])
    rows = torch.tensor([[2, 2, 0, 0, 0], [5, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, indices, cu, longest = unpad_input_for_concatenated_sequences(x, rows)
    assert (cu.tolist(), longest) == ([0, 2, 4, 9], 5)
    assert torch.equal(tokens, torch.cat([x[0, :4], x[1]]))
    flat = x.detach().flatten(0, 1).requires_grad_()
    some, rest = index_first_axis_residual(flat, indices)
    (grad,) = torch.autograd.grad(some.sum() + 2 * rest.sum(), flat)
    assert torch.equal(grad[:, 0, 0], 2.0 + torch.isin(torch.arange(15), indices))


def test_errors_say_which_argument_is_no_tensor() -> None:
    """Whatever they ask of it first: its dtype, device or axes."""
    some, ints, pools = torch.randn(2, 4, 2, 16), torch.zeros(2, dtype=torch.int32), (torch.randn(2, 4, 2, 16),) * 2
    table = torch.arange(2, dtype=torch.int32)[:, None]
    mla = BatchMLAPagedAttentionWrapper()
    mla.plan(torch.arange(3).int(), torch.arange(3).int(), torch.arange(2).int(), ints + 4, 2, 16, 8, 4, True, 0.1)
    cached = partial(flash_attn.flash_attn_with_kvcache, cache_seqlens=ints, block_table=table)
    eight = some.to(torch.float8_e4m3fn)
    calls: dict[str, Callable[[Any], Any]] = {
        "q": lambda no: cached(no, *pools),
        "k": lambda no: cached(some, *pools, no, some),
        "v": lambda no: cached(some, *pools, some, no),
        "q_descale": lambda no: flash_attn_3.flash_attn_func(eight, eight, eight, q_descale=no),
        "query": lambda no: memory_efficient_attention(no, some, some),
        "key": lambda no: flex_attention(some, no, some),
        "append_key": lambda no: append_paged_kv_cache(no, some[0], ints, ints, pools, ints, ints, ints),
        "q_nope": lambda no: mla.run(no, some, *pools),
        "ckv_cache": lambda no: mla.run(some, some, no, some),
        "outs[0]": lambda no: flashtile.merge((no,), (some,)),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidProblem, match=rf"^{re.escape(name)} is a list; it must be a torch\.Tensor"):
            call([1.0])
    with pytest.raises(InvalidProblem, match=r"^v is a list"):
        single_decode_with_kv_cache(some[0, 0], some[0], [1.0])  # pyright: ignore[reportArgumentType]
