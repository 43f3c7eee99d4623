"""The example trains."""

from __future__ import annotations

from examples.jax_gpt import train


def test_the_loss_falls_by_half() -> None:
    losses = train(60)
    assert losses[-1] < losses[0] / 2, losses[::10]
