"""How far a check that is done in pieces has come: a small record in the user's cache folder, never in the store."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path

from simckpt.catalog import default_folder
from simckpt.errors import StoreError, UpkeepWarning
from simckpt.storage import durable, reader, sealed

_LIMIT = 1 << 28  # [bytes]


class Progress:
    """What has been verified since a check of a store was begun; lost or damaged, the check begins anew.

    Args:
        store: id of the store.
        part: which part of the store is checked, for each is a check of its own.
        folder: of these records; the user's cache folder by default.

    Attributes:
        done: {what: mark of its content}.
    """

    def __init__(self, store: str, part: tuple[int, int] | None, *, folder: Path | None = None) -> None:
        folder = folder or default_folder()
        name = f"{store}.check" if part is None else f"{store}.check-{part[0]}-{part[1]}"
        self._path = None if folder is None else folder / f"{name}.json"
        self.done: dict[str, str] = {}

    def read(self) -> None:
        """Takes up what an earlier call has done."""
        if self._path is not None:
            with contextlib.suppress(StoreError, FileNotFoundError):
                data = reader.read_small(self._path.parent, self._path.name, limit=_LIMIT, path=self._path)
                self.done = sealed.unseal(data, "check", path=self._path).string_map("done")

    def write(self) -> None:
        """Keeps what was done; where that is not possible, the next call begins anew, and a warning says so."""
        if self._path is not None:
            self._write(self._path, self.done)

    def _write(self, path: Path, done: Mapping[str, str]) -> None:
        disk, new = durable.Disk(), path.with_suffix(".new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new.unlink(missing_ok=True)
            durable.write_record(disk, new, sealed.seal("check", {"done": dict(done)}))
            durable.replace_file(disk, new, path)
        except (OSError, StoreError) as error:
            warnings.warn(f"how far the check has come could not be kept: {error}", UpkeepWarning, stacklevel=4)

    def forget(self) -> None:
        """Removes the record: the check is complete."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
