"""Makes `golden_session_archive/`: a store whose sessions are in an archive, and the archive beside it.

    python tests/format/make_golden_session_archive.py

Its sessions are `evicted`, in the archive alone but for its records; `pinned`, on both sides; `removed`, which is no
more here, as a note says, and still there. Made once for a version of the format and kept from then on; later versions
read it (`test_golden_session_archive.py`).
"""

import shutil
from pathlib import Path

from make_golden_sessions import MOMENT, write_part, write_snapshot

from simckpt.archive.objects import Objects
from simckpt.archive.passes import Pass
from simckpt.archive.places import parse_place
from simckpt.policies import KeepLast
from simckpt.storage import StoreFiles, sealed
from simckpt.storage.archived import ArchiveRecord
from simckpt.storage.session_records import LinkRecord, SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session

HOME = Path(__file__).parent / "golden_session_archive"
ARCHIVE, URL = "a" * 32, "s3://golden/sessions"  # an address that is nobody's: a test names the folder in its place
NAMES = {"evicted": "c" * 32, "removed": "d" * 32, "pinned": "e" * 32}


def main() -> None:
    """Makes both anew."""
    shutil.rmtree(HOME, ignore_errors=True)
    store = StoreFiles.create(HOME / "store", clock=lambda: MOMENT, new_id=lambda: "0" * 31 + "1")
    links = (LinkRecord("motor", ("force",), ("force", "position"), "udp://127.0.0.1:9000"),)
    for number, (name, id) in enumerate(NAMES.items()):
        created = MOMENT + number
        create_session(store, SessionRecord(id, name, created, 5, links=links, signals=("heat",), host="golden"))
        with SessionWriter(store.path, name, clock=lambda: MOMENT + 9) as writer:
            for start in (0, 4, 8):
                write_snapshot(writer, start)
                write_part(writer, start, start + 4)
            writer.close()
    store.pin_session("pinned")
    objects = Objects(parse_place(HOME / "archive"))
    deed = {"requires": [], "id": ARCHIVE, "created": sealed.time_to_json(MOMENT), "archive_of": store.id}
    objects.put("store.json", sealed.seal("store", deed))
    store.write_archive(ArchiveRecord(ARCHIVE, URL, MOMENT))
    options = {"policy": KeepLast(1), "keep_fetched": 0.0, "going_on": lambda: True, "keep_sessions": KeepLast(1)}
    moved = Pass(objects, store, ARCHIVE, **options).run()
    assert moved.sessions == ["evicted", "pinned", "removed"], moved
    assert moved.evicted_sessions == ["evicted", "removed"], moved
    store.remove_session("removed")
    shutil.rmtree(HOME / "store/tmp")


if __name__ == "__main__":
    main()
