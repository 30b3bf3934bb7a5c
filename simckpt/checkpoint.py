"""A committed, immutable snapshot: what it knows of itself, its leaves, and how it returns into live objects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from simckpt import presentation, provenance, state
from simckpt.arguments import checked_metrics
from simckpt.errors import ConfigurationError, DamagedError, FormatError, LeafNotFoundError, VersionWarning
from simckpt.policies import CheckpointFacts
from simckpt.restore import Adjustment, BoundComponent, apply, bind, overlaid, wanted_parts
from simckpt.storage import exports
from simckpt.storage.marks import UNMARKED
from simckpt.storage.names import STRUCTURE_KIND
from simckpt.suggest import nearest

if TYPE_CHECKING:
    from simckpt.run import Run
    from simckpt.state.leaf import Slab
    from simckpt.storage import CommitRecord, LeafRecord, Marks, StartRecord, StoreFiles
    from simckpt.store import Store


class Checkpoint:
    """A committed snapshot of a run; made by `Run.latest`, `Run.at`, `Store.checkpoint` and `Checkpointer.save`.

    Attributes:
        id: 32 hex digits, random: the identity. Steps and names are labels.
        run: the name of its run.
        seq: the number of its commit in the run, from 1 on.
        step: the step of the training loop at the save [env steps].
        parent: the id of the checkpoint before it, or None.
        start: the id of the record of the start that saved it, or None in a store of format 0.1.
        kind: "save"; "rollback" for what training went back to, see `rollback`; "import" for a copy from elsewhere; or
            "exception" for a post-mortem of a loop that an exception ended.
        created: UTC time of the commit [s since 1970].

    Tags, the pin and later metrics are read when first asked for and then kept in this object; what another process
    adds afterwards shows in objects made afterwards.
    """

    def __init__(
        self,
        files: StoreFiles,
        run: str,
        record: CommitRecord,
        *,
        marks: Callable[[], Mapping[str, Marks]] | None = None,
        evicted: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self._files = files
        self._record = record
        self._known_marks = marks  # of the whole run, where many checkpoints are made at once
        self._own_marks: Marks | None = None
        self._evicted = evicted  # the same for numbers
        self.run = run
        self.id = record.id
        self.seq = record.seq
        self.step = record.step
        self.parent = record.parent
        self.start = record.start
        self.kind = record.kind
        self.created = record.created

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id[:12]} of {self.run!r} at step {self.step:,}>"

    def _repr_html_(self) -> str:
        return presentation.html_checkpoint(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def files(self) -> StoreFiles:
        """The files of its store, for the parts of simckpt that work on them."""
        return self._files

    @property
    def record(self) -> CommitRecord:
        """Its record, for the parts of simckpt that keep the line of a run."""
        return self._record

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were given to the save, and those added later, which win."""
        return MappingProxyType({**self._record.metrics, **self._marks.metrics})

    @property
    def tags(self) -> frozenset[str]:
        """Its tags."""
        return self._marks.tags

    @property
    def pinned(self) -> bool:
        """Whether it is protected from pruning by policy."""
        return self._marks.pinned

    @property
    def tier(self) -> str:
        """Where its state is: "local", or "archive", from which it comes back by itself when it is read.

        Of a checkpoint that was listed with others it is what held at that time.
        """
        evicted = self._files.evicted(self.run) if self._evicted is None else self._evicted()
        return "archive" if self.seq in evicted else "local"

    @property
    def _marks(self) -> Marks:
        if self._own_marks is None:
            if self._known_marks is None:
                self._own_marks = self._files.marks_of(self.run, self.id)
            else:
                self._own_marks = self._known_marks().get(self.id) or UNMARKED
        return self._own_marks

    def tag(self, *tags: str) -> None:
        """Adds tags; the run may be in training meanwhile, by this or another process.

        Raises:
            InvalidNameError: a text that cannot be a tag: letters, digits, dots, underscores and hyphens, at most 100.
            CheckpointNotFoundError: it has been pruned.
            StorageError: the disk refused.
        """
        for tag in tags:
            self._files.tag(self.run, self.seq, tag)
        self._own_marks = self._files.marks_of(self.run, self.id)

    def untag(self, *tags: str) -> None:
        """Removes tags; those that it lacks are no error. Raises as `tag`."""
        for tag in tags:
            self._files.untag(self.run, self.seq, tag)
        self._own_marks = self._files.marks_of(self.run, self.id)

    def pin(self) -> None:
        """Protects it from pruning by policy, until `unpin`; raises as `tag`."""
        self._files.pin(self.run, self.seq)
        self._own_marks = self._files.marks_of(self.run, self.id)

    def unpin(self) -> None:
        """Ends the protection; raises as `tag`."""
        self._files.unpin(self.run, self.seq)
        self._own_marks = self._files.marks_of(self.run, self.id)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics that came after the save, such as those of a longer evaluation; of one name the latest counts.

        Args:
            metrics: {name: number}, at most 4 KB as JSON in one call. None is no value yet.

        Raises:
            ConfigurationError: no numbers, or too many.
            CheckpointNotFoundError, StorageError: as `tag`.
        """
        self._files.add_metrics(self.run, self.seq, checked_metrics(metrics))
        self._own_marks = self._files.marks_of(self.run, self.id)

    @property
    def rollback(self) -> Mapping[str, Any] | None:
        """Of a checkpoint of kind "rollback": what was abandoned, the level, the changes and the reason; else None."""
        return None if self._record.rollback is None else MappingProxyType(dict(self._record.rollback))

    @property
    def versions(self) -> Mapping[str, str]:
        """The library versions and the machine's architecture it was saved with."""
        return MappingProxyType(dict(self._record.versions))

    @property
    def host(self) -> str:
        """Name of the machine that saved it."""
        return self._record.host

    @property
    def duration(self) -> float:
        """From the moment when the save was due until it was written, mostly in the background [s]."""
        return self._record.duration

    @property
    def size(self) -> int:
        """What it added to the store when it was saved, replay rows included [bytes]."""
        return self._record.size

    @property
    def _start(self) -> StartRecord:
        return self._files.read_start(self.run, self.start)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The hyperparameters in force at the start of the run that saved it."""
        return MappingProxyType(dict(self._start.hyperparameters))

    @property
    def experiment(self) -> str | None:
        """The id that groups runs, as given to `Store.start`."""
        return self._start.experiment

    @property
    def git(self) -> Mapping[str, Any] | None:
        """The commit, whether there were changes, and a bounded diff, when the run was started; None outside of git.

        Keys: `commit`, `dirty`, `diff`, `diff_complete`, `left_out` and `untracked`; see `provenance.git_state`.
        """
        git = self._start.git
        return None if git is None else MappingProxyType(dict(git))

    @property
    def device(self) -> str:
        """The GPUs that torch had in use when the checkpointer was made, and the CPU; empty where unknown."""
        device = self._start.device
        return ", ".join(filter(None, [*device.get("gpus", ()), device.get("cpu", "")]))

    def as_facts(self) -> CheckpointFacts:
        """Returns what policies may look at."""
        return CheckpointFacts(self.id, self.step, self.metrics, self.created, self.size, self.tags)

    def fact(self, name: str) -> Any:
        """Returns what a name of the query language stands for, or None.

        Args:
            name: one of `query.FIELDS`, `metrics.<name>`, `hyperparameters.<name>` or `versions.<package>`.
        """
        group, dot, rest = name.partition(".")
        if not dot:
            return getattr(self, {"tag": "tags"}.get(name, name))
        if group == "metrics":
            return self._marks.metrics.get(rest, self._record.metrics.get(rest))
        if group == "versions":
            return self._record.versions.get(rest)
        return _dig(self._start.git if group == "git" else self._start.hyperparameters, rest)

    @property
    def nbytes(self) -> int:
        """Size of its own files [bytes], without the segments that it shares with other checkpoints."""
        return self._record.nbytes

    @property
    def shards(self) -> int:
        """How many ranks saved it together; 0 of one process, and of a copy from elsewhere."""
        return self._record.shards

    def leaves(self) -> Mapping[str, LeafRecord]:
        """Returns {path: record} of every leaf, in the order of the file; reads the index alone."""
        return self._files.index(self.run, self._record.seq).leaves

    def components(self) -> list[str]:
        """Returns the names of the components it holds."""
        return list(self._files.index(self.run, self._record.seq).components)

    def read(
        self, components: list[str] | None = None, *, slabs: Mapping[str, Slab] | None = None
    ) -> dict[str, state.Encoded]:
        """Returns the named components, or all, with every byte verified against its digest.

        Args:
            components: their names.
            slabs: {path: part} of leaves of which no more than that is wanted.

        Raises:
            LeafNotFoundError: the checkpoint has no such component.
            DamagedError: bytes differ from their digests; all damaged leaves are named.
        """
        return self._files.read(self.run, self._record.seq, components, slabs=slabs)

    def leaf(self, path: str) -> state.Leaf:
        """Returns one leaf as the file stores it, verified."""
        return self._files.read_leaves(self.run, self._record.seq, [path])[path]

    def __getitem__(self, path: str) -> Any:
        """Returns the leaf at a path such as `envs/physics/qpos` as an array or tensor, or a component's whole tree.

        The structure of a component, `<component>/_tree`, is its JSON as a text.

        Raises:
            LeafNotFoundError: there is neither; the message lists the near ones.
        """
        leaves = self.leaves()
        if path in leaves:
            leaf = self.leaf(path)
            if leaves[path].kind == STRUCTURE_KIND:
                return _structure_text(leaf, path)
            return state.leaf_value(leaf)
        if path in self.components():
            encoded = self.read([path])[path]
            return state.decode(encoded.leaves, encoded.structure)
        raise LeafNotFoundError(
            f"checkpoint {self.id} has no leaf {path!r}{nearest(path, [*leaves, *self.components()])}"
        )

    def branch(
        self,
        name: str,
        overrides: Mapping[str, Any] | None = None,
        *,
        rng: str = "continue",
        store: Store | None = None,
        experiment: str | None = None,
    ) -> Run:
        """Returns a new run, to read, that starts from this checkpoint, in constant time: nothing is copied.

        The training script that made this checkpoint runs the branch, with the same command line and the new run's
        name. From now on the checkpoint is protected from pruning. A post-mortem and an abandoned checkpoint can be
        branched from like any other.

        Args:
            name: of the new run: letters, digits, dots, underscores and hyphens, at most 100.
            overrides: {hyperparameter: value}, of those in force here and of the same types; a list may be longer or
                shorter, and where it is None here any type will do.
            rng: "continue": the random streams go on as saved, so that the branch equals this run until an override
                acts; "reseed": all are derived anew from this checkpoint's id, the original's if this is an import, and
                from the name, the same each time.
            store: another store, in which the branch begins; this checkpoint is imported there first.
            experiment: an id of your own that groups runs; that of this checkpoint by default.

        Raises:
            ConfigurationError: overrides of unknown keys, of wrong types or not finite, all of them; or another `rng`.
            InvalidNameError: the name cannot be a folder.
            ConflictError: a run of that name exists, or this checkpoint is being pruned.
            CheckpointNotFoundError: it has been pruned.
            StorageError: the disk refused; there is no such run then.

        Warns:
            BranchWarning: an override of a key that holds the name of this checkpoint's run.
        """
        from simckpt.branching.branch import branch
        from simckpt.store import Store

        if store is not None and not isinstance(store, Store):
            message = f"store is a simckpt.Store, such as simckpt.Store({str(store)!r}), got {store!r}"
            raise ConfigurationError(message, keys=["store"])
        files = self._files if store is None else store.made()
        return branch(self, name, overrides or {}, rng=rng, files=files, experiment=experiment)

    def export(self, path: str | os.PathLike[str], *, to: str | None = None) -> Path:
        """Returns the path of a new file that holds this checkpoint by itself, rows of replay buffers included.

        `Store.import_checkpoint` takes it, whatever its form. Every byte is verified on the way, and none but a few MB
        of it are in memory at a time. Other tools read "h5" with any HDF5 viewer, "pt" by
        `torch.load(path, weights_only=True)["state"]["agent"]`, and "safetensors" as tensors named `agent/<name>`.

        Args:
            path: of the new file.
            to: "h5", "pt" or "safetensors"; by default what the path ends in, and "h5" otherwise.

        Raises:
            ConfigurationError: another form.
            ConflictError: the path exists; nothing is replaced.
            UnsupportedFormatError: "pt" needs torch.
            DamagedError: the checkpoint's files are damaged; nothing was written.
            StorageError: the disk refused; there is no such file then.
        """
        target = Path(path).expanduser()
        form = exports.form_of(target, to)
        self._files.export(self.run, self.seq, target, metrics=self.metrics, to=form)
        return target

    def restore(self, components: Mapping[str, Any]) -> None:
        """Puts the saved states into the live objects, in place: all of them or none.

        Every byte is read and verified first, then an undo copy of the live objects is taken, keys and shapes are
        compared with them, and only then anything changes. Components of the checkpoint that are not asked for are left
        alone, so an evaluation may restore the agent by itself.

        Args:
            components: {name: live object} as registered with `Run.checkpointer`.

        Raises:
            DamagedError: the files are damaged; it names all damaged leaves, and the newest checkpoint of the run that
                comes back whole, for which all of that one is read.
            StateMismatchError: the state does not fit; all differences are listed.
            RestoreError: a component failed halfway; everything was put back.
            CaptureError: the undo copy could not be taken; nothing was touched.
            HalfRestoredError: a component failed halfway and could not be put back.

        Warns:
            VersionWarning: saved with other versions or on another machine.
        """
        try:
            self.restore_bound(bind(components))
        except DamagedError as error:
            from simckpt.maintenance.fallback import name_intact

            name_intact(error, self)
            raise

    def restore_bound(self, bound: Mapping[str, BoundComponent], adjustment: Adjustment | None = None) -> None:
        """Does what `restore` does, for components that are bound already; `adjustment` says what is to differ.

        Raises:
            ConfigurationError: the adjustment names what there is not; nothing was touched.
        """
        available = set(self.components())
        untouched = frozenset() if adjustment is None else adjustment.untouched
        wanted = {name: each for name, each in bound.items() if name in available and name not in untouched}
        own = {each.own: name for name, each in wanted.items() if each.own in available and each.ranks == self.shards}
        saved = self.read([*wanted, *own], slabs=wanted_parts(wanted, self.leaves))
        for kept, name in own.items():
            saved[name] = overlaid(saved[name], saved.pop(kept))
        differences = provenance.version_differences(self.versions, provenance.versions())
        if differences:
            # before anything changes: a program may turn warnings into errors
            message = f"checkpoint {self.id} was saved elsewhere, and going on from it may not be bit-exact: "
            warnings.warn(message + "; ".join(differences), VersionWarning, stacklevel=3)
        source = f"checkpoint {self.id} (run {self.run!r}, step {self.step})"
        apply(bound, saved, source=source, adjustment=adjustment, available=available)


def _structure_text(leaf: state.Leaf, path: str) -> str:
    try:
        return bytes(leaf.data).decode("utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise FormatError(f"the structure {path!r} is not UTF-8: {error}") from error


def _dig(values: Any, path: str) -> Any:
    """Returns the value at a path such as `optimizer.lr` in nested dicts, whose keys may hold dots; None if missing."""
    if not isinstance(values, Mapping):
        return None
    if path in values:
        return values[path]
    return next(
        (
            found
            for key, inner in values.items()
            if path.startswith(f"{key}.") and (found := _dig(inner, path[len(key) + 1 :])) is not None
        ),
        None,
    )
