"""Two calls, each of half of the queries, as if on an H100: prints which of their outputs are where the caller wanted them.

See test_launch.py.
"""

from __future__ import annotations

from unittest.mock import patch

import torch

import tests.driver.launches  # noqa: F401  # pyright: ignore[reportUnusedImport] (the driver's stand-in)

# isort: split

import flashtile.torch.execute.prepared
from flashtile.plan.device import H100
from flashtile.torch.routes.local import prepared


def main() -> None:
    torch._C._cuda_getDevice = lambda: None  # pyright: ignore[reportAttributeAccessIssue] (a CPU's index)
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.float16) for _ in range(3))
    places = {
        "rows": torch.empty_like(q)[:, 64:],
        "heads": q.new_empty(1, 64, 4, 64)[:, :, 2:],
        "dtype": torch.empty(1, 64, 2, 64),
        "address": q.new_empty(64 * 2 * 64 + 1)[1:].view(1, 64, 2, 64),
    }
    with patch.object(flashtile.torch.execute.prepared, "device_of", lambda _: H100):
        call, _ = prepared(q[:, 64:], k, v, return_lse=True)
        given = q[:, 64:], k, v
        kept = call.forward(given, ())
        call.gradients((*given, *kept), kept[0], None, (True, True, True), wide_keys=True)
        for name, place in places.items():
            out = call.forward(given, (), into=place)[0]
            dq = call.gradients((*given, *kept), kept[0], None, (True, True, True), wide_keys=True, into=place)[0]
            print((name, out is place, dq is place))


if __name__ == "__main__":
    main()
