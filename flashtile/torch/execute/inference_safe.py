"""What is made in one call and kept for others: a call that learns may come after one under `torch.inference_mode`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from flashtile.torch.execute.plain import is_watched

Given = ParamSpec("Given")
Made = TypeVar("Made")


def lasting(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The same function, whose tensors autograd may save, wherever it is called; they have no history of gradients."""

    @wraps(function)
    def outside(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # the former alone would switch gradients on
            return function(*args, **kwargs)

    return outside


def keeps() -> bool:
    """Whether what is made now may be kept for later calls.

    Not while a graph is traced, nor in a dispatch mode, such as that of fake tensors: its tensors are good for nothing outside.
    """
    return not is_watched()
