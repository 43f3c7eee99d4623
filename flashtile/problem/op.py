"""Companion: the one value that travels below the public function of an op that is not attention."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.problem.dtype import SIZES_BYTES
from flashtile.problem.number import plain, told

FLOATS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Described:
    """A tensor, as data."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        size = SIZES_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size

    def spell(self) -> str:
        return "x".join(map(str, self.shape)) + ":" + self.dtype

    @staticmethod
    def parse(text: str) -> Described:
        shape, _, dtype = text.partition(":")
        if dtype not in SIZES_BYTES:
            raise InvalidProblem(f"a tensor is spelled {text!r}; its dtype must be one of {', '.join(SIZES_BYTES)}.")
        return Described(tuple(int(n) for n in shape.split("x")) if shape else (), dtype)


@dataclass(frozen=True)
class Companion:
    """What is to be computed: the input tensors that are there, described, and the options, which are plain values.

    A subclass names the op, adds its options as fields with defaults, checks itself in `check`, and says in `outputs`
    what its forward makes. It is hashable, and the key of every cache.
    """

    given: tuple[tuple[str, Described], ...]

    op: ClassVar[str] = ""
    tensors: ClassVar[tuple[str, ...]] = ()  # names of all inputs, in order
    differentiable: ClassVar[tuple[str, ...]] = ()  # inputs that have a gradient
    linear: ClassVar[tuple[str, ...]] = ()  # those of them that no gradient depends on
    results: ClassVar[int] = 1  # at most so many of `outputs`, the first ones, are the caller's; the rest serves the backward
    kinds: ClassVar[dict[str, type[Companion]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Companion.kinds[cls.op] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            if hasattr(value := getattr(self, field.name), "shape"):
                object.__setattr__(self, field.name, plain(value))
        self.check()

    def check(self) -> None:
        """Raise InvalidProblem for a request without meaning."""
        raise NotImplementedError

    def outputs(self) -> dict[str, Described]:
        """What the forward makes, by name: first what the caller gets, then what the backward needs."""
        raise NotImplementedError

    def public(self) -> tuple[str, ...]:
        """The outputs that the caller gets."""
        return tuple(self.outputs())[: self.results]

    def constant(self) -> tuple[str, ...]:
        """The caller's outputs that have no gradient."""
        return ()

    def flops(self, wanted: frozenset[str] | None = None) -> int:
        """FLOPs of the forward's matrix products, or of the backward's, for the gradients of the wanted inputs."""
        return 0

    def always_arrive(self) -> tuple[str, ...]:
        """Outputs whose gradient a backward needs: zero where none arrives."""
        return self.public()[:1]

    # -- inputs -------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Described | None:
        """An input that may be absent."""
        return dict(self.given).get(name)

    def __getitem__(self, name: str) -> Described:
        return dict(self.given)[name]

    def has(self, name: str) -> bool:
        return self.find(name) is not None

    def bytes(self, direction: str = "forward") -> int:
        """Fewest bytes through device memory: inputs read once, outputs written once."""
        made = sum(d.size_bytes for d in self.outputs().values())
        read = sum(d.size_bytes for _, d in self.given)
        if direction == "forward":
            return read + made
        results = self.outputs()
        return read + sum(results[n].size_bytes for n in self.public()) + sum(
            d.size_bytes for n, d in self.given if n in self.differentiable
        )  # fmt: skip

    # -- checks that ops share ----------------------------------------------------------------------------------------

    def expect(self, name: str, shape: tuple[Any, ...], meaning: str, dtypes: tuple[str, ...] = FLOATS) -> None:
        """Raise InvalidProblem unless the input, where there is one, has this shape and one of these dtypes."""
        found = self.find(name)
        if found is None:
            return
        if found.shape != shape:
            raise InvalidProblem(f"{name} has shape {found.shape}; it must be {meaning} = {shape}.")
        self.expect_dtype(name, dtypes)

    def expect_dtype(self, name: str, dtypes: tuple[str, ...]) -> None:
        found = self.find(name)
        if found is not None and found.dtype not in dtypes:
            raise InvalidProblem(f"{name} is {found.dtype}; it must be {' or '.join(dtypes)}.")

    def expect_number(self, name: str, least: float = -float("inf"), most: float = float("inf")) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidProblem(f"{name} is {told(value)}; it must be a number.")
        if not (least <= value <= most and abs(value) < float("inf")):
            raise InvalidProblem(f"{name} is {value}; it must be finite, from {least} to {most}.")

    def expect_bool(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise InvalidProblem(f"{name} is {told(getattr(self, name))}; it must be True or False.")

    # -- the canonical spelling ---------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        own = [f for f in fields(self) if f.name != "given"]
        return {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) != f.default}

    def spell_options(self) -> str:
        return ";".join(f"{name}={value!r}" for name, value in self.options().items())

    def spell(self) -> str:
        """One canonical string; `parse` is its inverse. Test id, benchmark row, log line."""
        parts = [f"{name}={described.spell()}" for name, described in self.given]
        return f"{self.op}({','.join(parts)}{';' if self.options() else ''}{self.spell_options()})"

    @staticmethod
    def parse(text: str) -> Companion:
        """The problem that `spell` wrote. Raises InvalidProblem on anything else."""
        op, _, body = text.strip().partition("(")
        if op not in Companion.kinds or not body.endswith(")"):
            raise InvalidProblem(f"spelling is {text!r}; it must be one of {', '.join(sorted(Companion.kinds))}, with (...).")
        tensors, _, options = body[:-1].partition(";")
        pairs = (part.partition("=") for part in tensors.split(",") if part)
        try:
            return make(op, {name: Described.parse(spec) for name, _, spec in pairs}, options)
        except (TypeError, SyntaxError, ValueError) as error:
            if isinstance(error, InvalidProblem):
                raise
            raise InvalidProblem(f"spelling is {text!r}; {error}.") from error


def make(op: str, given: Mapping[str, Described], options: str, numbers: Mapping[str, Any] | None = None) -> Companion:
    """The problem of these tensors with options as `spell_options` writes them, and more of them that are numbers."""
    kind = Companion.kinds[op]
    pairs = (part.partition("=") for part in options.split(";") if part)
    values = {name: ast.literal_eval(value) for name, _, value in pairs}
    ordered = tuple((name, given[name]) for name in kind.tensors if name in given)
    if len(ordered) != len(given):
        raise InvalidProblem(f"{op} has no tensor {', '.join(sorted(set(given) - set(kind.tensors)))}.")
    return kind(ordered, **values, **{name: value for name, value in (numbers or {}).items() if name})
