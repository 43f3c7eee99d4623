"""What calls over a cache take of the host, behind a driver that launches nothing, beside a dense call's there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.driver.test_launch import compiler, on_cpu, printed

# Times a dense call's 7.4 us, on one core of an EPYC with Python 3.11: 2.0 to 2.6, appends 1.6 to 2.8, both together 3.7, of 8
# bits 3.3 and 4.9. Before calls were known: 9, appends 6.6, both together 19.
BOUNDS = {"append": 5.5, "8 bits": 5.0, "append of 8 bits": 7.0}
BOUND = 4.0


@on_cpu
@compiler
def test_calls_over_a_cache_that_are_known_launch_at_once(tmp_path: Path) -> None:
    *lines, memories = printed(tmp_path, "again")
    texts = [line.split("|") for line in lines]
    plans = {name: (int(known), ast.literal_eval(inputs)) for name, known, inputs in (text for text in texts if len(text) == 3)}
    assert plans == {
        "contiguous": (2, [4]), "pages": (2, [5]), "first_k, sinks, a window": (2, [7]), "packed": (2, [6]), "8 bits": (2, [7]),
        "latent": (2, [4]), "append": (2, [6, 5]), "append by lengths": (0, [6]), "append by slots": (0, [5]),
        "append of 8 bits": (0, [8]),
    }  # fmt: skip
    times = {name: float(us) for name, us in (text for text in texts if len(text) == 2)}
    assert {"known calls over caches", "known appends to caches"} <= set(memories.split("|"))
    dense = times.pop("dense")
    assert set(times) == set(plans)
    slow = {name: us / dense for name, us in times.items() if us > BOUNDS.get(name, BOUND) * dense}
    assert not slow, f"times a dense call's {dense:.1f} us"
