"""Plans for random sizes by the exported expressions and by the planners. See test_paths.py.

python -m tests.export.paths LAYOUT SPELLING ...
"""

from __future__ import annotations

import random
import sys

from flashtile.export import schedule
from flashtile.export.attention import AttentionExport
from flashtile.export.cached import CachedExport
from flashtile.export.entry import Entry, at, explore, steps_of, trace
from flashtile.plan.device import Device, named
from tests.export.called import Export, exported


def compare(entry: Entry, export: Export, device: Device, draw: random.Random) -> int:
    """How many plans the entry has."""
    paths = explore(entry, device)
    longest = 9000 if isinstance(export, AttentionExport) and any(export.long()) else 5000
    for _ in range(80):
        sizes = {name: draw.choice([1, 2, 128, 1024, draw.randint(1, longest)]) for name in entry.sizes}
        for name in sizes:  # half of them short or long
            if "seqlen" in name and draw.random() < 0.5:
                sizes[name] = draw.choice([draw.randint(1, 20), 128 * draw.randint(1, 600), draw.randint(1, 70000)])
        sizes.update({name: 48 * draw.randint(1, 1000) for name in sizes if name.endswith("_stride")})
        sizes["sm_count"] = draw.choice([132, 114, 108])
        if isinstance(export, AttentionExport) and export.scheduled:
            choices = schedule.feasible(export.at(sizes)) if device.arch == 90 else [1]
            sizes.update(choice=draw.choice(choices), swizzle=draw.choice([1, 4, 16]))
        if isinstance(export, CachedExport):
            count = sizes["sm_count"]
            completed = entry.complete(sizes, device)
            if not completed:  # more rows than an item may have
                continue
            sizes = {**completed[0], "sm_count": count}
        fitting = [path for path in paths if path.fits(sizes)]
        if not fitting and trace(entry, device, sizes) is None:  # numbers beyond 32 bits, which the run-time refuses
            continue
        assert len(fitting) == 1, (entry.name, device.target, sizes, len(fitting))
        assert at(fitting[0].steps, sizes) == steps_of(entry, entry.plan(sizes, device), sizes), (
            entry.name,
            device.target,
            sizes,
        )
    return len(paths)


def check(layout: str, spelling: str) -> None:
    export, both = exported("problem", spelling, layout)  # pyright: ignore[reportArgumentType]
    draw = random.Random(0)
    for target in ("sm80", "sm90"):
        for entry in both:
            print(spelling, entry.direction, target, compare(entry, export, named(target), draw), flush=True)


def main() -> None:
    for layout, spelling in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(layout, spelling)


if __name__ == "__main__":
    main()
