import json
import math
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from simckpt.errors import DamagedError, FormatError, UnsupportedFormatError
from simckpt.storage import sealed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def reseal(text: str) -> bytes:
    """A record with a right digest over any content, made without the code under test."""
    head = text.encode()
    return head + f',\n "digest": "xxh3-128:{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()


def head(**fields: object) -> str:
    content = {"format": "simckpt test", "version": "0.3", **fields}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_values_come_back_with_their_types(values):
    data = sealed.seal("test", {"values": {key: sealed.to_json(value) for key, value in values.items()}})
    assert same(sealed.unseal(data, "test", path="p").values("values"), values)


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, {1, 2}, 1j, object(), [b""]])
def test_values_without_a_type_in_records_are_refused(value):
    with pytest.raises(TypeError):
        sealed.to_json(value)


def test_every_flipped_bit_is_noticed():
    data = sealed.seal("test", {"step": 5, "metrics": {"a": 1.5}}, rows=("leaves", [{"path": "a/b"}, {"path": "a/c"}]))
    for position in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises((DamagedError, FormatError)):
            sealed.unseal(bytes(damaged), "test", path="p")


def test_every_truncation_is_noticed():
    data = sealed.seal("test", {"step": 5})
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            sealed.unseal(data[:length], "test", path="p")
    with pytest.raises(DamagedError):
        sealed.unseal(data + b" ", "test", path="p")


def test_the_seal_is_xxh3_over_what_stands_before_it():
    data = sealed.seal("test", {"step": 5})
    assert data == reseal(head(step=5))


@pytest.mark.parametrize("version", ["0.4", "1.0", "7.12"])
def test_a_newer_version_is_refused_by_name(version):
    with pytest.raises(UnsupportedFormatError, match=version):
        sealed.unseal(reseal(head().replace("0.3", version)), "test", path="p")


def test_an_unknown_feature_is_refused_by_name():
    with pytest.raises(UnsupportedFormatError, match="time-travel"):
        sealed.unseal(reseal(head(requires=["time-travel"])), "test", path="p")


def test_an_unknown_digest_of_a_later_version_is_refused_by_name_and_otherwise_damage():
    for version, error in (("0.9", UnsupportedFormatError), ("0.3", DamagedError)):
        data = reseal(head().replace('"0.3"', f'"{version}"')).replace(b"xxh3-128:", b"blake9:")
        with pytest.raises(error) as caught:
            sealed.unseal(data, "test", path="p")
        assert type(caught.value) is error
        assert ("blake9" in str(caught.value)) == (version == "0.9")


@pytest.mark.parametrize(
    "text",
    [
        head().replace('"0.3"', '"zero"'),
        head().replace('"0.3"', "0.1"),
        head().replace("simckpt test", "simckpt other"),
        head() + ',\n "version": "0.3"',
        head() + ',\n "x": NaN',
        head() + ',\n "x": ' + "[" * 100_000 + "]" * 100_000,
        head() + ',\n "x": ' + "9" * 10_000,
        head() + ',\n "x": 1,,',
    ],
    ids=["version", "version type", "other record", "key twice", "NaN", "deep", "long integer", "no JSON"],
)
def test_content_that_breaks_a_rule_is_refused(text):
    with pytest.raises(FormatError):
        sealed.unseal(reseal(text), "test", path="p")


def test_unknown_keys_are_ignored():
    assert sealed.unseal(reseal(head(step=5, later=[1])), "test", path="p").integer("step") == 5


@pytest.mark.parametrize(
    ("read", "value"),
    [
        ("integer", -1),
        ("integer", True),
        ("integer", 1.0),
        ("integer", 2**63),
        ("text", 5),
        ("text", "x" * 5000),
        ("id", "g" * 32),
        ("digest", "xxh3"),
        ("texts", [1]),
        ("integers", [-1]),
        ("integers", [1] * 100),
        ("objects", [1]),
        ("object", []),
        ("string_map", {"a": 1}),
        ("floats", {"a": 1}),
        ("values", {"a": {"float": "1.0"}}),
        ("values", {"a": {"float": []}}),
        ("values", {"a": {}}),
        ("values", {"a": {"tuple": 1}}),
        ("values", {"a": DEEP}),
        ("time", {"utc": "x", "unix": "1"}),
        ("time", {"unix": 1.0}),
    ],
)
def test_fields_of_a_wrong_type_or_size_are_refused(read, value):
    fields = sealed.Fields({"key": value}, "p")
    with pytest.raises(FormatError):
        getattr(fields, read)("key")
    with pytest.raises(FormatError):
        getattr(sealed.Fields({}, "p"), read)("key")


def nested(kind: str, levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"list": [value], "tuple": {"tuple": [value]}, "dict": {"dict": {"a": value}}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_values_are_read_as_deep_as_they_are_written_and_no_deeper(kind):
    deepest = sealed.from_json(nested(kind, sealed.LEVELS))
    assert sealed.to_json(deepest) == nested(kind, sealed.LEVELS)
    for levels in (sealed.LEVELS + 1, 300):
        with pytest.raises(ValueError, match="100 deep"):
            sealed.from_json(nested(kind, levels))


def test_a_special_float_counts_as_no_container():
    value: object = {"float": "inf"}
    for _ in range(sealed.LEVELS):
        value = [value]
    assert sealed.to_json(sealed.from_json(value)) == value


@pytest.mark.parametrize("text", ["1e999", "-1e999", "1e300", "253402300800.0", "-62135596801.0", "5", "null", '"x"'])
def test_a_moment_that_no_calendar_has_is_refused(text):
    data = reseal(head(x=0) + f',\n "created": {{"utc": "", "unix": {text}}}')
    with pytest.raises(FormatError, match="a moment"):
        sealed.unseal(data, "test", path="p").time("created")


@pytest.mark.parametrize("seconds", [-62135596800.0, 0.0, 1.8e9, 253402300799.0])
def test_every_moment_of_the_calendar_can_be_shown(seconds):
    data = sealed.seal("test", {"created": sealed.time_to_json(seconds)})
    assert sealed.unseal(data, "test", path="p").time("created") == seconds
