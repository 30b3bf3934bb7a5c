"""A folder of runs."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simckpt import damage, fallbacks, provenance, query
from simckpt.addresses import find
from simckpt.catalog import Catalog
from simckpt.checkpoint import Checkpoint
from simckpt.errors import (
    ConflictError,
    NotAStoreError,
    StoreError,
)
from simckpt.listing import RunContents, listed, matching
from simckpt.ranks import check_names, claimed, ranks_of_program
from simckpt.run import Run
from simckpt.session_pruning import SessionVerdict, prune_sessions
from simckpt.storage import Leftovers, RunRecord, StoreFiles

if TYPE_CHECKING:
    from simckpt.archive import Archive
    from simckpt.archive.session_transfer import SessionTransfer
    from simckpt.archive.transfer import Transfer
    from simckpt.branching.lineage import Graph
    from simckpt.hardware.session import Session
    from simckpt.maintenance.findings import Report
    from simckpt.maintenance.repair import Repair
    from simckpt.policies import KeepPolicy
    from simckpt.ranks import Ranks


class Store:
    """A folder of runs. Opening one writes nothing; the first `start` makes the folder.

    ```python
    store = simckpt.Store("experiments")
    run = store.start("ant-ppo")                  # to write: creates the run, or reopens it after a crash
    checkpoint = store.run("ant-ppo").latest()    # to read
    ```

    Args:
        path: the store's folder, or a store.

    Raises:
        NotAStoreError: the path exists and is neither a store nor an empty folder.
        UnsupportedFormatError: the store needs a newer simckpt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: StoreFiles | None = None
        if self.path.exists() and not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is not a store but a file: give the path of its folder")
        if not _is_vacant(self.path):
            self._files = _backed(StoreFiles.open(self.path))

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}>"

    def __fspath__(self) -> str:
        # so that Store(store) is the same store, in functions that get a path from fan_out and a store from others
        return str(self.path)

    @property
    def files(self) -> StoreFiles:
        """The store's files, for the parts of simckpt that work on them.

        Raises:
            NotAStoreError: nothing has been started in this folder yet.
        """
        if self._files is None:
            if _is_vacant(self.path):
                raise NotAStoreError(f"{self.path} is not a store yet: the first Store.start(name) makes it")
            # somebody else has made it since
            self._files = _backed(StoreFiles.open(self.path))
        return self._files

    def made(self) -> StoreFiles:
        """Returns `files` of a store that is made now if there is none; raises StorageError if the disk refuses."""
        if self._files is None:
            self._files = _backed(StoreFiles.create(self.path))
        return self._files

    @property
    def id(self) -> str:
        """The store's random id, 32 hex digits."""
        return self.files.id

    def start(self, name: str, *, experiment: str | None = None) -> Run:
        """Returns the run to write to: a new one, or the existing one of that name, to go on with.

        The run stays claimed by this process until `Run.close`, the end of a `with`, or the end of the process. Started
        once more by this process before it has a checkpointer, it passes to the new `Run`, and the old one is closed.

        Where `torch.distributed` has a process group of several ranks, all of them call this: rank 0 holds the claim,
        and what follows is done by all together.

        Args:
            name: letters, digits, dots, underscores and hyphens, at most 100.
            experiment: an id of your own that groups runs; kept with a new run, and with this start of an old one.

        Raises:
            ConfigurationError: ranks start runs of different names, or are at different calls.
            CoordinationError: not all ranks have called this.
            InvalidNameError: the name cannot be a folder.
            RunLockedError: another process is writing this run, or this one has a checkpointer for it.
        """
        ranks = ranks_of_program()
        own: list[Run] = []
        try:
            check_names(ranks.gather(str(name)))
            ranks.first(lambda: own.append(self._start(name, experiment, ranks)))
            # the others, which find here what rank 0 has made
            return ranks.each(lambda: own[0] if own else self._follow(name, ranks))
        except BaseException:
            for run in own:
                run.close()
            ranks.leave()
            raise

    def _start(self, name: str, experiment: str | None, ranks: Ranks) -> Run:
        files = self.made()
        # now, for the files may be edited while the run trains
        git = provenance.git_state(Path.cwd())
        commit = None if git is None else {"commit": git["commit"], "dirty": git["dirty"]}
        if name not in files.runs():
            self._create(files, name, experiment, commit)
        claim = claimed(files, name)
        try:
            run = Run(files, name, claim=claim, ranks=ranks, git=git, experiment=experiment)
            run.log("started", git=commit, versions=dict(provenance.versions()))
            files.keep_reserve()
        except BaseException:
            claim.release()
            raise
        return run

    def _follow(self, name: str, ranks: Ranks) -> Run:
        return Run(self.made(), name, claim=ranks.claim(name), ranks=ranks)

    def _create(self, files: StoreFiles, name: str, experiment: str | None, git: Mapping[str, Any] | None) -> None:
        record = RunRecord(
            id=uuid.uuid4().hex,
            name=name,
            created=time.time(),
            experiment=experiment,
            git=git,
            versions=provenance.versions(),
            host=platform.node(),
        )
        # another process that starts the same run at this moment may win; the claim decides between the two
        with contextlib.suppress(ConflictError):
            files.write_run(name, record)

    def run(self, name: str) -> Run:
        """Returns the run of that name, to read.

        Raises:
            RunNotFoundError: there is none; the message lists the near ones.
        """
        return Run(self.files, name)

    def runs(self) -> list[Run]:
        """Returns every run, to read, in the order of their creation."""
        return sorted((Run(self.files, name) for name in self.files.runs()), key=lambda run: (run.created, run.name))

    def sessions(self) -> list[Session]:
        """Returns every recording of hardware in the loop, in the order of their beginnings."""
        from simckpt.hardware.session import sessions

        return sessions(self.files.path, fallback=fallbacks.of_sessions(self.files))

    def session(self, name: str) -> Session:
        """Returns the recording of that name; raises SessionNotFoundError if there is none."""
        from simckpt.hardware.session import session

        return session(self.files.path, name, fallback=fallbacks.of_sessions(self.files))

    def prune_sessions(self, keep: KeepPolicy, *, dry_run: bool = False) -> list[SessionVerdict]:
        """Removes the closed sessions that a policy does not keep; returns a verdict on each, oldest first.

        Never removed: the newest, pinned ones, and those that are being recorded or were not closed. The checkpoints
        that were driving may be pruned then; an archive removes its copies at its next pass.

        Args:
            keep: such as `simckpt.KeepLast(20) | simckpt.MaxBytes(10**10)`; sessions have no steps, metrics or tags.
            dry_run: only say what would be removed.

        Raises:
            ConfigurationError: a policy by steps, metrics or tags.
            RunLockedError, StorageError: one cannot be removed; those before it are.
        """
        return prune_sessions(self.files, keep, dry_run=dry_run)

    def graph(self) -> Graph:
        """Returns the tree of all runs: branches, overrides, steps, metrics, bytes added, rollbacks.

        What is damaged is told in it and hides nothing else.
        """
        from simckpt.branching.lineage import graph

        return graph(self.files)

    def _repr_html_(self) -> str:
        if self._files is None:
            return repr(self)
        count = len(self._files.sessions())
        return self.graph()._repr_html_() + (f"<p>{count} sessions: store.sessions()</p>" if count else "")

    def contents(self, *, abandoned: bool = True) -> list[RunContents]:
        """Returns what each run holds, in the order of creation; runs whose record is damaged come last.

        Damaged records are told and hide no others. What the records say is kept in the user's cache folder, so that
        ten thousand checkpoints are listed in less than a second.

        Args:
            abandoned: also the checkpoints that the head of their run does not descend from.
        """
        found = []
        names = self.files.runs()
        with Catalog(self.files) as catalog:
            catalog.forget_other_runs(names)
            for name in names:
                try:
                    contents = catalog.contents(name)
                except StoreError as error:
                    found.append(RunContents(name, None, [], ((None, error),)))
                    continue
                found.append(listed(self.files, name, contents, abandoned=abandoned))
        return sorted(found, key=lambda each: (math.inf if each.run is None else each.run.created, each.name))

    def checkpoints(
        self,
        where: str | None = None,
        *,
        abandoned: bool = False,
        damaged: dict[tuple[str, int | None], StoreError] | None = None,
    ) -> list[Checkpoint]:
        """Returns the checkpoints of all runs, in the order of the runs' creation and of commits.

        Args:
            where: a condition such as `"eval/return > 3000 and git.commit = '4f2c9a1'"`; `simckpt.query` describes it.
            abandoned: also those that the head of their run does not descend from.
            damaged: receives {(run, commit number or None for the run's record): error} of damaged records, which hide
                no others. Where the condition asks for what a record of a start
                holds and that is damaged, its error is there once, by the first of its checkpoints, none of which has
                these facts.

        Raises:
            QueryError: the condition has no meaning, or has a name that nothing in the store has.

        Warns:
            DamageWarning: of the damaged records, if there is no `damaged` to receive them.
        """
        wanted = None if where is None else query.parse(where)
        found: list[Checkpoint] = []
        passed: dict[tuple[str, int | None], StoreError] = {} if damaged is None else damaged
        for contents in self.contents(abandoned=abandoned):
            for seq, error in contents.damaged:
                passed[contents.name, seq] = error
            found += contents.checkpoints
        if where is not None and wanted is not None:
            found = matching(where, wanted, found, passed)
        if damaged is None:
            told: dict[str, StoreError] = {}
            for (run, seq), error in passed.items():
                told |= {f"the record of run {run!r}": error} if seq is None else damage.of_commits(run, {seq: error})
            damage.warn_of_damage(told)
        return found

    def import_checkpoint(self, source: Checkpoint | str | os.PathLike[str], *, run: str | None = None) -> Checkpoint:
        """Returns the copy of a checkpoint of another store, as the first of a run of its own; made unless it is there.

        Every byte is verified on the way. Hyperparameters, metrics, versions and host are kept, and the run's record
        says where it came from, of a copy of a copy the original; the copy has an id of its own and no parent. A
        checkpoint of this store is returned as it is. It goes through memory a few MB at a time. A kill may leave the
        run without its checkpoint: the next import of the same one goes on there.

        Args:
            source: a checkpoint, or the path of a file that `Checkpoint.export` wrote: HDF5, `.pt` or safetensors.
            run: name of the new run; by default that of the checkpoint's own run, with a number if it is taken.

        Raises:
            InvalidNameError: the name cannot be a folder.
            ConflictError: a run of the given name exists, or the checkpoint is in the store already under another one,
                or its import was begun there and interrupted.
            ExportNotFoundError: there is no such file.
            DamagedError, FormatError: the source cannot be trusted; no run was made.
            UnsupportedFormatError: the file needs a newer simckpt, or a package that is not installed.
            RunLockedError: an interrupted import is to go on in a run that another process is writing.
            StorageError: the disk refused.
        """
        from simckpt.branching import importing

        found = importing.opened(source, run=run)
        return importing.import_checkpoint(self.made(), found, run=run)

    def compact(self, *, dry_run: bool = False, unknown: bool = False) -> Leftovers:
        """Frees what nobody refers to, and returns what that was.

        Kills and full disks leave such things: unfinished work of dead processes, segments of failed saves and of what
        was pruned, files of pruned checkpoints. No run is claimed: it may be done beside training, saves, branches and
        prunes of other processes and hosts. Unfinished work of other machines is left alone for a day. Segments that
        nothing in the store names at all are listed and stay, for they may be those of a run whose folder was moved
        away, or of what was taken out of quarantine.

        Args:
            dry_run: only say what would be freed.
            unknown: free these as well: nothing that was moved away is to be put back.

        Raises:
            NotAStoreError, DamagedError, FormatError: there is no store that can be read.
            SegmentsKeptError: something is damaged, missing or newer than this simckpt, so that it is not known what is
                used; nothing was freed.
            StorageError: the disk refused; what was freed until then is gone.
        """
        return self.files.leftovers(unknown=unknown) if dry_run else self.files.compact(unknown=unknown)

    def archive(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        policy: KeepPolicy | None = None,
        keep_sessions: KeepPolicy | None = None,
        new: bool = False,
    ) -> Archive:
        """Returns the archive of this store, a copy in an object store or on another disk; reaches for nothing yet.

        The address is kept in the store, so that later processes find it; credentials are not, and may not stand in it:
        they come from the environment and the usual configuration files.

        ```python
        with store.archive("s3://bucket/experiments", policy=simckpt.KeepLast(3)):
            train(store)    # checkpoints are copied meanwhile, and older ones leave the disk
        ```

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or the path of a
                folder, for this store alone; the one that the store knows if None, which you must have named
                once: a store from somebody else could name any place.
            policy: which checkpoints stay on the disk as well, such as `simckpt.KeepLast(3)`; all of them if None.
            keep_sessions: which closed sessions do, see `prune_sessions`; all of them if None.
            new: whether another archive may take the place of the one that the store knows, when that is lost for
                good; `Archive.move` refuses if the state of any checkpoint is in the old one alone.

        Raises:
            ConfigurationError: no address is known, or one with secrets in it; or obstore is not installed.
            ArchiveNotNamedError: you have never named the place that the store knows.
            DamagedError, FormatError: the record of the address cannot be trusted: give it again.
            StorageError: the disk refused.
        """
        from simckpt.archive import Archive

        files = self.made() if url is not None else self.files
        return Archive(files, url, policy=policy, keep_sessions=keep_sessions, new=new)

    def check(
        self,
        *,
        quick: bool = False,
        part: tuple[int, int] | None = None,
        resume: bool = False,
        seconds: float | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Returns what is wrong with the store and what lies about in it; the report is true if nothing is damaged.

        Every record, array and reference is verified; nothing is written into the store, and others may write it.

        Args:
            quick: leave out arrays.
            part: (k, n): the arrays of the k-th of n parts, from 1 on.
            resume: go on where the last such call stopped, which is kept in the user's cache folder.
            seconds: stop after so long, between two files [s]; `Report.left` says how many are left.
            tell: called with the bytes done and the bytes to do.
        """
        from simckpt.maintenance.check import Scope, check

        return check(self.files.path, Scope(quick, part, resume, seconds), tell=tell)

    def repair(self, *, quick: bool = False, dry_run: bool = False) -> Repair:
        """Returns what was done about the damage that a check finds; nothing is removed, and nothing guessed.

        Checkpoints that do not come back whole are moved to `quarantine/` and leave a tombstone; what other records
        prove is written again. It can be interrupted and done again. `quick`: let the check leave out arrays.
        """
        from simckpt.maintenance.check import Scope
        from simckpt.maintenance.repair import repair

        return repair(self.files.path, scope=Scope(quick), dry_run=dry_run)

    def push(self, run: str, url: str | os.PathLike[str], *, verify: bool = False) -> list[Transfer]:
        """Brings a run, with those it was branched from, to a place from which other machines `pull` it.

        The closed sessions that their checkpoints were driving go along.

        What that place has already is not brought again, unless it is gone or cut there; nothing good is replaced or
        removed.

        Args:
            run: the run's name.
            url: of the place, as for `archive`; not the archive of another store.
            verify: read all of it back as well, and write again what is damaged there.

        Returns:
            What was brought of each run.

        Raises:
            RunNotFoundError: there is no such run.
            ConflictError: both sides have written to the run since they parted, or it is another run; nothing was
                changed.
            DamagedError: a checkpoint is damaged here; all others were brought.
            ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or does not keep what it gets.
        """
        from simckpt.archive.transfer import push

        return push(self.files, run, url, verify=verify)

    def pull(self, url: str | os.PathLike[str], run: str | None = None, *, verify: bool = False) -> list[Transfer]:
        """Brings a run that was pushed or archived, its origins and its sessions, into this store; everything if None.

        It keeps its id and those of its checkpoints, so that training goes on with it bit for bit. What is gone or cut
        here is put right from there; with `verify` all that is here is read, and what is damaged put right.

        Raises:
            RunNotFoundError: there is no such run at that place.
            RunLockedError: a process is writing the run here.
            ConflictError: both sides have written to the run since they parted, or it is another run; nothing was
                changed.
            ArchiveUnavailableError: the place cannot be reached.
            ArchiveDamagedError: some of what is there is damaged or gone; all else was brought.
            StorageError: the disk refused.
        """
        from simckpt.archive.transfer import pull

        return pull(url, self.made(), run, verify=verify)

    def push_session(self, name: str, url: str | os.PathLike[str], *, verify: bool = False) -> SessionTransfer:
        """Brings a closed session to a place from which other machines pull it; its origin need not be there.

        Raises:
            SessionNotFoundError: there is no such session.
            ConflictError: it is not closed; or another session has that name there, or the same has another end there.
            DamagedError: it is damaged here.
            ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or does not keep what it gets.
        """
        from simckpt.archive.session_transfer import push_session

        return push_session(self.files, name, url, verify=verify)

    def pull_session(self, url: str | os.PathLike[str], name: str, *, verify: bool = False) -> SessionTransfer:
        """Brings a session that was pushed or archived into this store; what is gone or cut here is put right.

        It keeps its id, and can be read and played without the checkpoint that was driving.

        Raises:
            SessionNotFoundError: there is no such session at that place.
            ConflictError: another session has that name here, or the same with no or another end; nothing was changed.
            ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or what is there is damaged.
            StorageError: the disk refused.
        """
        from simckpt.archive.session_transfer import pull_session

        return pull_session(url, self.made(), name, verify=verify)

    def checkpoint(self, address: str) -> Checkpoint:
        """Returns a checkpoint by its id, or by `run`, `run@latest` or `run@<step>`.

        An id may be shortened to its first hex digits, at least six, as long as one checkpoint alone has them.

        Raises:
            CheckpointNotFoundError: no checkpoint, or more than one, has that address.
            RunNotFoundError: the part before `@` is no run.
            DamagedError, FormatError: the newest record of the run is asked for and cannot be trusted.

        Warns:
            DamageWarning: damaged records were passed over, that of the run perhaps.
        """
        return find(self, address)


def _backed(files: StoreFiles) -> StoreFiles:
    """Returns the files of a store; what of them is damaged or evicted is brought back from the archive when read."""
    files.fallback = fallbacks.of_checkpoints(files)
    return files


def _is_vacant(path: Path) -> bool:
    """Returns whether a store can still be made here: nothing there, or what a kill left of the making of one."""
    return not path.exists() or all(entry.name == "tmp" for entry in path.iterdir())
