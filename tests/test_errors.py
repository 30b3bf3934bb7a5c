"""Errors cross the pipes of workers and executors."""

import pickle

import pytest

from simckpt import errors


def subclasses(cls: type) -> list[type]:
    return [cls, *(inner for child in cls.__subclasses__() for inner in subclasses(child))]


SPECIAL = {
    errors.UnsupportedStateError: {"path": "a/b", "type_name": "x.Y"},
    errors.DamagedError: {"path": "/f", "leaves": ["a"]},
    errors.ArchiveDamagedError: {"path": "s3://bucket/f"},
    errors.RunLockedError: {"host": "h", "pid": 3},
    errors.SegmentMissingError: {"ids": ["5e6"]},
    errors.QueryError: {"query": "step > > 1", "position": 7},
    errors.StateMismatchError: {"problems": ["p"]},
    errors.StorageFullError: {"needed": 5, "free": 2},
    errors.OverrideNotAppliedError: {"key": "learning_rate", "wanted": 1e-4, "found": 3e-4},
    errors.RolledBack: {"run": "a", "step": 9, "target_step": 4, "level": 1, "reason": "it fell"},
    errors.RollbackLimitError: {"run": "a", "step": 9, "rollbacks": 3, "reason": "it fell"},
    **{each: {"link": "motor"} for each in subclasses(errors.LinkError)},
}


@pytest.mark.parametrize(
    "cls",
    [cls for cls in subclasses(errors.SimckptError) if cls.__module__ == "simckpt.errors"],
    ids=lambda cls: cls.__name__,
)
def test_an_error_survives_a_pipe_with_its_fields(cls: type) -> None:
    error = cls("what failed", **SPECIAL.get(cls, {}))
    if isinstance(error, OSError):
        error.errno, error.filename = 28, "/f"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what failed"
    assert vars(copy) == vars(error)
    if isinstance(error, OSError):
        assert (copy.errno, copy.filename) == (28, "/f")


@pytest.mark.parametrize("cls", subclasses(errors.SimckptError), ids=lambda cls: cls.__name__)
def test_every_error_is_drawn_in_the_tree(cls: type) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
