"""What is kept of a model: weights that are the model's own. The library has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashtile import Alibi, Options, Softcap, nn

CPU = Options(backend="cpu")


def made() -> nn.Attention:
    """With everything that is not learned: slopes, rotary angles, a cap, a window, dropout."""
    return nn.Attention(
        32, 4, 2, rotary_base=1e4, dropout_p=0.1, causal=True, window=(5, None), score=(Softcap(2.0), Alibi(torch.rand(4))),
        options=CPU,
    ).eval()  # fmt: skip


def test_a_state_dict_holds_projections_alone() -> None:
    module = made()
    assert set(module.state_dict()) == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    module(torch.randn(1, 7, 32))  # nothing is cached where state_dict would find it
    assert set(module.state_dict()) == set(dict(module.named_parameters()))
    assert not list(module.buffers())
    assert set(nn.RMSNorm(8).state_dict()) == {"weight"}


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    module, other, x = made(), made(), torch.randn(2, 9, 32)
    other.arguments = module.arguments
    safetensors.save_model(module, tmp_path / "model.safetensors")
    assert not torch.equal(other(x), module(x))
    assert safetensors.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(other(x), module(x))
