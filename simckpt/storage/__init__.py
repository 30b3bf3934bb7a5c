"""Files: the store on disk, durable writes, HDF5 layout, reads by index, claims. FORMAT.md is the specification."""

from simckpt.storage.claims import Claim
from simckpt.storage.index import LeafRecord
from simckpt.storage.indexes import Index
from simckpt.storage.marks import Marks
from simckpt.storage.records import CommitDraft, CommitRecord, Shard, StoreRecord, TombstoneRecord
from simckpt.storage.run_records import BranchRecord, ImportRecord, RunRecord
from simckpt.storage.starts import StartRecord
from simckpt.storage.store_compacting import Leftovers
from simckpt.storage.store_files import Commit, StoreFiles

__all__ = [
    "BranchRecord",
    "Claim",
    "Commit",
    "CommitDraft",
    "CommitRecord",
    "ImportRecord",
    "Index",
    "LeafRecord",
    "Leftovers",
    "Marks",
    "RunRecord",
    "Shard",
    "StartRecord",
    "StoreFiles",
    "StoreRecord",
    "TombstoneRecord",
]
