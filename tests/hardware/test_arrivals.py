"""What is lost, late and repeated, counted from sequence numbers."""

from hypothesis import given
from hypothesis import strategies as st

from simckpt.hardware.arrivals import Arrivals, Place, Statistics

WRAP = 2**64


def places(*sequences: int, stream: int = 1) -> tuple[list[Place], Statistics]:
    counted = Statistics()
    arrivals = Arrivals(counted)
    return [arrivals.place(stream, sequence % WRAP) for sequence in sequences], counted


@given(
    start=st.sampled_from([0, 5, WRAP - 20, WRAP - 1, WRAP // 2 - 10]),
    delays=st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=60),
    repeated=st.sets(st.integers(0, 60)),
)
def test_counts_are_those_of_what_was_put_in(start: int, delays: list[int | None], repeated: set[int]) -> None:
    # None: never arrives; else overtaken by so many places; some arrive once more
    sent = [(index + delay, index) for index, delay in enumerate(delays) if delay is not None]
    sent += [(when + 1, index) for when, index in sent if index in repeated]
    order = [index for _, index in sorted(sent)]
    found, counted = places(*(start + index for index in order))

    first = order[0] if order else 0
    expected, seen = [], set[int]()
    for index in order:
        late = bool(seen) and index < max(seen)
        expected.append(Place.REPEATED if index in seen else Place.LATE if late else Place.NEXT)
        seen.add(index)
    assert found == expected
    assert counted.received == len(seen)
    assert counted.late == expected.count(Place.LATE)
    assert counted.repeated == expected.count(Place.REPEATED)
    # what came before the first is not known to have been sent
    assert counted.lost == len(set(range(first, max(seen, default=first))) - seen)
    assert counted.restarts == 0


def test_a_new_stream_is_no_loss_and_nothing_of_it_is_late() -> None:
    counted = Statistics()
    arrivals = Arrivals(counted)
    for stream, sequence in ((1, 500), (1, 501), (2, 0), (2, 1)):
        assert arrivals.place(stream, sequence) is Place.NEXT
    assert counted == Statistics(received=4, restarts=1)


def test_a_device_that_counts_from_0_again_without_a_new_stream_is_taken_to_have_started_anew() -> None:
    found, counted = places(1000, 1001, 0, 1, 2)
    assert set(found) == {Place.NEXT}
    assert counted == Statistics(received=5, restarts=1)


def test_a_long_gap_is_counted_whole() -> None:
    _, counted = places(0, 10**12)
    assert counted.lost == 10**12 - 1
