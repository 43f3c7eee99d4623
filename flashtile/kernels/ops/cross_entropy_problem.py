"""The problem of cross-entropy: what is given, what must fit together, and which outputs there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.kernels.device.number import SHORT
from flashtile.problem.op import FLOATS, Companion, Described

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(reduction: Any, known: tuple[str, ...] = REDUCTIONS) -> None:
    """Raise InvalidProblem unless it is the name of one."""
    if reduction not in known:
        raise InvalidProblem(f"reduction is {reduction!r}; it must be one of {', '.join(known)}.")


@dataclass(frozen=True)
class CrossEntropy(Companion):
    """logits (rows, columns); labels (rows,), class numbers or ignore_index; weight (classes,), of all classes.

    eager_gradient: the forward makes the gradient too, for a reduced loss. inplace: the gradient is written over the logits.
    """

    reduction: str = "none"
    smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    shard: bool = False
    first_class: int = 0
    classes: int | None = None
    eager_gradient: bool = False
    inplace: bool = False

    op: ClassVar[str] = "cross_entropy"
    tensors: ClassVar[tuple[str, ...]] = ("logits", "labels", "weight")
    differentiable: ClassVar[tuple[str, ...]] = ("logits",)

    def check(self) -> None:
        if not (self.has("logits") and len(self["logits"].shape) == 2 and self["logits"].shape[1] >= 1):
            raise InvalidProblem("logits must be there, with a last axis of at least 1.")
        self.expect_dtype("logits", FLOATS)
        if not self.has("labels"):
            raise InvalidProblem("labels are missing; they must be int32 or int64, one a row.")
        self.expect("labels", (self.rows,), "one a row", ("int32", "int64"))
        check_reduction(self.reduction)
        self.expect_number("smoothing", 0.0, 1.0)
        self.expect_number("z_loss", 0.0)
        self.expect_number("logit_scale")
        if self.softcap is not None:
            self.expect_number("softcap")
            if self.softcap <= 0.0:
                raise InvalidProblem(f"softcap is {self.softcap}; it must be a positive number or None.")
        self.expect_bool("shard", "eager_gradient", "inplace")
        for name in ("ignore_index", "first_class"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidProblem(f"{name} is {value!r}; it must be an int.")
        if self.shard and (self.classes is None or not 0 <= self.first_class <= self.classes - self.columns):
            raise InvalidProblem(
                f"a shard of {self.columns} classes from {self.first_class} on is not one of {self.classes} classes in all."
            )
        self.expect("weight", (self.every,), "(classes,)")
        if not self.shard and (self.classes is not None or self.first_class):
            raise InvalidProblem("classes and first_class are given; they must be given with shard, and only then.")
        if self.shard and (self.reduction != "none" or self.z_loss):
            raise InvalidProblem("a shard has no loss of its own; reduction must be 'none' and z_loss 0.")
        if self.eager_gradient and self.reduction == "none":
            raise InvalidProblem("eager_gradient is True and reduction 'none'; rows' gradients wait for those of their losses.")

    @property
    def rows(self) -> int:
        return self["logits"].shape[0]

    @property
    def columns(self) -> int:
        return self["logits"].shape[1]

    @property
    def every(self) -> int:
        """Classes in all."""
        return self.columns if self.classes is None else self.classes

    @property
    def counts(self) -> bool:
        """Whether sums over rows stand behind each row's loss or gradient: a mean's, and those of the weights."""
        return not self.shard and (self.reduction == "mean" or self.has("weight"))

    @property
    def wide(self) -> bool:
        """Whether it is computed in float64."""
        return self["logits"].dtype == "fp32" and self.columns <= SHORT

    def outputs(self) -> dict[str, Described]:
        row = Described((self.rows,), "fp32")
        if self.shard:
            return {"share": row, "lse": row}
        made = {"loss": row if self.reduction == "none" else Described((), "fp32"), "lse": row}
        if self.counts:
            made["count"] = Described((3 if self.has("weight") else 1,), "fp32")
        if self.eager_gradient:
            made["gradient"] = self["logits"]
        return made

    def public(self) -> tuple[str, ...]:
        return ("share", "lse") if self.shard else ("loss", "lse")

    def constant(self) -> tuple[str, ...]:
        return () if self.shard else ("lse",)
