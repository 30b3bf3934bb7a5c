"""The command line: thin; everything it shows can be had from the library, and `--json` prints it for programs."""

from simckpt.cli import (  # noqa: F401  (each adds its commands, in this order)
    archiving,
    looking,
    marking,
    session_upkeep,
    sessions,
    tree,
    upkeep,
)
from simckpt.cli.application import app
from simckpt.cli.looking import find, list_store

__all__ = ["app", "find", "list_store"]
