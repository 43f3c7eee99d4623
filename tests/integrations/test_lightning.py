"""Lightning's Trainer and Fabric, bf16-mixed: what the same steps by hand give."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

import lightning_fabric
import pytorch_lightning

PAGE = Path(__file__).parent.parent.parent / "docs" / "pytorch.md"
PRECISION = "bf16-mixed"


def documented() -> Any:
    """The module that the documentation shows."""
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "Lightning" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    torch.manual_seed(0)
    return names["Lit"]()


def batches() -> list[torch.Tensor]:
    return [torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def by_hand(loss_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """The documented module after a step with each batch."""
    model = documented()
    optimizer = model.configure_optimizers()
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def agree(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    """The same weights, all of which have moved."""
    for (name, a), b, first in zip(model.named_parameters(), expected.parameters(), documented().parameters(), strict=True):
        assert not torch.equal(a, first), name
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_two_steps_of_a_trainer(tmp_path: Path) -> None:
    model = documented()
    trainer = pytorch_lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, precision=PRECISION, default_root_dir=tmp_path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert trainer.global_step == 2
    agree(model, by_hand(lambda model, batch: model.training_step(batch, 0)))


def test_two_steps_of_fabric() -> None:
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, precision=PRECISION)
    made = documented()
    attention, optimizer = fabric.setup(made.attention, made.configure_optimizers())
    for batch in batches():
        loss = attention(batch).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    agree(made, by_hand(lambda model, batch: model.attention(batch).float().square().mean()))  # Fabric's modules return float32
