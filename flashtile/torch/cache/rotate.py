"""The rotation of new keys and of queries by their rows in a cache."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain
from flashtile.torch.call.stored import check_kind
from flashtile.torch.ops.run import run

Rotary = Any  # (cos, sin) or (cos, sin, interleaved)


def rotate(
    q: Any, k: torch.Tensor, rotary: Rotary, used: torch.Tensor, cu: torch.Tensor | None, backend: str | None
) -> tuple[Any, torch.Tensor, int]:
    """(q, k, rows of the tables): new keys, and queries where there are any, rotated by their rows in the cache."""
    if not isinstance(rotary, (tuple, list)) or len(rotary) not in (2, 3):
        is_what = f"has {len(rotary)} elements" if isinstance(rotary, (tuple, list)) else f"is a {type(rotary).__name__}"
        raise InvalidProblem(f"rotary {is_what}; it must be (cos, sin) or (cos, sin, interleaved).")
    cos, sin, *rest = rotary
    for name, tensor in (("rotary's cos", cos), ("rotary's sin", sin)):
        check_kind(name, tensor)
    if q is not None and q.shape[:-2] != k.shape[:-2]:
        raise InvalidProblem(
            f"q has shape {tuple(q.shape)} and append's k {tuple(k.shape)}; with rotary their tokens must be the same."
        )
    wide = k if cu is None else k[None]
    index = torch.arange(wide.shape[1], device=k.device, dtype=torch.int32)
    if cu is None:
        positions = used[:, None] + index
    elif used.shape[0]:
        item = torch.searchsorted(cu[1:].contiguous(), index, right=True).clamp(max=used.shape[0] - 1)
        positions = torch.where((index >= cu[0]) & (index < cu[-1]), used[item] + index - cu[item], 0)[None]
    else:
        positions = (index * 0)[None]
    interleaved = plain(rest[0]) if rest else False
    if isinstance(interleaved, int) and interleaved in (0, 1):
        interleaved = bool(interleaved)
    options: dict[str, Any] = dict(interleaved=interleaved, conjugate=False, offset=0, inplace=False)
    made: list[Any] = []
    for tensor in (q, k):
        if tensor is None:
            made.append(None)
            continue
        given = {"q": tensor if cu is None else tensor[None], "k": None, "cos": cos, "sin": sin, "positions": positions}
        (turned,) = run("rotary", given, options, backend)
        made.append(turned if cu is None else turned[0])
    return made[0], made[1], cos.shape[0]
