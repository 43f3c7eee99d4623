"""Stored: tensors of 8 bits and their scales, in a cache or beside queries, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.errors import InvalidProblem
from flashtile.problem.number import told

STORED = ("e4m3", "e5m2", "int8")  # what 8 bits may hold
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}  # nothing larger is written
Scaling = Literal["", "head", "token"]
SCALINGS: tuple[Scaling, ...] = ("", "head", "token")


@dataclass(frozen=True)
class Stored:
    """Keys and values of 8 bits: a number is what is stored times its scale.

    k_scale, v_scale: "head" for a float32 tensor (batch, heads_kv); "token" for one of a scale for each row and head,
    of a cache (pages, page_size, heads_kv), of other tensors as they are without the last axis; "" for none, 1.
    queries: the same of queries, which then are stored so too, e4m3, and multiplied as they are; None for 16-bit ones.
    """

    dtype: str
    k_scale: Scaling = ""
    v_scale: Scaling = ""
    queries: Scaling | None = None

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise InvalidProblem(f"k and v are stored as {told(self.dtype)}; it must be one of {', '.join(STORED)}.")
        for name in ("k_scale", "v_scale"):
            if getattr(self, name) not in SCALINGS:
                raise InvalidProblem(f"{name} is {told(getattr(self, name))}; it must be 'head', 'token' or ''.")
        if self.queries is not None and self.queries not in SCALINGS:
            raise InvalidProblem(f"q_scale is {told(self.queries)}; it must be 'head', 'token' or ''.")
        if self.queries is not None and self.dtype != "e4m3":
            raise InvalidProblem(f"q is stored and k and v are {self.dtype}; fp8 products are of e4m3 alone.")

    @property
    def buffer_dtype(self) -> str:
        """How plans name the bytes."""
        return "int8" if self.dtype == "int8" else "uint8"

    @property
    def scaled(self) -> dict[str, Scaling]:
        """How those of q, k and v are scaled that have scales."""
        named: dict[str, Scaling] = {"q": self.queries or "", "k": self.k_scale, "v": self.v_scale}
        return {side: how for side, how in named.items() if how}

    def spell_cache(self) -> str:
        """As a part of a cached problem's spelling."""
        return f"cache={self.dtype}:{self.k_scale}:{self.v_scale}"

    def spell(self) -> str:
        """As a part of a problem's spelling."""
        queries = "" if self.queries is None else f":{self.queries}"
        return f"stored={self.dtype}:{self.k_scale}:{self.v_scale}{queries}"

    @staticmethod
    def parse(value: str) -> Stored:
        """What `spell` wrote behind its "="."""
        dtype, k_scale, v_scale, *queries = value.split(":")
        (one,) = queries or [None]
        return Stored(dtype, k_scale, v_scale, one)  # pyright: ignore[reportArgumentType]
