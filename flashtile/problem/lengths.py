"""How long the items of a batch are, where they are not all alike."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.errors import InvalidProblem


@dataclass(frozen=True)
class Lengths:
    """What is known of the items' lengths without looking into a tensor.

    total_q, total_k: tokens of all items together, which lie one after another (varlen); None for a batch axis. Item i's
        tokens are [cu_seqlens[i], cu_seqlens[i + 1]), int32 (batch + 1,); what lies past the last item belongs to nobody.
    used_q, used_k: whether a tensor `seqused`, int32 (batch,), says how many of an item's tokens count.

    A row beyond its item's length gives out 0, lse -inf and gradients 0; what lies there is never looked at.
    """

    total_q: int | None = None
    total_k: int | None = None
    used_q: bool = False
    used_k: bool = False

    def __post_init__(self) -> None:
        if (self.total_q is None) != (self.total_k is None):
            raise InvalidProblem(f"total_q is {self.total_q} and total_k is {self.total_k}; both or neither must be given.")
        for name in ("total_q", "total_k"):
            total = getattr(self, name)
            if total is not None and (isinstance(total, bool) or not isinstance(total, int) or not 0 <= total < 2**31):
                raise InvalidProblem(f"{name} is {total!r}; it must be an int from 0 to 2**31 - 1.")
        for name in ("used_q", "used_k"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidProblem(f"{name} is {getattr(self, name)!r}; it must be True or False.")

    @property
    def varlen(self) -> bool:
        """Whether items lie one after another in one run of tokens."""
        return self.total_q is not None

    @property
    def ragged(self) -> bool:
        """Whether items may differ in length at all."""
        return self.varlen or self.used_q or self.used_k

    def known(self, side: str) -> bool:
        """Whether all items have as many queries ("q") or keys ("k") as the problem says."""
        return not (self.varlen or (self.used_q if side == "q" else self.used_k))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the int32 tensors that hold the lengths."""
        named = {
            "cu_seqlens_q": self.varlen, "cu_seqlens_k": self.varlen, "seqused_q": self.used_q, "seqused_k": self.used_k,
        }  # fmt: skip
        return tuple(name for name, given in named.items() if given)

    def spell(self) -> list[str]:
        """The parts of a problem's spelling."""
        parts = [f"varlen={self.total_q}x{self.total_k}"] if self.varlen else []
        used = ("q" if self.used_q else "") + ("k" if self.used_k else "")
        return parts + ([f"used={used}"] if used else [])


ALIKE = Lengths()
