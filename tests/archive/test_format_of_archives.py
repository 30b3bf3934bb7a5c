"""What FORMAT.md says of archives is so."""

import json
import re
from pathlib import Path

import pytest
from archive_helpers import RUN, archive, filled
from storage_helpers import snapshot

import simckpt.storage
from simckpt.archive.archive import KEEP_FETCHED
from simckpt.errors import DamagedError, FormatError, UnsupportedFormatError
from simckpt.storage import StoreFiles, archived

DOCUMENT = (Path(simckpt.storage.__file__).parent / "FORMAT.md").read_text()


def documented(name: str) -> list[str]:
    """The keys that the document gives a record, in their order."""
    (line,) = re.findall(rf"^{re.escape(name)} +\{{(.*)\}}$", DOCUMENT, re.MULTILINE)
    return re.findall(r'"(\w+)"', line.replace(': "simckpt archive"', "").replace(': "simckpt archived"', ""))


@pytest.fixture
def files(tmp_path):
    files, _ = filled(tmp_path / "store", 2)
    archive(files, tmp_path / "archive", 1).move()
    return files


def test_the_records_have_the_keys_that_are_documented(files, tmp_path):
    noted = json.loads((files.path / f"runs/{RUN}/archived/00000001.json").read_text())
    assert list(noted) == documented("archived/<seq>.json")
    assert noted["files"].keys() == {"commit.json", "leaves.json", "state.h5"}
    assert all(entry.keys() == {"size", "digest"} for entry in [*noted["files"].values(), *noted["segments"].values()])
    assert list(json.loads((files.path / "archive/archive.json").read_text())) == documented("archive/archive.json")
    assert json.loads((tmp_path / "archive/store.json").read_text())["archive_of"] == files.id
    assert KEEP_FETCHED == 86_400
    assert "stays here for a day at least" in " ".join(DOCUMENT.split())


def test_a_store_holds_what_is_documented(files):
    found = {name.partition("/")[0] for name in snapshot(files.path)}
    assert found == {"archive", "runs", "segments", "store.json"}
    kinds = {name.split("/")[2] for name in snapshot(files.path) if name.startswith("runs/")}
    assert kinds == {"archived", "checkpoints", "events.jsonl", "run.json"}


def test_an_archive_holds_what_is_documented(files, tmp_path):
    names = {re.sub(r"[0-9a-f]{32}", "<id>", name) for name in snapshot(tmp_path / "archive")}
    names = {re.sub(r"0000000[12]", "<seq>", name) for name in names}
    run = f"runs/{RUN}"
    content = {f"{run}/checkpoints/<seq>/{name}" for name in ("commit.json", "leaves.json", "state.h5")}
    beside = {f"{run}/run.json", f"{run}/archived/<seq>.json"}
    assert names == content | beside | {"store.json", "segments/<id>.h5"}


@pytest.mark.parametrize("name", ["archive", "archived"])
def test_records_are_read_strictly(files, name):
    path = files.path / ("archive/archive.json" if name == "archive" else f"runs/{RUN}/archived/00000001.json")
    data = path.read_bytes()

    def parse(data: bytes) -> object:
        if name == "archive":
            return archived.parse_archive(data, path)
        return archived.parse_archived(data, path, seq=1)

    assert parse(data).to_bytes() == data
    for place in range(0, len(data), 7):
        with pytest.raises((DamagedError, FormatError)):
            parse(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises((DamagedError, FormatError)):
            parse(data[:place])


@pytest.mark.parametrize(
    "change",
    [
        ('"seq": 1', '"seq": 2'),
        ("state.h5", "../state.h5"),
        ("sha256:", "sha256;"),
        ('"version": "0.', '"version": "9.'),
        ('"size": ', '"size": -'),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused_although_its_digest_is_right(files, change):
    import xxhash

    path = files.path / f"runs/{RUN}/archived/00000001.json"
    body = path.read_bytes().partition(b',\n "digest"')[0].decode().replace(*change, 1).encode()
    digest = xxhash.xxh3_128_hexdigest(body)
    with pytest.raises((FormatError, UnsupportedFormatError)):
        archived.parse_archived(body + f',\n "digest": "xxh3-128:{digest}"\n}}\n'.encode(), path, seq=1)


def test_a_store_with_evicted_checkpoints_can_be_read_without_obstore(files, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    store = simckpt.Store(files.path)
    assert [each.tier for each in store.run(RUN).checkpoints()] == ["archive", "local"]
    store.run(RUN).latest().leaves()
    StoreFiles.open(files.path).verify(RUN, 2)
    with pytest.raises(simckpt.SimckptError, match=r"simckpt\[archive\]"):
        store.files.read(RUN, 1)
