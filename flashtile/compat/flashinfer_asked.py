"""What flashinfer's plans and runs are asked for: scores, scales and dtypes, and what nothing here honours."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashtile.compat.asked import options, refuse
from flashtile.errors import InvalidProblem
from flashtile.features.scores.softcap import Softcap
from flashtile.problem.number import plain, told
from flashtile.torch.call.stored import check_kind

# What plans may be told besides: decoding reads fixed_split_size, the others change no result here.
HINTS = frozenset({
    "use_fp16_qk_reduction", "non_blocking", "fixed_split_size", "seq_lens", "seq_lens_q", "block_tables",
    "max_token_per_sequence", "max_sequence_kv", "uniform_q_len", "qo_indptr_cpu", "kv_indptr_cpu", "data_type",
})  # fmt: skip
# What nothing here honours.
REFUSED = (
    "prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr", "v_indptr", "o_indptr",
    "use_token_head_sf", "rope_scale", "rope_theta", "custom_mask", "packed_custom_mask",
)  # fmt: skip


class How:
    """What a plan says of scores: the arguments of ours."""

    def __init__(
        self, name: str, causal: bool, window_left: int, sm_scale: float | None, logits_soft_cap: float | None,
        pos_encoding_mode: str, others: dict[str, Any],
    ):  # fmt: skip
        check_others(name, pos_encoding_mode, others)
        self.causal, self.window_left, self.scale = bool(causal), window_left_of(window_left), sm_scale
        self.score = (Softcap(logits_soft_cap),) if logits_soft_cap else ()

    def arguments(
        self, head_dim: int, scales: tuple[Any, Any] = (None, None), window_left: int | None = None
    ) -> dict[str, Any]:
        """scales: what q and k are multiplied by, numbers."""
        scale = 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale
        for factor in scales:
            scale = scale if factor is None else scale * factor
        left = self.window_left if window_left is None else window_left_of(window_left)
        window = None if left < 0 else (left, None)
        return dict(causal=self.causal, window=window, scale=scale, score=self.score, options=options())


def check_others(name: str, pos_encoding_mode: str, others: dict[str, Any]) -> None:
    unknown = sorted(others.keys() - HINTS - set(REFUSED))
    if unknown:
        raise TypeError(f"{name} has no argument {unknown[0]!r}.")
    reasons = {f"{n} is given; nothing here honours it": is_given(others.get(n)) for n in REFUSED}
    masks = "a mask by bits; give flashtile.attention_cached a mask, such as flashtile.Tree(parents) of drafts"
    reasons |= {masks: any(reasons.pop(f"{n} is given; nothing here honours it") for n in REFUSED[-2:])}
    where = f"pos_encoding_mode is {pos_encoding_mode}; rotate q and k by flashtile.ops.rotary, or score=Alibi(slopes)"
    refuse(name, {**reasons, where: pos_encoding_mode != "NONE"})


def is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, int) and value == 0)


def window_left_of(value: Any) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidProblem(f"window_left is {told(value)}; it must be an int, -1 for none.")
    return value


def check_dtype(name: str, wanted: torch.dtype | None, tensor: torch.Tensor, called: str) -> None:
    """Raise InvalidProblem unless the tensor is of the dtype that the plan says."""
    check_kind(called, tensor)
    if wanted is not None and wanted is not tensor.dtype:
        raise InvalidProblem(f"{called} is {tensor.dtype} and plan's {name} {wanted}; they must be equal.")


def check_numbers(**numbers: Any) -> None:
    """Raise InvalidProblem for scales that are neither numbers nor tensors."""
    for name, given in numbers.items():
        number = given if isinstance(given, torch.Tensor) else plain(given)
        if isinstance(number, bool) or not isinstance(number, (int, float, torch.Tensor, type(None))):
            raise InvalidProblem(f"{name} is {told(given)}; it must be a number or None.")


def refuse_run(name: str, numbers: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise NotSupported for scales that are tensors, and for what is not None."""
    check_numbers(**numbers)
    reasons = {
        f"{n} is a tensor; a number alone is multiplied into scores": True
        for n, x in numbers.items()
        if isinstance(x, torch.Tensor)
    }
    refuse(name, reasons | {f"{n} is given; caches have q's dtype": True for n, x in given.items() if x is not None})
