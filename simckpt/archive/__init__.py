"""The archive: a copy of a store in an object store or on another disk, evicted checkpoints, moving whole runs."""

from simckpt.archive.archive import Archive, bring_back, bring_session_back
from simckpt.archive.objects import Patience
from simckpt.archive.passes import Moved
from simckpt.archive.verifying import Verified

__all__ = ["Archive", "Moved", "Patience", "Verified", "bring_back", "bring_session_back"]
