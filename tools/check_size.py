"""Checks the sizes that CONTRIBUTING.md promises: lines of files, parameters of functions.

python tools/check_size.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("flashtile", "gluon_emulator", "tests", "tools", "benchmarks")
FILE_LINES = 500
DEVICE_LINES = 700  # of device code, where the order of instructions is the product
HOST_PARAMETERS = 12
PUBLIC_PARAMETERS = 16  # functions that `__all__` names, of flashtile, and its distributed, ops and jax
KERNEL_PARAMETERS = 16  # @jit functions that are launched: each is a word for the driver
DEVICE_PARAMETERS = 12  # @jit functions that other @jit functions call, inlined

Function = ast.FunctionDef | ast.AsyncFunctionDef


def breaches(root: Path) -> Iterator[str]:
    """One line for everything that is too large."""
    trees: dict[Path, ast.Module] = {}
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        most = DEVICE_LINES if (root / "flashtile" / "kernels") in path.parents else FILE_LINES
        if lines > most:
            yield f"{path.relative_to(root)}: {lines} lines; at most {most}"
        trees[path] = ast.parse(text, str(path))
    homes = (root / "flashtile" / package / "__init__.py" for package in ("", "distributed", "ops", "jax"))
    public = {name for home in homes if home in trees for name in public_names(trees[home])}
    called = {name for tree in trees.values() for name in called_on_the_device(tree)}
    for path, tree in trees.items():
        for function in functions(tree):
            if (root / "flashtile" / "compat") in path.parents:  # its signatures are those of other libraries
                continue
            kind, most = limit(function, public, called)
            count = parameters(function)
            if count > most:
                place = f"{path.relative_to(root)}:{function.lineno}"
                yield f"{place}: {kind} {function.name} has {count} parameters; at most {most}"


def limit(function: Function, public: set[str], called: set[str]) -> tuple[str, int]:
    """(what a function is, how many parameters it may have)."""
    if is_jit(function):
        return ("device function", DEVICE_PARAMETERS) if function.name in called else ("kernel", KERNEL_PARAMETERS)
    return ("public function", PUBLIC_PARAMETERS) if function.name in public else ("function", HOST_PARAMETERS)


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods in a tree, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def parameters(function: Function) -> int:
    """Parameters a caller can give: without self and cls, *args and **kwargs as one each."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    bound = bool(names) and names[0] in ("self", "cls")
    return len(names) - bound + (given.vararg is not None) + (given.kwarg is not None)


def is_jit(function: Function) -> bool:
    """Whether it carries @jit or @triton.jit, with arguments or without."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)) == "jit":
            return True
    return False


def called_on_the_device(tree: ast.AST) -> Iterator[str]:
    """Names of the functions that @jit functions call."""
    for function in functions(tree):
        if is_jit(function):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield node.func.id


def public_names(package: ast.Module) -> set[str]:
    """The strings in `__all__`."""
    for node in package.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    raise SystemExit("flashtile/__init__.py has no __all__")


if __name__ == "__main__":
    found = list(breaches(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    print("\n".join(found) or "every file and function is within its size")
    sys.exit(bool(found))
