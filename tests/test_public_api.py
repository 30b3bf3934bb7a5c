"""The public names, pinned: a change here is a change for users and belongs in the changelog."""

import simckpt

PUBLIC = [
    "Archive",
    "AtSteps",
    "BranchWarning",
    "Call",
    "Checkpoint",
    "Checkpointer",
    "CoordinationError",
    "DamageWarning",
    "EXIT_REQUEUE",
    "EveryMinutes",
    "EverySteps",
    "Hyperparameters",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepRows",
    "KeepTagged",
    "LocalEngine",
    "LoopState",
    "MaxBytes",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "PopulationBasedTraining",
    "RNGStreams",
    "Range",
    "RayEngine",
    "ReplayBuffer",
    "ReplayWarning",
    "Reseed",
    "RollbackLimitError",
    "RollbackPolicy",
    "RolledBack",
    "Run",
    "SaveFailedWarning",
    "Scale",
    "SetTo",
    "SimckptError",
    "SimckptWarning",
    "SlurmEngine",
    "SnapshotEnv",
    "SnapshotVectorEnv",
    "Store",
    "UpkeepWarning",
    "VersionWarning",
    "async_worker",
    "compare",
    "evaluations_of",
    "fan_out",
    "make_vec",
    "register_adapter",
    "register_replay_adapter",
    "register_stateless",
    "supervise",
]

HARDWARE = [
    "Event",
    "Link",
    "OnError",
    "OutOfRange",
    "Pace",
    "Reading",
    "Recorder",
    "Replay",
    "ReplayDifference",
    "ReplayReport",
    "Serial",
    "Series",
    "Session",
    "Simulated",
    "Statistics",
    "TCP",
    "Transport",
    "UDP",
    "Watchdog",
    "WhatIf",
    "contact_force",
    "export_mcap",
    "export_minari",
    "export_video",
    "model_readings",
    "series",
]


def test_the_public_names_are_these() -> None:
    assert sorted(simckpt.__all__) == PUBLIC


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        value = getattr(simckpt, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_the_public_names_of_hardware_are_these_and_documented() -> None:
    assert sorted(simckpt.hardware.__all__) == HARDWARE
    for name in HARDWARE:
        value = getattr(simckpt.hardware, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"
    assert not hasattr(simckpt.hardware, "Wire")


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(simckpt, "Restore")
    assert dir(simckpt) == PUBLIC


def test_packages_of_public_names_need_no_import_of_their_own() -> None:
    assert callable(simckpt.plots.returns)
    assert callable(simckpt.testing.assert_exact_resume)
