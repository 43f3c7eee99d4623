"""Operators of this copy of the library, in a namespace of `torch.ops`: "flashtile"; loaded under another name, that name.

Operators belong to the process: two copies of the library, such as an installed one and one from a kernels hub, need two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashtile.torch.execute.plain import transforms
from flashtile.torch.routes.derivatives import apart, is_dual_level, is_jvp, refuse_tangents

NAMESPACE = __name__.removesuffix(".torch.routes.library").replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], record: Callable[..., Any] | None = None,
    told: Callable[..., tuple[str, Iterable[tuple[str, torch.Tensor]]]] | None = None, remedy: str = "",
    moved: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:  # fmt: skip
    """The operator of a schema: what computes it on any device, what its outputs look like, and what records it for autograd.

    Without `record` autograd passes it by, and gradients of its outputs are the caller's business. told: what of a call's
    arguments a refusal of tangents says: (what is computed, tensors by their names). remedy: what it says besides.
    moved: the outputs of inputs with tangents, at the innermost of torch.func's levels; without it they are refused there, too.

    Not `torch.library.register_autograd`, which goes through Python twice more at every call, in compiled graphs too. Where
    nothing is recorded and none but a backend comes next, as in compiled graphs, that runs at once: one step through the
    dispatcher, which costs as much as all else that the host does.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if record is None:
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        return operator

    def autograd(keyset: Any, *given: Any) -> Any:
        innermost = is_jvp()
        if innermost or is_dual_level():
            tensors = [t for some in given for t in (some if isinstance(some, list) else (some,))]
            if moved and transforms():  # whose outer levels see to their own tangents
                if innermost and any(tangent is not None for tangent in apart(tensors)[1]):
                    return moved(*given)
            else:
                what, named = told(*given) if told else (name, ((f"argument {i}", t) for i, t in enumerate(tensors)))
                refuse_tangents(what, "autograd", named, remedy)
        if torch.is_grad_enabled():
            return record(*given)
        below = keyset & torch._C._after_ADInplaceOrView_keyset
        return run(*given) if below.highestPriorityTypeId() in _BACKENDS else operator.redispatch(below, *given)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    return operator
