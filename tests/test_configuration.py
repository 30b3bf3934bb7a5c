import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from simckpt import configuration
from simckpt.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Args:
    seed: int = 1
    learning_rate: float = 3e-4
    layers: tuple[int, ...] = (64, 64)
    device: str = "cpu"


def merge(saved: Args, given: Args, free: tuple[str, ...] = ()) -> Args:
    merged = configuration.in_force(
        configuration.values_of(saved),
        configuration.values_of(given),
        defaults=configuration.defaults_of(given),
        free=free,
        run="r",
    )
    return configuration.with_values(given, merged)


def test_the_runs_own_values_win_over_defaults() -> None:
    assert merge(Args(seed=7, layers=(8,)), Args()) == Args(seed=7, layers=(8,))


def test_an_explicit_equal_value_is_fine() -> None:
    assert merge(Args(seed=7), Args(seed=7)) == Args(seed=7)


def test_every_explicit_conflict_is_named_and_the_way_out_too() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)seed: the run has 7, given 8.*learning_rate.*branch") as caught:
        merge(Args(seed=7), Args(seed=8, learning_rate=1.0))
    assert caught.value.keys == ("seed", "learning_rate")


def test_a_free_key_takes_the_given_value() -> None:
    assert merge(Args(device="cpu"), Args(device="cuda"), free=("device",)).device == "cuda"
    assert merge(Args(device="cuda"), Args(), free=("device",)).device == "cpu"


def test_a_key_the_run_has_never_seen_takes_the_given_value() -> None:
    merged = configuration.in_force({"a": 1}, {"a": 1, "b": 2}, defaults={}, free=(), run="r")
    assert merged == {"a": 1, "b": 2}


def test_without_known_defaults_any_difference_is_a_conflict() -> None:
    with pytest.raises(ConfigurationError):
        configuration.in_force({"a": 1}, {"a": 2}, defaults={}, free=(), run="r")


def test_the_type_of_the_arguments_is_kept() -> None:
    namespace = configuration.with_values(argparse.Namespace(a=1, b=(1, 2)), {"a": 5, "b": [3]})
    assert namespace == argparse.Namespace(a=5, b=(3,))
    given = {"a": 1}
    assert configuration.with_values(given, {"a": 5}) == {"a": 5}
    assert given == {"a": 1}


def test_integers_equal_floats_but_not_booleans() -> None:
    assert configuration.in_force({"a": 1.0}, {"a": 1}, defaults={}, free=(), run="r") == {"a": 1}
    with pytest.raises(ConfigurationError):
        configuration.in_force({"a": True}, {"a": 1}, defaults={}, free=(), run="r")


def test_nan_is_no_conflict_with_itself() -> None:
    assert math.isnan(configuration.in_force({"a": math.nan}, {"a": math.nan}, defaults={}, free=(), run="r")["a"])


@pytest.mark.parametrize(
    "value", [Path("x"), np.zeros(2), {1: 2}, object(), {"a": {3: 4}}], ids=lambda value: type(value).__name__
)
def test_a_value_that_json_cannot_hold_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match="'weird'"):
        configuration.values_of({"weird": value})


def test_numpy_scalars_are_plain_numbers() -> None:
    given = {
        "rate": np.float64(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "zero": np.array(2),
        "text": np.str_("x"),
    }
    given |= {"layers": (np.int32(8), 16), "nested": {"rate": np.float32(0.25)}}
    plain = {"rate": 0.5, "count": 3, "flag": True, "zero": 2, "text": "x", "layers": [8, 16], "nested": {"rate": 0.25}}
    found = configuration.values_of(given)
    assert found == plain
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in plain.items()}
    args = configuration.with_values(
        Args(seed=np.int64(7), learning_rate=np.float64(0.5)), {"seed": 7, "learning_rate": 0.5}
    )
    assert (type(args.seed), type(args.learning_rate)) == (int, float)


@pytest.mark.parametrize("value", [np.longdouble(0.1), np.datetime64(1, "s"), np.complex64(1), np.zeros(1)], ids=repr)
def test_a_numpy_value_that_is_no_plain_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match="'weird'"):
        configuration.values_of({"weird": value})


def test_something_else_than_arguments_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="dataclass instance"):
        configuration.values_of(Args)
