"""The record of a run, and what it says of where the run comes from; FORMAT.md describes it with an example."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simckpt.errors import ConfigurationError
from simckpt.storage import names, records, sealed

RNG_MODES = ("continue", "reseed")  # what becomes of the random streams of a branch


@dataclass(frozen=True)
class BranchRecord:
    """Of a run that was branched: where it left its origin, and what was changed there.

    Attributes:
        run: name of the origin's run.
        seq: number of the origin's commit in that run.
        step: of the origin [env steps].
        overrides: {hyperparameter: value} that differ from the origin's.
        rng: "continue", the random streams go on as saved; or "reseed", all are derived anew from origin and name.
    """

    run: str
    seq: int
    step: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rng: str = "continue"


@dataclass(frozen=True)
class ImportRecord:
    """Of a run that holds an imported checkpoint: which one that is a copy of.

    Attributes:
        store: id of the store it comes from.
        run: name of its run there.
        checkpoint: its id there.
    """

    store: str
    run: str
    checkpoint: str


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: what holds for a whole run.

    Attributes:
        id: random identity; stays when the record is replaced.
        name: the label, which is the folder's name as well.
        created: [s since 1970, UTC].
        hyperparameters: bool, int, float, str, None, and lists, tuples and dicts of these; types are kept.
        origin: id of the checkpoint that the run started from, or None.
        experiment: id shared by runs that belong together.
        git: {"commit": ..., "dirty": ...} or None outside of a working tree.
        versions: {package: version}, at the run's start.
        host: the machine it was started on.
        branch: where the run left its origin; None for others.
        imported: what its first checkpoint is a copy of; None for others.
    """

    id: str
    name: str
    created: float
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    origin: str | None = None
    experiment: str | None = None
    git: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    branch: BranchRecord | None = None
    imported: ImportRecord | None = None

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk.

        Raises:
            ConfigurationError: a hyperparameter of a type that a record cannot hold, by name; or a record that
                `parse_run` would refuse.
        """
        fields = {
            "id": self.id,
            "name": self.name,
            "created": sealed.time_to_json(self.created),
            "hyperparameters": records.values_to_json("hyperparameter", self.hyperparameters),
            "origin": self.origin,
            "branch": None if self.branch is None else _branch_to_json(self.branch),
            "imported": None if self.imported is None else dict(vars(self.imported)),
            "experiment": self.experiment,
            "git": None if self.git is None else records.values_to_json("git field", self.git),
            "versions": dict(self.versions),
            "host": self.host,
        }
        data = records.sealed_record("run", fields)
        if len(data) > records.RECORD_LIMIT:
            raise ConfigurationError(
                f"the record of run {self.name!r} needs {len(data)} bytes and may have {records.RECORD_LIMIT}: keep "
                f"large hyperparameters in a file of your own and give its path",
                keys=list(self.hyperparameters),
            )
        records.check_readable(parse_run, data, f"the record of run {self.name!r}")
        return data


def parse_run(data: bytes, path: object) -> RunRecord:
    """Returns the record of a `run.json`; raises DamagedError, FormatError or UnsupportedFormatError."""
    fields = sealed.unseal(data, "run", path=path)
    return RunRecord(
        id=fields.id("id"),
        name=fields.text("name", names.RUN_NAME),
        created=fields.time("created"),
        hyperparameters=fields.values("hyperparameters"),
        origin=fields.optional("origin", fields.id),
        experiment=fields.optional("experiment", fields.text),
        git=fields.optional("git", fields.values),
        versions=fields.string_map("versions"),
        host=fields.text("host"),
        branch=fields.optional("branch", functools.partial(_parse_branch, fields)),
        imported=fields.optional("imported", functools.partial(_parse_import, fields)),
    )


def _branch_to_json(branch: BranchRecord) -> dict[str, Any]:
    return {
        "run": branch.run,
        "seq": branch.seq,
        "step": branch.step,
        "overrides": records.values_to_json("override", branch.overrides),
        "rng": branch.rng,
    }


def _parse_branch(fields: sealed.Fields, key: str) -> BranchRecord:
    entry = fields.object(key)
    rng = entry.text("rng")
    if rng not in RNG_MODES:
        raise entry.wrong("rng", f"one of {', '.join(RNG_MODES)}")
    if fields.optional("origin", fields.id) is None:
        raise fields.wrong("origin", "the id of the checkpoint that the branch started from")
    return BranchRecord(
        run=entry.text("run", names.RUN_NAME),
        seq=entry.integer("seq", minimum=1),
        step=entry.integer("step"),
        overrides=entry.values("overrides"),
        rng=rng,
    )


def _parse_import(fields: sealed.Fields, key: str) -> ImportRecord:
    entry = fields.object(key)
    return ImportRecord(entry.id("store"), entry.text("run", names.RUN_NAME), entry.id("checkpoint"))
