"""`python -m simckpt`: the command line."""

from simckpt.cli import app

app(prog_name="simckpt")
