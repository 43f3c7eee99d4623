"""What calls over a cache take of the host, behind a driver that launches nothing, beside a dense call's there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.driver.test_launch import compiler, on_cpu, printed

# Times a dense call's 9.7 us, on one core of an EPYC with Python 3.11: 1.4 to 1.9, a step of transformers and appends with
# attention 2.6, appends alone 1.4 to 2.1. Before calls were known: 9, appends 6.6, both together 19.
BOUNDS = {"append": 5.0, "append of 8 bits": 5.0}
BOUND = 4.0


@on_cpu
@compiler
def test_calls_over_a_cache_that_are_known_launch_at_once(tmp_path: Path) -> None:
    *lines, memories = printed(tmp_path, "again")
    texts = [line.split("|") for line in lines]
    plans = {text[0]: (int(text[1]), ast.literal_eval(text[2]), int(text[3])) for text in texts if len(text) == 4}
    assert plans == {  # of three calls those that were known, their plans' inputs, and for how many lse lay in the scratch
        "contiguous": (2, [4], 0), "pages": (2, [5], 0), "first_k, sinks, a window": (2, [7], 2), "packed": (2, [6], 0),
        "8 bits": (2, [7], 2), "latent": (2, [4], 0), "latent in two": (2, [5], 0), "append": (2, [6, 5], 0),
        "out": (3, [6], 0),  # the layout of "packed"
        "transformers": (2, [4], 0),
        "append by lengths": (0, [6], 0),
        "append by slots": (0, [5], 0), "append of 8 bits": (0, [8], 0),
    }  # fmt: skip
    times = {name: float(us) for name, us in (text for text in texts if len(text) == 2)}
    assert {"known calls over caches", "known appends to caches"} <= set(memories.split("|"))
    dense = times.pop("dense")
    assert set(times) == set(plans)
    slow = {name: us / dense for name, us in times.items() if us > BOUNDS.get(name, BOUND) * dense}
    assert not slow, f"times a dense call's {dense:.1f} us"
