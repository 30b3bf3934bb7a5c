"""Strategies for the property tests of keep policies."""

from hypothesis import strategies as st

from simckpt.policies import CheckpointFacts, KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged, MaxBytes

_SINGLE = st.one_of(
    st.just(KeepAll()),
    st.builds(KeepLast, st.integers(1, 8)),
    st.builds(KeepBest, st.integers(1, 5), st.just("return"), st.sampled_from(["max", "min"])),
    st.builds(lambda steps: KeepEvery(steps=steps), st.integers(1, 60)),
    st.builds(lambda minutes: KeepEvery(minutes=minutes), st.integers(1, 60)),
    st.builds(lambda tags: KeepTagged(*tags), st.lists(st.sampled_from("ab"), max_size=2, unique=True)),
    st.builds(MaxBytes, st.integers(1, 300)),
)
# policies as users join them
KEEP_POLICIES = st.recursive(_SINGLE, lambda inner: st.builds(lambda a, b: a | b, inner, inner), max_leaves=4)

_FACTS = st.tuples(
    st.integers(0, 200),
    st.dictionaries(st.just("return"), st.sampled_from([1.0, 2.0, 3.0, -1.0]) | st.floats(allow_nan=True)),
    st.floats(0, 20_000),
    st.integers(0, 100),
    st.frozensets(st.sampled_from("abc")),
)
# ids as unlike places as they are in a store, and steps and times in any order
CHECKPOINT_LISTS = st.lists(_FACTS, max_size=12).map(
    lambda rows: [CheckpointFacts(f"{place * 7919 % 97:02d}", *row) for place, row in enumerate(rows)]
)
