"""The problem of LayerNorm and RMSNorm: what is given, what must fit together, and which outputs there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashtile.errors import InvalidProblem
from flashtile.problem.op import FLOATS, Companion, Described

PARAMETERS = ("weight", "bias", "weight1", "bias1", "colscale")  # of which column sums are the gradients
INTEGERS = ("int32", "int64")


@dataclass(frozen=True)
class Norm(Companion):
    """x (rows, hidden); residual, x1 likewise; weights, biases, colscale (hidden,); rowscale (rows,); seed (1,).

    x_subset (rows,): 1 + the row of x that this row takes, 0 for none. out_subset (rows,): likewise where it goes.
    """

    kind: str = "layer"
    eps: float = 1e-5
    dropout_p: float = 0.0
    scale: float = 1.0
    prenorm: bool = False  # h is an output too
    zero_centered: bool = False  # weights are stored without their 1
    residual_dtype: str | None = None
    out_dtype: str | None = None
    out_rows: int | None = None

    op: ClassVar[str] = "norm"
    tensors: ClassVar[tuple[str, ...]] = (
        "x", "residual", "x1", "weight", "bias", "weight1", "bias1", "rowscale", "colscale", "x_subset", "out_subset", "seed",
    )  # fmt: skip
    differentiable: ClassVar[tuple[str, ...]] = ("x", "residual", "x1", *PARAMETERS)
    linear: ClassVar[tuple[str, ...]] = ("bias", "bias1")

    def check(self) -> None:
        if self.kind not in ("layer", "rms"):
            raise InvalidProblem(f"kind is {self.kind!r}; it must be 'layer' or 'rms'.")
        if not self.has("x") or len(self["x"].shape) != 2 or self["x"].shape[1] < 1:
            raise InvalidProblem("x must be there, with a last axis of at least 1.")
        self.expect_dtype("x", FLOATS)
        self.expect_number("eps", 0.0)
        self.expect_number("dropout_p", 0.0, 1.0)
        self.expect_number("scale")
        self.expect_bool("prenorm", "zero_centered")
        if self.drops != self.has("seed"):
            raise InvalidProblem(f"dropout_p is {self.dropout_p}; it must come with a seed, and 0 without one.")
        self.expect("x_subset", (self.rows,), "(rows,)", INTEGERS)
        self.expect("out_subset", (self.rows,), "(rows,)", INTEGERS)
        self.expect("residual", (self.rows, self.hidden), "(rows, hidden)")
        self.expect("rowscale", (self.rows,), "(rows,)")
        self.expect("x1", (self.rows, self.hidden), "(rows, hidden)")
        for name in PARAMETERS:
            self.expect(name, (self.hidden,), "(hidden,)")
        self.expect("seed", (1,), "(1,)", ("int64",))
        if not self.has("x_subset") and self["x"].shape[0] != self.rows:
            raise InvalidProblem(f"x has {self['x'].shape[0]} rows; there must be {self.rows}, as in residual.")
        if self.has("x1") and any(self.has(n) for n in ("rowscale", "colscale", "x_subset", "out_subset")):
            raise InvalidProblem("x1 is given with scales or subsets; a second branch must come without.")
        if not self.has("weight1") and self.has("bias1"):
            raise InvalidProblem("bias1 is given without weight1; a second output needs its weight.")
        if self.zero_centered and not self.has("weight"):
            raise InvalidProblem("zero_centered is True without a weight; it must be False.")
        if (self.out_rows is None) == self.has("out_subset"):
            raise InvalidProblem(f"out_rows is {self.out_rows}; it must be given with out_subset, and only then.")
        for name in ("residual_dtype", "out_dtype"):
            if getattr(self, name) not in (None, *FLOATS):
                raise InvalidProblem(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(FLOATS)}, or None.")

    @property
    def rows(self) -> int:
        for name in ("x_subset", "residual", "x"):
            found = self.find(name)
            if found is not None:
                return found.shape[0]
        return 0

    @property
    def hidden(self) -> int:
        return self["x"].shape[1]

    @property
    def drops(self) -> bool:
        return self.dropout_p != 0.0

    @property
    def stored(self) -> str:
        """dtype of h."""
        residual = self.find("residual")
        return self.residual_dtype or (residual.dtype if residual is not None else self["x"].dtype)

    @property
    def mixes(self) -> bool:
        """Whether h is another tensor than x."""
        others = ("residual", "x1", "rowscale", "colscale", "x_subset")
        return self.prenorm or self.drops or self.scale != 1.0 or any(map(self.has, others)) or self.stored != self["x"].dtype

    def outputs(self) -> dict[str, Described]:
        out = Described(
            (self.out_rows if self.out_rows is not None else self.rows, self.hidden), self.out_dtype or self["x"].dtype
        )
        made = {"out": out}
        if self.has("weight1"):
            made["out1"] = out
        if self.mixes:
            made["h"] = Described((self.rows, self.hidden), self.stored)
        if self.kind == "layer":
            made["mean"] = Described((self.rows,), "fp32")
        return {**made, "rstd": Described((self.rows,), "fp32")}

    def public(self) -> tuple[str, ...]:
        return ("out", *(("out1",) if self.has("weight1") else ()), *(("h",) if self.prenorm else ()))
