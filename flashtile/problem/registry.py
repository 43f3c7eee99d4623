"""Classes by the names that spellings give them."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from flashtile.errors import InvalidProblem


class Named(Protocol):
    """A class with a name of its own."""

    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """The classes of one kind, such as "predicate", by name; the library's own lie in a package, a file each."""

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self.known: dict[str, type[Kind]] = {}

    def add(self, cls: type[Any]) -> None:
        """Make a class known. Raises TypeError for a name that is no identifier, or that another class has."""
        if not cls.name.isidentifier():
            raise TypeError(f"{cls.__name__}.name is {cls.name!r}; a {self.kind}'s name must be an identifier.")
        known = self.known.get(cls.name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__name__}.name is {cls.name!r}, which {known.__module__}.{known.__qualname__} has.")
        self.known[cls.name] = cls

    def named(self, name: str) -> type[Kind]:
        """The class of that name; the library's own are loaded when it is not known. Raises InvalidProblem."""
        if name not in self.known:
            package = import_module(f"..{self.package}", __package__)
            for module in pkgutil.iter_modules(package.__path__):
                import_module(f"{package.__name__}.{module.name}")
        if name not in self.known:
            raise InvalidProblem(f"{self.kind} is {name!r}; known are {', '.join(sorted(self.known))}.")
        return self.known[name]

    def read(self, text: str) -> tuple[type[Kind], list[str], list[str]]:
        """What 'name(part;part)' names: (class, parts without a colon, parts with one). Raises InvalidProblem."""
        name, opened, rest = text.partition("(")
        if not opened or not rest.endswith(")"):
            raise InvalidProblem(f"{self.kind} is spelled {text!r}; it must be 'name(...)'.")
        parts = [part for part in rest[:-1].split(";") if part]
        return self.named(name), [part for part in parts if ":" not in part], [part for part in parts if ":" in part]
