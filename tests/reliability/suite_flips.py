"""Single flipped bits in every kind of file of a store: each must be noticed by a check of that file."""

from __future__ import annotations

from unittest import mock

from flips import count_flips
from maintenance_helpers import rich_store
from reliability import Line, Progress, folder

from simckpt.maintenance import verifying


def run(scale: float, progress: Progress) -> list[Line]:
    progress("bit flips")
    with folder() as base:
        store = rich_store(base / "store")
        found = count_flips(store, round(100_000 * scale))
        with mock.patch.object(verifying, "_holds", return_value=True):
            noticed = count_flips(store, 240)["payload"][1] > 0
    detail = ", ".join(f"{name} {tried:,}" for name, (tried, _) in found.items())
    tried, missed = (sum(counts) for counts in zip(*found.values(), strict=True))
    return [Line("bits flipped", tried, missed, detail, {"digests of arrays not compared": noticed})]
