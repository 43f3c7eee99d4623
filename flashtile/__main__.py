"""`python -m flashtile` is the command line `flashtile`."""

from flashtile.cli import app

app(prog_name="flashtile")
