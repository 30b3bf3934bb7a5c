import math

import numpy as np
import pytest

from simckpt.errors import ConfigurationError
from simckpt.policies import (
    Call,
    Change,
    KeepRows,
    Reseed,
    Scale,
    SetTo,
    calls,
    kept_components,
    keys,
    new_values,
    reseeds,
)

RUN = {"learning_rate": 3e-4, "clip": 0.2, "epochs": 10, "anneal": True, "optimizer": "adam", "offset": -8}


def soften(components, level) -> None:
    pass


ALL = Reseed() & Scale(learning_rate=0.5) & SetTo(clip=0.1) & KeepRows("replay", "her") & Call(soften)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Reseed(), "Reseed()"),
        (Scale(learning_rate=0.5, clip=0.8), "Scale(learning_rate=0.5, clip=0.8)"),
        (Scale(**{"actor/lr": 0.5}), "Scale(**{'actor/lr': 0.5})"),
        (SetTo(optimizer="sgd", hidden=[64, 64]), "SetTo(optimizer='sgd', hidden=[64, 64])"),
        (KeepRows("replay"), "KeepRows('replay')"),
        (Call(soften), "Call(soften)"),
        (Reseed() & (Scale(clip=0.5) & KeepRows("replay")), "Reseed() & Scale(clip=0.5) & KeepRows('replay')"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_change_reads_as_written(change: Change, text: str) -> None:
    assert repr(change) == text


def test_joined_changes_are_flat_values() -> None:
    a, b, c = Reseed(), Scale(clip=0.5), SetTo(epochs=3)
    assert (a & b) & c == a & (b & c)
    assert hash((a & b) & c) == hash(a & (b & c))
    assert ((a & b) & c).parts() == (a, b, c)
    assert a.parts() == (a,)
    assert a & b != b & a
    assert len({SetTo(hidden=[1, 2]), SetTo(hidden=[1, 2])}) == 1


def test_what_a_change_does_is_found_wherever_it_is_joined() -> None:
    assert keys([Reseed(), ALL]) == {"learning_rate", "clip"}
    assert reseeds(ALL)
    assert not reseeds(Scale(clip=0.5) & KeepRows("replay"))
    assert kept_components(ALL) == {"replay", "her"}
    assert kept_components(Reseed()) == frozenset()
    assert calls(ALL) == (soften,)


def test_new_values_come_from_those_in_force() -> None:
    assert new_values(ALL, RUN) == {"learning_rate": 1.5e-4, "clip": 0.1}
    assert new_values(Reseed() & KeepRows("replay"), RUN) == {}
    assert new_values(SetTo(optimizer="sgd", epochs=3), RUN) == {"optimizer": "sgd", "epochs": 3}


def test_a_scaled_whole_number_stays_whole_and_is_never_0() -> None:
    assert new_values(Scale(epochs=0.75), RUN) == {"epochs": 7}
    assert new_values(Scale(epochs=0.99), RUN) == {"epochs": 9}
    assert new_values(Scale(epochs=1.01), RUN) == {"epochs": 11}
    assert new_values(Scale(epochs=0.001), RUN) == {"epochs": 1}
    assert new_values(Scale(epochs=0.5), {"epochs": 1}) == {"epochs": 1}
    assert new_values(Scale(offset=0.5), RUN) == {"offset": -4}
    assert type(new_values(Scale(epochs=2), RUN)["epochs"]) is int
    assert new_values(Scale(epochs=2), {"epochs": 0}) == {"epochs": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Scale(learning_rat=0.5), "'learning_rat', which the run does not have"),
        (SetTo(gamma=0.9), "'gamma', which the run does not have"),
        (Scale(optimizer=0.5), "no number but 'adam'"),
        (Scale(anneal=0.5), "no number but True"),
    ],
    ids=repr,
)
def test_a_change_that_does_not_fit_the_run_is_refused(change: Change, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        new_values(change, RUN)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan"), True, "0.5", None], ids=repr)
def test_a_factor_is_finite_and_above_0(factor: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Scale(learning_rate=factor)
    assert caught.value.keys == ("learning_rate",)


@pytest.mark.parametrize(
    "make", [Scale, SetTo, KeepRows, lambda: KeepRows(""), lambda: KeepRows(3), lambda: Call("soften")]
)
def test_a_change_of_nothing_is_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_one_key_changed_twice_at_once_is_refused() -> None:
    for make in (
        lambda: Scale(clip=0.5) & SetTo(clip=0.1),
        lambda: Scale(clip=0.5) & (Reseed() & Scale(clip=0.5)),
    ):
        with pytest.raises(ConfigurationError, match="'clip' twice"):
            make()


def test_only_changes_join_changes() -> None:
    with pytest.raises(TypeError):
        Reseed() & "reseed"


@pytest.mark.parametrize(
    "value", ["a", math.nan, np.float64(0.5), True, None], ids=["text", "nan", "numpy", "bool", "none"]
)
def test_a_value_of_another_type_is_refused_when_the_run_starts(value) -> None:
    with pytest.raises(ConfigurationError, match="learning_rate"):
        new_values(SetTo(learning_rate=value), {"learning_rate": 3e-4})


def test_a_whole_number_does_for_a_float_and_a_list_for_another_one() -> None:
    assert new_values(SetTo(rate=1, layers=[8]), {"rate": 0.5, "layers": [4, 4]}) == {"rate": 1, "layers": [8]}
