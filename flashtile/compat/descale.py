"""fp8 as flash-attention 3 has it: q, k and v in e4m3, and descales of each item's key/value heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashtile.errors import InvalidProblem, renamed
from flashtile.problem.options import DEFAULT

NAMES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}


def attend_descaled(
    function: Callable[..., Any], tensors: tuple[Any, ...], descales: tuple[Any, ...], arguments: dict[str, Any]
) -> Any:
    """`function` (`attention` or `attention_varlen`) of q, k, v, and what follows them by place, with those descales, float32
    (batch, heads_kv), that are not None; q_descale too counts key/value heads. out is bfloat16.
    """
    q, k = tensors[:2]
    stored = isinstance(q, torch.Tensor) and q.dtype is torch.float8_e4m3fn
    given = {ours: scale for ours, scale in zip(NAMES, descales, strict=True) if scale is not None}
    if not stored:
        if given:
            name = NAMES[next(iter(given))]
            raise InvalidProblem(f"{name} is given and q is {getattr(q, 'dtype', type(q).__name__)}; it must be float8_e4m3fn.")
        return function(*tensors, **arguments)
    of_q = given.get("q_scale")
    if of_q is not None and isinstance(k, torch.Tensor):
        if of_q.dim() != 2 or of_q.shape[1] != k.shape[-2]:
            raise InvalidProblem(
                f"q_descale has shape {tuple(of_q.shape)}; it must be (batch, heads_kv), of {k.shape[-2]} heads."
            )
        given["q_scale"] = of_q.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
    options = replace(arguments.get("options") or DEFAULT, precision="fp8")
    try:
        return function(*tensors, **{**arguments, **given, "options": options})
    except InvalidProblem as error:
        raise renamed(error, NAMES) from None
