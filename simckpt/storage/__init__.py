"""Files: the store on disk, durable writes, HDF5 layout, reads by index, claims. FORMAT.md is the specification."""

from simckpt.storage.claims import Claim
from simckpt.storage.index import LeafRecord
from simckpt.storage.records import CommitDraft, CommitRecord, RunRecord, StoreRecord, TombstoneRecord
from simckpt.storage.store_files import StoreFiles
from simckpt.storage.store_reader import Index

__all__ = [
    "Claim",
    "CommitDraft",
    "CommitRecord",
    "Index",
    "LeafRecord",
    "RunRecord",
    "StoreFiles",
    "StoreRecord",
    "TombstoneRecord",
]
