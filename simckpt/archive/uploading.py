"""Brings one commit into an archive. The order is FORMAT.md's: claim, content, read back, and the commit last."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from simckpt.archive import contents
from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects, lost
from simckpt.errors import ArchiveDamagedError, CheckpointNotFoundError, ConflictError, DamagedError
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord
from simckpt.storage.archived import ArchivedRecord, Copied
from simckpt.storage.durable import CHUNK
from simckpt.storage.index import INDEX_FILE
from simckpt.storage.records import SHARDS_FILE
from simckpt.storage.store_reader import COMMIT_FILE


class Uploads:
    """Uploads commits of a store into an archive, each segment once.

    Attributes:
        objects: of the archive.
        archive: its id.
        listing: what is there.
        nbytes: what was brought until now [bytes].
        written: how many objects were written.

    Args:
        objects: of the archive.
        files: of the store.
        archive: id of the archive.
        listing: what is in the archive; brought up to date.
    """

    def __init__(self, objects: Objects, files: StoreFiles, archive: str, listing: Listing) -> None:
        self.objects = objects
        self._files = files
        self.archive = archive
        self.listing = listing
        self._verified: dict[str, Copied] = {}
        self.nbytes = 0
        self.written = 0

    def trust(self, record: ArchivedRecord) -> None:
        """Takes the segments of an archived checkpoint for good, whose copies were read back when it was moved."""
        for identity, copied in record.segments.items():
            if self.listing.has(contents.segment_object(identity), copied):
                self._verified[identity] = copied

    def is_there(self, run: str, record: ArchivedRecord) -> bool:
        """Returns whether all of a checkpoint is there with these bytes, which are read back, and its manifest."""
        with contextlib.suppress(ArchiveDamagedError):
            manifest = contents.read_manifest(self.objects, run, record.seq)
            if manifest is not None and (manifest.files, manifest.segments) == (record.files, record.segments):
                wanted = contents.expected(record, run)
                return all(self.objects.digest(name, copied.size) == copied for name, copied in wanted.items())
        return False

    def upload(self, run: str, seq: int) -> ArchivedRecord:
        """Returns what the archive holds of a checkpoint, now that all of it is there and was read back.

        Raises:
            CheckpointNotFoundError: it was pruned.
            DamagedError: it is damaged here, and so was not moved; SegmentMissingError if segments are gone.
            ArchiveDamagedError: the archive does not give back what was written.
            ConflictError: somebody else has written a commit of this number.
            ArchiveUnavailableError: the archive cannot be reached; the next try goes on from here.
        """
        try:
            record = self._describe(run, seq)
            self._claim(run, record)
            for identity, copied in record.segments.items():
                if identity not in self._verified:
                    name = contents.segment_object(identity)
                    self.bring(name, self._files.segment_file(identity), copied)
                    self._verified[identity] = copied
            folder = self._files.folder_of(run, seq)
            for file, copied in record.files.items():
                if file != COMMIT_FILE:
                    self.bring(contents.file_object(run, seq, file), folder / file, copied)
        except FileNotFoundError as error:
            self._files.segment_ids(run, seq)  # pruned meanwhile, or evicted by somebody else
            where = Path(error.filename) if error.filename else self._files.folder_of(run, seq)
            raise DamagedError(f"files of checkpoint {seq} of run {run!r} are gone", path=where) from error
        if self.objects.read(contents.manifest_object(run, seq)) != record.to_bytes():
            raise lost(self.objects.place, contents.manifest_object(run, seq), "is not what was written there")
        self.commit(run, seq)
        return record

    def _describe(self, run: str, seq: int) -> ArchivedRecord:
        """Returns what is to be uploaded, every byte of it verified that this process has not yet uploaded."""
        index = self._files.verify(run, seq, besides=self._verified)
        folder = self._files.folder_of(run, seq)
        segments = {
            identity: self._verified.get(identity) or describe(self._files.segment_file(identity))
            for identity in index.segments
        }
        _, data = self._files.record_bytes(run, seq)
        commit = index.commit
        # arrays first, and last what vouches for the rest
        names = sorted(commit.names, key=lambda name: (not name.endswith(".h5"), name in (INDEX_FILE, SHARDS_FILE)))
        files = {name: describe(folder / name) for name in names} | {COMMIT_FILE: describe(data)}
        return ArchivedRecord(commit.id, commit.run, seq, self.archive, files, segments)

    def _claim(self, run: str, record: ArchivedRecord) -> None:
        """Writes the manifest, which gives this checkpoint alone the right to the names of its number."""
        name, data = contents.manifest_object(run, record.seq), record.to_bytes()
        if self._has(name, data):
            return
        self.written += 1
        if not self.objects.create(name, data):
            self._check_ours(run, record.seq, record.checkpoint)
            self.objects.put(name, data)
        if self.objects.read(name) != data:
            self.objects.put(name, data)
        self.listing.sizes[name] = len(data)

    def _has(self, name: str, data: bytes) -> bool:
        return name in self.listing.sizes and self.objects.read(name) == data

    def _check_ours(self, run: str, seq: int, checkpoint: str) -> None:
        """Raises ConflictError if the archive has another checkpoint of that number, as far as that can be read."""
        for read in (contents.read_manifest, contents.read_commit):
            with contextlib.suppress(ArchiveDamagedError):  # what is damaged there is replaced by what is good here
                found = read(self.objects, run, seq)
                theirs = found.checkpoint if isinstance(found, ArchivedRecord) else found and found[0].id
                if theirs is not None and theirs != checkpoint:
                    raise _conflict(run, seq, checkpoint, theirs)

    def bring(self, name: str, source: Path, copied: Copied) -> None:
        """Sees to it that an object has the bytes of a file: uploads it, unless it is there, and reads it back."""
        if self.listing.has(name, copied) and self.objects.digest(name, copied.size) == copied:
            return
        for _ in range(2):
            self.objects.put(name, source)
            if self.objects.digest(name, copied.size) == copied:
                self.listing.sizes[name] = copied.size
                self.nbytes += copied.size
                self.written += 1
                return
        raise lost(self.objects.place, name, "is not what was written there, twice")

    def settle(self, name: str, data: bytes, check_ours: Callable[[], object]) -> None:
        """Writes a record that is the only one of its name; what is damaged there gives way, as does older wording.

        Args:
            name: of the object.
            data: its bytes.
            check_ours: raises ConflictError if what is there is somebody else's.
        """
        if self._has(name, data):
            return
        for _ in range(2):
            if not self.objects.create(name, data):
                check_ours()
                self.objects.put(name, data)
            if self.objects.read(name) == data:
                self.listing.sizes[name] = len(data)
                self.nbytes += len(data)
                self.written += 1
                return
        raise lost(self.objects.place, name, "is not what was written there, twice")

    def commit(self, run: str, seq: int) -> None:
        """Writes the record of a commit, or of one that was pruned, whose content is there; raises as `upload`."""
        record, data = self._files.record_bytes(run, seq)

        def check_ours() -> None:
            self._check_ours(run, seq, record.id)
            if isinstance(record, CommitRecord) and self._is_pruned(run, seq):
                raise CheckpointNotFoundError(f"checkpoint {record.id} of run {run!r} was pruned in the archive")

        self.settle(contents.file_object(run, seq, COMMIT_FILE), data, check_ours)

    def _is_pruned(self, run: str, seq: int) -> bool:
        with contextlib.suppress(ArchiveDamagedError):
            found = contents.read_commit(self.objects, run, seq)
            return found is not None and isinstance(found[0], TombstoneRecord)
        return False


def describe(source: Path | bytes) -> Copied:
    """Returns size and digest of a file or of bytes; raises FileNotFoundError or SegmentMissingError if it is gone."""
    hasher = hashlib.sha256()
    if isinstance(source, bytes):
        hasher.update(source)
        return Copied(len(source), f"sha256:{hasher.hexdigest()}")
    size = 0
    with source.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            hasher.update(data)
            size += len(data)
    return Copied(size, f"sha256:{hasher.hexdigest()}")


def _conflict(run: str, seq: int, ours: str, theirs: str) -> ConflictError:
    return ConflictError(
        f"commit {seq} of run {run!r} is checkpoint {ours} here and {theirs} in the archive: both sides have written "
        f"since they parted. Nothing was changed; branch from one of the two under another name to keep both"
    )
