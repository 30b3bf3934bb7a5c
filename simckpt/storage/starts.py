"""Records of a run's starts: what was in force when a process began to write it. Immutable, one file each.

A start is named after its content, so that starting a run a hundred times in the same way writes one record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simckpt.errors import ConfigurationError, DamagedError, FormatError
from simckpt.storage import digests, durable, names, reader, sealed, work

STARTS = "starts"
START_LIMIT = 4 << 20  # [bytes]: hyperparameters of at most 1 MB, and a diff that JSON may make six times as long


@dataclass(frozen=True)
class StartRecord:
    """`starts/<id>.json`: what was in force at one start of a run.

    Attributes:
        created: of the first start with this content [s since 1970, UTC]; not part of the id.
        hyperparameters: in force from this start on.
        experiment: id shared by runs that belong together.
        git: {"commit", "dirty", "diff", "left_out", "untracked", ...}, see `provenance.git_state`; None outside of a
            working tree.
        versions: {package: version}.
        host: the machine.
        device: {"cpu": model, "gpus": [names]}.
    """

    created: float
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    git: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    device: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """32 hex digits: the digest of everything but the time."""
        content = json.dumps(self._content(), sort_keys=True).encode("ascii")
        return digests.digest(content).rpartition(":")[2]

    def _content(self) -> dict[str, Any]:
        return {
            "hyperparameters": _to_json(self.hyperparameters),
            "experiment": self.experiment,
            "git": None if self.git is None else _to_json(self.git),
            "versions": dict(self.versions),
            "host": self.host,
            "device": _to_json(self.device),
        }

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk.

        Raises:
            ConfigurationError: a value that a record cannot hold, or a record that `parse_start` would refuse.
        """
        try:
            data = sealed.seal("start", {"created": sealed.time_to_json(self.created), **self._content()})
            if len(data) > START_LIMIT:
                raise FormatError(f"it needs {len(data)} bytes and may have {START_LIMIT}")
            parse_start(data, "the record of this start", id=self.id)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the record of a start cannot hold these values: {error}") from error
        return data


def parse_start(data: bytes, path: object, *, id: str) -> StartRecord:
    """Returns a start's record; raises DamagedError, FormatError or UnsupportedFormatError, also if `id` is another."""
    fields = sealed.unseal(data, "start", path=path)
    _check_known_fields(fields)
    record = StartRecord(
        created=fields.time("created"),
        hyperparameters=fields.values("hyperparameters"),
        experiment=fields.optional("experiment", fields.text),
        git=fields.optional("git", fields.values),
        versions=fields.string_map("versions"),
        host=fields.text("host"),
        device=fields.values("device"),
    )
    if record.id != id:
        raise FormatError(f"{path} is the record of start {record.id}: a file was renamed or copied")
    return record


def _check_known_fields(fields: sealed.Fields) -> None:
    """Raises FormatError for a start whose facts about git or the device are not what programs show people."""
    git = fields.optional("git", fields.object)
    if git is not None:
        git.text("commit")
        if git.content.get("dirty") not in (True, False, None):
            raise fields.wrong("git", "an object whose `dirty` is true, false or null")
        if not isinstance(git.content.get("diff", ""), str):
            raise fields.wrong("git", "an object whose `diff` is a text")
    device = fields.object("device")
    gpus = device.content.get("gpus", [])
    known = isinstance(gpus, list) and all(isinstance(gpu, str) for gpu in gpus)
    if not known or not isinstance(device.content.get("cpu", ""), str):
        raise fields.wrong("device", "an object of names")


def _to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sealed.to_json(value) for name, value in values.items()}


def write_start(disk: durable.Disk, works: work.WorkFolders, root: Path, run: str, record: StartRecord) -> str:
    """Returns the id of the record, which is written unless one of this content exists."""
    data, id = record.to_bytes(), record.id
    folder = durable.make_folders(disk, root, "runs", run, STARTS)
    target = folder / f"{id}.json"
    if not target.exists():
        with works.made() as made:
            durable.write_record(disk, made / target.name, data)
            durable.publish_file(disk, made / target.name, target)
    return id


def read_start(root: Path, run: str, id: str) -> StartRecord:
    """Returns a start's record; raises DamagedError if it is missing, for a checkpoint refers to it."""
    names.check_run_name(run)
    if not names.ID.fullmatch(id):
        raise FormatError(f"{id[:80]!r} is no id of a start")
    path = root / "runs" / run / STARTS / f"{id}.json"
    try:
        data = reader.read_small(root, "runs", run, STARTS, path.name, limit=START_LIMIT, path=path)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", path=path) from error
    return parse_start(data, path, id=id)
