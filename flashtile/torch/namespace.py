"""The namespace of this copy's operators in `torch.ops`: "flashtile"; of a copy that was loaded under another name, that name.

Operators belong to the process: two copies of the library, such as an installed one and one from a kernels hub, need two.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = __name__.removesuffix(".torch.namespace").replace(".", "_")


def operators() -> Any:
    """What `torch.ops` has under this copy's name."""
    return getattr(torch.ops, NAMESPACE)
