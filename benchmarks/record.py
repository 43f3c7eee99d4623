"""Writes what the scripts of this folder measure: one CSV of rows, each with the machine, the date and the commit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flashtile.bench.machine import facts
from flashtile.bench.revision import LIBRARY, commit


def record(path: Path, rows: Sequence[Mapping[str, Any]], device: torch.device, copied_from: str = "") -> None:
    """Write the rows, whose columns may differ. copied_from: the commit, where the files were copied without git."""
    about = dict(
        **facts(device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"), commit=commit(LIBRARY) or copied_from
    )
    columns = dict.fromkeys(name for row in rows for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *about], restval="")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
