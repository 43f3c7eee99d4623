#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: torch.compile(fullgraph=True) cannot raise, nor catch, an exception whose class passes its message on by
# super().__init__(message), as the classes of most libraries do; one that sets self.args instead it can.
#
# Both classes behave alike in eager mode. A compiled function that raises and catches the first one within itself fails to compile
# ("Attempted to call a super() attribute that is not a function or method"), and where it is to reach the caller, that is what the
# caller reads in the place of the message. With self.args = (message,) the first compiles and runs, and the other's error names the class
# and what it was made of. Without fullgraph the frame runs uncompiled, and nobody notices but by the time it takes.
#
# Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat >"$folder/raise.py" <<'PY'
import sys

import torch


class Passes(ValueError):
    def __init__(self, name):
        super().__init__(f"{name} is too long")


class Sets(ValueError):
    def __init__(self, name):
        self.args = (f"{name} is too long",)


def caught(kind):
    def function(x):
        try:
            raise kind("tail")
        except kind:
            return x + 1

    return function


def thrown(kind):
    def function(x):
        raise kind("tail")

    return function


def said(function):
    torch._dynamo.reset()
    try:
        return str(function(torch.zeros(2)).tolist())
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines()]
        shown = [line for line in lines if "raised exception" in line] or lines[:1]
        return f"{type(error).__name__}: {shown[0]}"


print("torch", torch.__version__)
found = {}
for kind in (Passes, Sets):
    for make in (caught, thrown):
        eager, compiled = said(make(kind)), said(torch.compile(make(kind), fullgraph=True, backend="eager"))
        found[kind, make] = compiled
        print(f"{kind.__name__}, {make.__name__}: eager {eager}; compiled {compiled}")
lost = all("super()" in found[Passes, make] for make in (caught, thrown))
sys.exit(not (lost and found[Sets, caught] == "[1.0, 1.0]" and "tail" in found[Sets, thrown]))
PY
"$folder/venv/bin/python" -W ignore "$folder/raise.py"
