"""FORMAT.md is true: its examples have the keys of the records in the golden store, its numbers are the code's."""

import json
import re
from pathlib import Path

import simckpt.storage
from simckpt.storage import claims, preparing, records, sealed, starts, unchanged, work

DOCUMENT = (Path(simckpt.storage.__file__).parent / "FORMAT.md").read_text()
GOLDEN = Path(__file__).parent / "golden" / f"v{sealed.VERSION[0]}.{sealed.VERSION[1]}"


def records_of(root: Path) -> list[dict]:
    """All records of a store, and the directory of the exported file beside it."""
    found = [json.loads(path.read_bytes()) for path in sorted(root.rglob("*.json"))]
    exported = (root / "exported.h5").read_bytes()
    length = int(exported[-17:-1], 16)
    return [*found, json.loads(exported[-32 - length : -32])]


def test_the_examples_have_the_keys_of_real_records():
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]
    found = {example["format"]: example for example in examples}
    # what only some records have is told in words: the key of a rollback, an index without segments
    real = {
        record["format"]: record
        for record in records_of(GOLDEN)
        if record.get("kind") != "rollback"
        if record["format"] != "simckpt index" or "segments" in record
    }
    assert found.keys() == real.keys()
    for name, record in real.items():
        assert list(found[name]) == list(record), name
    lines, leaves = found["simckpt index"]["leaves"], real["simckpt index"]["leaves"]
    assert {key for line in lines for key in line} == {key for leaf in leaves for key in leaf}
    (segment, *_), (other, *_) = found["simckpt index"]["segments"], real["simckpt index"]["segments"]
    assert segment.keys() == other.keys()


def test_the_numbers_are_those_of_the_code():
    assert f"version {sealed.VERSION[0]}.{sealed.VERSION[1]}" in DOCUMENT.splitlines()[0]
    assert f"**{claims.STALE_AFTER:.0f} s**" in DOCUMENT
    assert f"every {claims.BEAT_EVERY:.0f} s" in DOCUMENT
    assert f"{claims.RESERVE >> 10} KB" in DOCUMENT
    assert f"at most {records.COMMIT_LIMIT >> 10} KB" in DOCUMENT
    assert f"at most **{preparing.MAX_SEGMENTS}** segments" in DOCUMENT
    assert f"of at least {unchanged.LARGE >> 20} MB" in DOCUMENT
    assert f"at most {starts.START_LIMIT >> 20} MB" in DOCUMENT
    assert work.UNKNOWN_AGE == 86_400
    assert "swept after a day" in DOCUMENT
