"""Files: the store on disk, durable writes, HDF5 layout, reads by index, claims. FORMAT.md is the specification."""

from simckpt.storage.claims import Claim
from simckpt.storage.index import LeafRecord
from simckpt.storage.marks import Marks
from simckpt.storage.records import CommitDraft, CommitRecord, RunRecord, StoreRecord, TombstoneRecord
from simckpt.storage.starts import StartRecord
from simckpt.storage.store_files import Commit, StoreFiles
from simckpt.storage.store_reader import Index

__all__ = [
    "Claim",
    "Commit",
    "CommitDraft",
    "CommitRecord",
    "Index",
    "LeafRecord",
    "Marks",
    "RunRecord",
    "StartRecord",
    "StoreFiles",
    "StoreRecord",
    "TombstoneRecord",
]
