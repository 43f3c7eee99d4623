"""Host time of one eager call, (1, 128, 8, 64) bf16, beside SDPA's flash backend: calls are queued, not waited for.

python benchmarks/host.py [--output benchmarks/results/host.csv] [--commit HASH, where there is no git]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashtile
from flashtile.bench.machine import facts
from flashtile.bench.revision import LIBRARY, commit

CALLS, ROUNDS = 200, 15


def host_us(call: Callable[[], object]) -> float:
    """Microseconds per call, a burst short enough not to fill the launch queue."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/host.csv"))
    parser.add_argument("--commit", default="")
    chosen = parser.parse_args()
    q, k, v = (torch.randn(1, 128, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    qg, kg, vg = (t.detach().clone().requires_grad_() for t in (q, k, v))
    qs, ks, vs = (t.transpose(1, 2) for t in (qg, kg, vg))
    dout, douts = torch.randn_like(q), torch.randn_like(qt)
    providers: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "flashtile": (
            lambda: flashtile.attention(q, k, v, causal=True),
            lambda: torch.autograd.grad(flashtile.attention(qg, kg, vg, causal=True), (qg, kg, vg), dout),
        ),
        "sdpa/flash": (
            lambda: F.scaled_dot_product_attention(qt, kt, vt, is_causal=True),
            lambda: torch.autograd.grad(F.scaled_dot_product_attention(qs, ks, vs, is_causal=True), (qg, kg, vg), douts),
        ),
    }
    exact = F.scaled_dot_product_attention(qt.double(), kt.double(), vt.double(), is_causal=True).transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for name, (forward, both) in providers.items():
            out = forward()
            out = out.transpose(1, 2) if name != "flashtile" else out  # pyright: ignore
            error = ((out.double() - exact).norm() / exact.norm()).item()  # pyright: ignore
            assert error < 1e-2, f"{name} is wrong: {error}"
            for _ in range(100):
                forward(), both()
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(ROUNDS):
            names = list(providers) if turn % 2 == 0 else list(reversed(providers))
            for name in names:
                for what, call in zip(("forward", "forward+backward"), providers[name], strict=True):
                    times.setdefault((name, what), []).append(host_us(call))
    machine = dict(
        calls=CALLS, rounds=ROUNDS, **facts(q.device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit(LIBRARY) or chosen.commit,
    )  # fmt: skip
    rows = [
        dict(provider=name, what=what, host_us=round(statistics.median(t), 2), least_us=round(min(t), 2), **machine)
        for (name, what), t in times.items()
    ]  # fmt: skip
    for row in rows:
        print(row["provider"], row["what"], row["host_us"], "us (least", row["least_us"], ")")
    for what in ("forward", "forward+backward"):
        mine, peer = (next(r["host_us"] for r in rows if r["provider"] == n and r["what"] == what) for n in providers)
        print(f"{what}: {mine / peer:.2f} x SDPA flash's host time")
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    with chosen.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
