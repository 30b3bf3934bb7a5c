"""FORMAT.md is true: its examples have the keys of the records in the golden store, its numbers are the code's."""

import json
import re
from pathlib import Path

import simckpt.storage
from simckpt.storage import claims, preparing, records, sealed, starts, unchanged, work

DOCUMENT = (Path(simckpt.storage.__file__).parent / "FORMAT.md").read_text()
RANKS = Path(__file__).parent / "golden_ranks"
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


def blocks(language: str) -> list[str]:
    """The examples in fences of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def test_what_several_ranks_and_archives_add_has_the_keys_of_real_records():
    (listing,) = [json.loads(block) for block in blocks("") if '"simckpt shards"' in block]
    real = json.loads(next(RANKS.rglob("shards.json")).read_bytes())
    assert list(listing) == list(real)
    assert {key for line in listing["shards"] for key in line} == {key for line in real["shards"] for key in line}
    for file in ("state", "leaves"):
        assert listing["shards"][0][file].keys() == real["shards"][0][file].keys()
    (lines,) = [block for block in blocks("") if '"simckpt archived"' in block]
    told = {line.split()[0]: re.findall(r'"([a-z_]+)"(?=[,:}])', line) for line in lines.splitlines()}
    archive = json.loads((RANKS / "store/archive/archive.json").read_bytes())
    archived = json.loads(next(RANKS.glob("store/runs/*/archived/*")).read_bytes())
    assert told["archive/archive.json"] == list(archive)
    assert told["archived/<seq>.json"] == list(archived)
    assert json.loads((RANKS / "archive/store.json").read_bytes())["archive_of"]


def layout() -> dict[str, re.Pattern[str]]:
    """{line of the layout: pattern of the paths that it describes}."""
    (block,) = [each for each in blocks("") if each.startswith("<store>/")]
    found, folder = {}, ""
    for line in block.splitlines()[1:]:
        name = line.split("  ")[1] if line.startswith("  ") and not line.startswith("   ") else line.split()[0]
        name = name.strip().split("  ")[0]
        if line.startswith("      "):
            name = folder + name
        elif name.endswith("/"):
            folder = name
        pattern = re.escape(name)
        for word, meaning in WORDS.items():
            pattern = pattern.replace(re.escape(word), meaning)
        found[name] = re.compile(pattern + ("[^/]+" if name.endswith("/") else ""))
    return found


WORDS = {
    "<run>": "[^/]+",
    "<seq>": "[0-9]{8}",
    "<id>": "[0-9a-f]{32}",
    "<checkpoint id>": "[0-9a-f]{32}",
    "<rank>": "[0-9]{5}",
    "<n>": "[0-9]{5}",
    "<r>": "[0-9]{5}",
    "<path>": ".+",
    "<name>": "[^/]+",
    "<first>": "[0-9]{8}",
    "<last>": "[0-9]{8}",
    "<number>": "[0-9]{8}",
    "<digest>": "[0-9a-f]{32}",
    "<8 digits>": "[0-9]{8}",
}
# what lives no longer than a process or a step
PASSING = (
    "runs/<run>/writer/",
    "archive/writer/",
    "sessions/<name>/writer/",
    "trash/<id>.<8 digits>.h5",
    "tmp/",
)


def test_every_file_of_the_golden_stores_is_in_the_layout():
    known, seen = layout(), set()
    home = Path(__file__).parent
    roots = [*(home / "golden").iterdir(), home / "golden_sessions"]
    roots += [each / kind for each in (RANKS, home / "golden_session_archive") for kind in ("store", "archive")]
    for root in roots:
        for path in filter(Path.is_file, root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if name != "exported.h5":
                matching = {line for line, pattern in known.items() if pattern.fullmatch(name)}
                assert matching, f"{root.name}: {name}"
                seen |= matching
    folders = {line for line in known if any(other != line and other.startswith(line) for other in known)}
    assert [line for line in known.keys() - seen - folders if not line.startswith(PASSING)] == []
