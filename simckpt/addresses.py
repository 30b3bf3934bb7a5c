"""How a checkpoint of a store is named: by its id, or by `run`, `run@latest` or `run@<step>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simckpt import damage
from simckpt.errors import CheckpointNotFoundError, DamagedError, FormatError, UnsupportedFormatError
from simckpt.run import Run
from simckpt.storage import RunRecord
from simckpt.suggest import nearest

if TYPE_CHECKING:
    from simckpt.checkpoint import Checkpoint
    from simckpt.store import Store

MIN_ID_PREFIX = 6  # hex digits; shorter ones are too easily a step or a typing error


def find(store: Store, address: str) -> Checkpoint:
    """Returns the checkpoint of an address; raises and warns as `Store.checkpoint`."""
    if address in store.files.runs():
        return _readable(store, address).latest()
    if "@" in address:
        name, _, place = address.rpartition("@")
        return _at(_readable(store, name), place)
    return _by_id(store, address)


def _readable(store: Store, name: str) -> Run:
    """Returns a run to find checkpoints in, with a warning if its record is damaged; never handed out."""
    try:
        return store.run(name)
    except UnsupportedFormatError:
        raise
    except (DamagedError, FormatError) as error:
        damage.warn_of_damage({f"the record of run {name!r}": error}, stacklevel=4)
        return Run(store.files, name, record=RunRecord(id="0" * 32, name=name, created=0.0))


def _at(run: Run, place: str) -> Checkpoint:
    if place == "latest":
        return run.latest()
    digits = place.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdecimal()):
        raise CheckpointNotFoundError(f"{run.name}@{place}: after the @ comes a step or `latest`")
    return run.at(step=int(digits))


def _by_id(store: Store, prefix: str) -> Checkpoint:
    if len(prefix) < MIN_ID_PREFIX or set(prefix) - set("0123456789abcdef"):
        known = nearest(prefix, store.files.runs())
        end = "" if known.endswith("?") else "."
        raise CheckpointNotFoundError(
            f"{prefix!r} is no run of {store.path}{known}{end} A checkpoint is named by its id (at least "
            f"{MIN_ID_PREFIX} hex digits), `run`, `run@latest` or `run@<step>`"
        )
    # by the records alone: one damaged record must not hide the checkpoints of the others
    held = [(each, contents) for contents in store.contents() for each in contents.checkpoints]
    found = [checkpoint for checkpoint, _ in held if checkpoint.id.startswith(prefix)]
    if len(found) != 1:
        count = "no checkpoint" if not found else f"{len(found)} checkpoints, give more digits:"
        listing = " ".join(repr(checkpoint) for checkpoint in found)
        raise CheckpointNotFoundError(f"store {store.path} has {count} {prefix} {listing}".rstrip())
    (holder,) = (contents for checkpoint, contents in held if checkpoint is found[0])
    of_run = {f"the record of run {holder.name!r}": error for seq, error in holder.damaged if seq is None}
    damage.warn_of_damage(of_run, stacklevel=4)
    return found[0]
