"""fp8 as flash-attention 3 has it: q, k and v in e4m3, and descales of each item's key/value heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashtile.errors import InvalidProblem, NotSupported, renamed
from flashtile.problem.options import DEFAULT
from flashtile.torch.call.stored import check_kind
from flashtile.torch.routes.library import define

NAMES = {"q_scale": "q_descale", "k_scale": "k_descale", "v_scale": "v_descale"}


def _refuse(gradient: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    reason = "inputs of torch.float8_e4m3fn have none; give 16 bits with Options(precision='fp8'), by flashtile.attention"
    raise NotSupported("the backward of version 3's e4m3", {"flashtile": [reason]})


# An operator, for a compiler traces a backward ahead of anybody who asks for it.
_REFUSED = define(
    "refuse_backward_of_e4m3(Tensor gradient, Tensor[] inputs) -> Tensor[]", _refuse,
    lambda gradient, inputs: [torch.empty_like(t) for t in inputs],
)  # fmt: skip


class _Forward(torch.autograd.Function):
    """A result as it is. As in version 3, inputs of e4m3 may require gradients, and have none: a backward says so."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(made)  # so that it is no view, which callers could not write over
        ctx.save_for_backward(*inputs)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *_REFUSED(gradients[0], ctx.saved_tensors)


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
        check_kind("q_descale", of_q)
        if of_q.dim() != 2 or of_q.shape[1] != k.shape[-2]:
            raise InvalidProblem(
                f"q_descale has shape {tuple(of_q.shape)}; it must be (batch, heads_kv), of {k.shape[-2]} heads."
            )
        given["q_scale"] = of_q.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
    options = replace(arguments.get("options") or DEFAULT, precision="fp8")
    wanted = [t for t in tensors if torch.is_grad_enabled() and getattr(t, "dtype", None) is q.dtype and t.requires_grad]
    apart = tuple(t.detach() if getattr(t, "dtype", None) is q.dtype else t for t in tensors) if wanted else tensors
    try:
        made = function(*apart, **{**arguments, **given, "options": options})
    except InvalidProblem as error:
        raise renamed(error, NAMES) from None
    if not wanted:
        return made
    return tuple(_Forward.apply(t, *wanted) for t in made) if isinstance(made, tuple) else _Forward.apply(made, *wanted)
