"""Messages as bytes, and found again in streams that are damaged."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simckpt.hardware.wire import COMMAND, READING, Codec, StreamReader

CODEC = Codec(READING, 2)


def message(sequence: int, *values: float) -> bytes:
    return Codec(READING, len(values)).encode(7, sequence, -5, 1_700_000_000_000_000_000, np.array(values))


def test_a_message_is_what_the_description_says() -> None:
    content = b"sLnk" + bytes([1, 2]) + (2).to_bytes(2, "little")
    for number, signed in ((2**64 - 1, False), (3, False), (-5, True), (1_700_000_000_000_000_000, True)):
        content += number.to_bytes(8, "little", signed=signed)
    content += struct.pack("<2d", 1.5, -0.0)
    expected = content + zlib.crc32(content).to_bytes(4, "little")
    values = np.array([1.5, -0.0])
    assert CODEC.encode(2**64 - 1, 3, -5, 1_700_000_000_000_000_000, values) == expected
    assert len(expected) == CODEC.size
    found = CODEC.decode(expected)
    assert found is not None
    assert found[:4] == (2**64 - 1, 3, -5, 1_700_000_000_000_000_000)
    assert found.values.tobytes() == values.tobytes()


def test_every_bit_of_a_value_arrives() -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 5e-324, np.finfo(np.float64).max])
    values = np.append(values, np.array([0x7FF0000000000001], np.uint64).view(np.float64))
    codec = Codec(COMMAND, len(values))
    found = codec.decode(codec.encode(0, 0, 0, 0, values))
    assert found is not None
    assert found.values.tobytes() == values.tobytes()
    assert not found.values.flags.writeable


def test_a_message_with_any_bit_changed_is_none() -> None:
    data = message(9, 1.0, 2.0)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert CODEC.decode(bytes(changed)) is None


def test_what_is_no_message_of_this_kind_is_none() -> None:
    data = message(9, 1.0, 2.0)
    cut = [data[:length] for length in range(len(data))]
    for other in [*cut, data + b"\0", message(9, 1.0), message(9, 1.0, 2.0, 3.0)]:
        assert CODEC.decode(other) is None
    assert Codec(COMMAND, 2).decode(data) is None


# garbage in which beginnings of messages are frequent
NOISE = st.lists(st.sampled_from([b"s", b"sL", b"sLn", b"sLnk", b"\x01\x02", b"k", message(1, 0.0)]), max_size=5)


@given(data=st.data())
def test_whole_messages_are_found_among_garbage_however_they_are_cut(data: st.DataObject) -> None:
    pieces: list[bytes] = []
    garbage = 0
    expected = []
    for sequence in range(data.draw(st.integers(0, 6))):
        noise = b"".join(data.draw(NOISE))
        pieces += [noise, message(sequence, float(sequence), 1.0)]
        garbage += len(noise)
        expected.append(sequence)
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = StreamReader(CODEC)
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:stop])
        assert len(reader._held) < CODEC.size
    assert [item.sequence for item in found] == expected
    assert reader.skipped == garbage


@pytest.mark.parametrize("at", range(0, CODEC.size, 7))
def test_damage_in_a_stream_costs_the_messages_it_hits(at: int) -> None:
    stream = b"".join(message(sequence, 1.0, 2.0) for sequence in range(4))
    changed = bytearray(stream)
    changed[CODEC.size + at] ^= 255
    found = StreamReader(CODEC).feed(bytes(changed))
    assert [item.sequence for item in found] == [0, 2, 3]
    # a byte too few moves all that follows
    found = StreamReader(CODEC).feed(stream[: CODEC.size + at] + stream[CODEC.size + at + 1 :])
    assert [item.sequence for item in found] == [0, 2, 3]
