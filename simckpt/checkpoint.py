"""A committed, immutable snapshot: what it knows of itself, its leaves, and how it returns into live objects."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from simckpt import provenance, state
from simckpt.errors import LeafNotFoundError, VersionWarning
from simckpt.restore import BoundComponent, apply, bind
from simckpt.suggest import nearest

if TYPE_CHECKING:
    from simckpt.storage import CommitRecord, LeafRecord, StoreFiles


class Checkpoint:
    """A committed snapshot of a run; made by `Run.latest`, `Run.at`, `Store.checkpoint` and `Checkpointer.save`.

    Attributes:
        id: 32 hex digits, random: the identity. Steps and names are labels.
        run: the name of its run.
        seq: the number of its commit in the run, from 1 on.
        step: the step of the training loop at the save [env steps].
        parent: the id of the checkpoint before it, or None.
        kind: "save".
        metrics: the metrics that were given to the save.
        created: UTC time of the commit [s since 1970].
    """

    def __init__(self, files: StoreFiles, run: str, record: CommitRecord) -> None:
        self._files = files
        self._record = record
        self.run = run
        self.id = record.id
        self.seq = record.seq
        self.step = record.step
        self.parent = record.parent
        self.kind = record.kind
        self.metrics: Mapping[str, float] = MappingProxyType(dict(record.metrics))
        self.created = record.created

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id[:12]} of {self.run!r} at step {self.step:,}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def versions(self) -> Mapping[str, str]:
        """The library versions and the machine it was saved with."""
        return MappingProxyType(dict(self._record.versions))

    @property
    def nbytes(self) -> int:
        """Size of its files [bytes]."""
        return sum(file.size for file in self._record.files)

    def leaves(self) -> Mapping[str, LeafRecord]:
        """Returns {path: record} of every leaf, in the order of the file; reads the index alone."""
        return self._files.index(self.run, self._record.seq).leaves

    def components(self) -> list[str]:
        """Returns the names of the components it holds."""
        return list(self._files.index(self.run, self._record.seq).components)

    def read(self, components: list[str] | None = None) -> dict[str, state.Encoded]:
        """Returns the named components, or all, with every byte verified against its digest.

        Raises:
            LeafNotFoundError: the checkpoint has no such component.
            DamagedError: bytes differ from their digests; all damaged leaves are named.
        """
        return self._files.read(self.run, self._record.seq, components)

    def leaf(self, path: str) -> state.Leaf:
        """Returns one leaf as the file stores it, verified."""
        return self._files.read_leaves(self.run, self._record.seq, [path])[path]

    def __getitem__(self, path: str) -> Any:
        """Returns the leaf at a path such as `envs/physics/qpos` as an array or tensor, or a component's whole tree.

        Raises:
            LeafNotFoundError: there is neither; the message lists the near ones.
        """
        leaves = self.leaves()
        if path in leaves:
            return state.leaf_value(self.leaf(path))
        if path in self.components():
            encoded = self.read([path])[path]
            return state.decode(encoded.leaves, encoded.structure)
        raise LeafNotFoundError(
            f"checkpoint {self.id} has no leaf {path!r}{nearest(path, [*leaves, *self.components()])}"
        )

    def restore(self, components: Mapping[str, Any]) -> None:
        """Puts the saved states into the live objects, in place: all of them or none.

        Every byte is read and verified first, then an undo copy of the live objects is taken, keys and shapes are
        compared with them, and only then anything changes. Components of the checkpoint that are not asked for are left
        alone, so an evaluation may restore the agent by itself.

        Args:
            components: {name: live object} as registered with `Run.checkpointer`.

        Raises:
            DamagedError: the files are damaged.
            StateMismatchError: the state does not fit; all differences are listed.
            RestoreError: a component failed halfway; everything was put back.
            CaptureError: the undo copy could not be taken; nothing was touched.
            HalfRestoredError: a component failed halfway and could not be put back.

        Warns:
            VersionWarning: saved with other versions or on another machine.
        """
        self.restore_bound(bind(components))

    def restore_bound(self, bound: Mapping[str, BoundComponent]) -> None:
        """Does what `restore` does, for components that are bound already."""
        available = set(self.components())
        saved = self.read([name for name in bound if name in available])
        differences = provenance.version_differences(self.versions, provenance.versions())
        if differences:
            # before anything changes: a program may turn warnings into errors
            message = f"checkpoint {self.id} was saved elsewhere, and going on from it may not be bit-exact: "
            warnings.warn(message + "; ".join(differences), VersionWarning, stacklevel=3)
        apply(bound, saved, source=f"checkpoint {self.id} (run {self.run!r}, step {self.step})")
