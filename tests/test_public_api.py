"""The public names, pinned: a change here is a change for users and belongs in the changelog."""

import simckpt

PUBLIC = [
    "AtSteps",
    "Checkpoint",
    "Checkpointer",
    "EXIT_REQUEUE",
    "EveryMinutes",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepTagged",
    "LoopState",
    "MaxBytes",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "RNGStreams",
    "ReplayBuffer",
    "ReplayWarning",
    "Run",
    "SaveFailedWarning",
    "SimckptError",
    "SimckptWarning",
    "SnapshotEnv",
    "SnapshotVectorEnv",
    "Store",
    "UpkeepWarning",
    "VersionWarning",
    "async_worker",
    "make_vec",
    "register_adapter",
    "register_replay_adapter",
    "register_stateless",
]


def test_the_public_names_are_these() -> None:
    assert sorted(simckpt.__all__) == PUBLIC


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        value = getattr(simckpt, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(simckpt, "Restore")
    assert dir(simckpt) == PUBLIC
