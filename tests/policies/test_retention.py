from hypothesis import given
from hypothesis import strategies as st
from policy_helpers import CHECKPOINT_LISTS, KEEP_POLICIES

from simckpt.policies import CheckpointFacts, KeepAll, KeepBest, KeepLast, KeepPolicy, MaxBytes, Verdict, retain

CHECKPOINTS = [CheckpointFacts(name, step, {"return": 10.0 - step}, size=100) for step, name in enumerate("abcd")]


def test_each_checkpoint_gets_a_verdict_in_commit_order_with_every_reason() -> None:
    verdicts = retain(CHECKPOINTS, KeepLast(2) | KeepBest(1, "return"), {"b": "origin of run 'low-lr'", "d": "pinned"})
    assert verdicts == [
        Verdict("a", True, "number 1 of the best 1 by return, 10"),
        Verdict("b", True, "origin of run 'low-lr'"),
        Verdict("c", True, "among the last 2"),
        Verdict("d", True, "pinned; the newest; among the last 2"),
    ]


def test_what_is_dropped_names_the_policy_as_written() -> None:
    verdicts = retain(CHECKPOINTS, KeepLast(1) | MaxBytes(100), {})
    assert verdicts[0] == Verdict("a", False, "not kept by KeepLast(1) | MaxBytes(100)")


def test_the_newest_stays_even_where_no_policy_wants_it() -> None:
    verdicts = retain(CHECKPOINTS, MaxBytes(1), {})
    assert [verdict.keep for verdict in verdicts] == [False, False, False, True]
    assert verdicts[-1].reason == "the newest"


def test_a_reason_is_given_once() -> None:
    assert retain(CHECKPOINTS[:1], KeepAll(), {"a": "the newest"}) == [Verdict("a", True, "the newest; all are kept")]


def test_nothing_comes_from_nothing() -> None:
    assert retain([], KeepLast(3), {"gone": "pinned"}) == []


PROTECTIONS = st.dictionaries(
    st.integers(0, 96).map(lambda number: f"{number:02d}"),
    st.sampled_from(["pinned", "origin of run 'b'", "restored from", "target of a rollback"]),
)


@given(CHECKPOINT_LISTS, KEEP_POLICIES, PROTECTIONS, st.data())
def test_no_policy_drops_what_is_protected(checkpoints, policy: KeepPolicy, protected: dict[str, str], data) -> None:
    if checkpoints:
        some = data.draw(st.lists(st.sampled_from([each.id for each in checkpoints])))
        protected = {**protected, **dict.fromkeys(some, "pinned")}
    verdicts = retain(checkpoints, policy, protected)
    assert [verdict.id for verdict in verdicts] == [checkpoint.id for checkpoint in checkpoints]
    assert all(verdict.reason for verdict in verdicts)
    for verdict in verdicts:
        if verdict.id in protected:
            assert verdict.keep
            assert protected[verdict.id] in verdict.reason
    assert all(verdict.keep for verdict in verdicts[-1:])


@given(CHECKPOINT_LISTS, KEEP_POLICIES, PROTECTIONS)
def test_what_stays_is_what_a_policy_keeps_or_a_reason_protects(checkpoints, policy, protected) -> None:
    expected = set(policy.keep(checkpoints)) | set(protected) | {checkpoint.id for checkpoint in checkpoints[-1:]}
    kept = {verdict.id for verdict in retain(checkpoints, policy, protected) if verdict.keep}
    assert kept == expected & {checkpoint.id for checkpoint in checkpoints}


@given(CHECKPOINT_LISTS, KEEP_POLICIES, PROTECTIONS)
def test_applied_again_to_what_it_kept_it_keeps_all_of_it(checkpoints, policy, protected) -> None:
    kept = {verdict.id for verdict in retain(checkpoints, policy, protected) if verdict.keep}
    remaining = [checkpoint for checkpoint in checkpoints if checkpoint.id in kept]
    assert all(verdict.keep for verdict in retain(remaining, policy, protected))


@given(CHECKPOINT_LISTS, KEEP_POLICIES, KEEP_POLICIES, PROTECTIONS)
def test_a_further_policy_never_drops_anything(checkpoints, policy, further, protected) -> None:
    before = {verdict.id for verdict in retain(checkpoints, policy, protected) if verdict.keep}
    after = {verdict.id for verdict in retain(checkpoints, policy | further, protected) if verdict.keep}
    assert before <= after
