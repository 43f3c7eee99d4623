"""Options: how a problem is to be run, as far as the caller cares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.attention import PRECISIONS, Precision
from flashtile.problem.number import PLAIN, plain

Variant = Literal["auto", "split", "fused"]
VARIANTS: tuple[Variant, ...] = ("auto", "split", "fused")
Delta = Literal["rounded", "exact"]
DELTAS: tuple[Delta, ...] = ("rounded", "exact")


@dataclass(frozen=True)
class Options:
    """How to run a call.

    backend: name of the backend ("hopper", "triton", "cpu"), or None for the first one that can.
    backward: "split" (a dq kernel and a dk/dv kernel, repeatable), "fused" (one pass that adds dq too, atomically; if
        deterministic, in a fixed order on Hopper, and refused elsewhere), or "auto" (whichever was measured to be faster of
        those that can, see `flashtile.explain`).
    deterministic: True asks for a bitwise repeatable backward; None follows
        `torch.are_deterministic_algorithms_enabled()`.
    precision: how fp32 inputs are multiplied: "tf32x3" (three tensor-core products, float32-grade error),
        "ieee" (no tensor cores), "tf32" (TF32's error of about 1e-3 or less: one product, on sm90 three of bf16 parts,
        which err by a few 1e-5; but the forward's q k^T as by default, so that lse keeps its error of 1e-5). These are ignored
        for fp16 and bf16. On a CPU, where PyTorch's own attention computes the same, it is what runs, with its sums and errors,
        unless "ieee" asks for stricter ones: few keys in float64, more in parts, at 2 to 5 times the time; `flashtile.explain`
        says which. "fp8" is for q, k and v of float8_e4m3fn with scales (`quantize`), or of 16 bits, which are quantised first:
        the forward multiplies e4m3 where there is such a product, which costs 2.6 % of out; a CPU multiplies float32. Gradients
        are those of the quantised numbers in 16 bits, straight through. The kernels are slower than those of bf16 yet.
    delta: of what a 16-bit backward forms delta, the mean that it takes from each row's gradients. "rounded": of out, whose 16
        bits then show where gradients should cancel: in rows that see few keys, or of what shifts all scores of a row.
        "exact": of the row's own probabilities, so that the gradients of a row's scores add up to less than 2^-12 of their
        magnitudes, and those of a row with one key are 0; and the probabilities of scores as large as 10^6, of which lse alone
        knows too little, are exact. That takes 4 bytes a row while the backward runs; on a GPU another walk over the keys, 9
        products a tile instead of 7 (split) or 7 instead of 5 (fused), by the portable kernels, for Hopper's own have no such
        walk: 2.5 times as long as its own backward, causal, 4 x 4096, 16 heads of 128 (an H200, 2026-11-29). Small problems
        have it anyway, and float32 by itself. On a CPU it costs nothing where products are float32 anyway, and elsewhere
        makes them float32.
    """

    backend: str | None = None
    backward: Variant = "auto"
    deterministic: bool | None = None
    precision: Precision = "tf32x3"
    delta: Delta = "rounded"

    def __post_init__(self) -> None:
        if type(self.deterministic) not in PLAIN:
            object.__setattr__(self, "deterministic", plain(self.deterministic))
        if self.backend is not None and not isinstance(self.backend, str):
            raise InvalidProblem(f"backend is {self.backend!r}; it must be a backend's name or None.")
        if self.backward not in VARIANTS:
            raise InvalidProblem(f"backward is {self.backward!r}; it must be one of {', '.join(VARIANTS)}.")
        if self.deterministic is not None and not isinstance(self.deterministic, bool):
            raise InvalidProblem(f"deterministic is {self.deterministic!r}; it must be True, False or None.")
        if self.precision not in (*PRECISIONS, "fp8"):
            raise InvalidProblem(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}, fp8.")
        if self.delta not in DELTAS:
            raise InvalidProblem(f"delta is {self.delta!r}; it must be one of {', '.join(DELTAS)}.")


DEFAULT = Options()
