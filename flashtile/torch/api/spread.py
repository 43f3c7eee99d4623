"""Values that functions of scalars make, as tensors over all scores (`recording.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod

import torch
from torch.utils.checkpoint import checkpoint

from flashtile.errors import InvalidProblem
from flashtile.torch.api.recording import ATEN, AXES, INPUT, Node, ancestors, evaluate, plainly, taken

MOST_AT_ONCE = 2**24  # numbers of a value's largest part that are made at once: 64 MiB of float32
Sizes = tuple[int, int, int, int]  # of AXES


def mapped(function: Callable[..., torch.Tensor], axes: Sequence[Sequence[int | None]]) -> Callable[..., torch.Tensor]:
    """`function` of scalars, mapped once for each row of `axes`, the last innermost: which axis of each argument, or None."""
    for row in reversed(axes):
        function = torch.vmap(function, in_dims=tuple(row))

    def everywhere(*given: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:  # operators run where torch.func is switched off
            for key in ("DynamicLayerFrontMode", "DynamicLayerBackMode", "VmapMode", "Batched"):
                key = getattr(torch._C.DispatchKey, f"FuncTorch{key}")
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            return function(*given)

    return everywhere


@dataclass
class Spread:
    """Values of nodes at every score, as tensors (batch, head, q_idx, kv_idx) of size 1 along axes that they do not need."""

    sizes: Sizes
    device: torch.device
    subject: str
    ranges: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, node: Node) -> torch.Tensor:
        """The value of a scalar node that does not depend on the score; where it lies, if it is elements of a tensor."""
        element = self._element(node)
        if element is not None:
            return element
        axes = [axis for axis in AXES if axis in node.needs]
        shape = [size if axis in axes else 1 for axis, size in zip(AXES, self.sizes, strict=True)]
        if 0 in shape:
            return torch.zeros(shape, dtype=node.dtype, device=self.device)
        given = [torch.arange(self.sizes[AXES.index(axis)], device=self.device) for axis in axes]

        def scalar(*at: torch.Tensor) -> torch.Tensor:
            return evaluate([node], dict(zip(axes, at, strict=True)), lambda t: t, self.device)[0]

        rows = [[0 if j == i else None for j in range(len(axes))] for i in range(len(axes))]
        every = mapped(scalar, rows)
        steps = self._steps(node, axes)
        with plainly(self.device), taken(node, self.subject):
            if len(steps) == 1:
                made = every(*given)
            else:
                first, *rest = given
                grad = torch.is_grad_enabled()
                parts = [
                    checkpoint(every, part, *rest, use_reentrant=False) if grad else every(part, *rest)
                    for part in first.split(steps)
                ]
                made = torch.cat(parts)
        return made.to(self.device).reshape(shape)

    def _steps(self, node: Node, axes: list[str]) -> list[int]:
        """Lengths along the first axis, so that no part of the value is larger than MOST_AT_ONCE."""
        if len(axes) < 2:
            return [0]
        size = dict(zip(AXES, self.sizes, strict=True))
        most = max(prod(n.shape) * prod(size[a] for a in n.needs) for n in ancestors([node]))
        step = max(1, size[axes[0]] * MOST_AT_ONCE // max(most, 1))
        whole, rest = divmod(size[axes[0]], step)
        return [step] * whole + [rest] * (rest > 0) or [0]

    def _element(self, node: Node) -> torch.Tensor | None:
        """A view of a tensor whose axes are indexed by the inputs themselves, each once."""
        if node.op is not ATEN.index.Tensor:
            return None
        source, index = node.args
        names = [i.args[0] for i in index if isinstance(i, Node) and i.op == INPUT]
        if not len(names) == len(index) == len(set(names)) == len(source.shape) or (isinstance(source, Node) and source.needs):
            return None
        tensor = evaluate([source], {}, lambda t: t, self.device)[0] if isinstance(source, Node) else source
        sizes = [self.sizes[AXES.index(name)] for name in names]
        if any(n < size for n, size in zip(tensor.shape, sizes, strict=True)):
            axis = next(i for i, (n, size) in enumerate(zip(tensor.shape, sizes, strict=True)) if n < size)
            raise InvalidProblem(
                f"{self.subject} indexes a tensor of shape {tuple(tensor.shape)} by {names[axis]}, which goes to "
                f"{sizes[axis] - 1}; its axis {axis} must have at least {sizes[axis]} elements."
            )
        for i, size in enumerate(sizes):
            tensor = tensor.narrow(i, 0, size)
        tensor = tensor.permute(sorted(range(len(names)), key=lambda i: AXES.index(names[i])))
        for axis, name in enumerate(AXES):
            tensor = tensor if name in names else tensor.unsqueeze(axis)
        return tensor
