import functools
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


@pytest.mark.parametrize(
    "factor",
    [
        0,
        -1,
        math.inf,
        math.nan,
        -math.inf,
        True,
        "0.5",
        None,
        1j,
        [0.5],
        np.float32("nan"),
        np.bool_(True),
        np.zeros(2),
    ],
    ids=repr,
)
def test_a_factor_is_finite_and_above_0(factor: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Scale(learning_rate=factor)
    assert caught.value.keys == ("learning_rate",)


@pytest.mark.parametrize(
    "make",
    [
        *(Scale, SetTo, KeepRows, lambda: KeepRows(""), lambda: KeepRows(3), lambda: KeepRows(["replay"])),
        *(
            lambda: Call("soften"),
            lambda: Call(None),
            lambda: Call(lambda: None),
            lambda: Call(lambda components: None),
        ),
        lambda: Call(lambda components, level, more: None),
    ],
)
def test_a_change_of_nothing_is_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_whatever_takes_two_arguments_is_called() -> None:
    for function in (soften, lambda *given: None, functools.partial(soften), print, lambda a, b, c=1: None, dict.get):
        assert calls(Call(function)) == (function,)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, np.float32("nan"), [1.0, math.nan], (1.0, [math.nan]), {"a": math.nan}, [np.float64("nan")]),
        *(object(), 1j, {1.0}, {1: 2.0}, np.zeros(2), [np.zeros(2)], b"1", np.complex64(1), soften, range(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_no_run_can_have_is_refused_where_it_is_written(value: object) -> None:
    with pytest.raises(ConfigurationError, match="'rate'") as caught:
        SetTo(rate=value)
    assert caught.value.keys == ("rate",)


def test_numpys_scalars_are_plain_numbers() -> None:
    change = Scale(clip=np.float32(0.5), learning_rate=np.int64(2)) & SetTo(
        epochs=np.int64(3), anneal=np.bool_(False), optimizer=np.str_("sgd"), offset=np.array(-2)
    )
    plain = Scale(clip=0.5, learning_rate=2) & SetTo(epochs=3, anneal=False, optimizer="sgd", offset=-2)
    assert change == plain
    assert repr(change) == repr(plain)
    kinds = {"clip": float, "learning_rate": float, "epochs": int, "anneal": bool, "optimizer": str, "offset": int}
    assert {key: type(value) for key, value in new_values(change, RUN).items()} == kinds
    assert repr(SetTo(hidden=[np.int64(8), (np.float32(0.5),)])) == "SetTo(hidden=[8, [0.5]])"


@pytest.mark.parametrize(("value", "factor"), [(1e300, 1e10), (100, 1e308), (10**400, 0.5), (math.inf, 0.5)], ids=repr)
def test_nothing_is_scaled_out_of_bounds(value: float, factor: float) -> None:
    with pytest.raises(ConfigurationError, match="infinite or no number"):
        new_values(Scale(rate=factor), {"rate": value})


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
    ("value", "there"),
    [
        *(("a", 3e-4), (True, 3e-4), (None, 3e-4), ([0.1], 3e-4), (math.inf, 3e-4), (10**400, 3e-4)),
        *((0.5, 3), (True, 3), (1, True), (1, "adam"), (["a"], [4, 4]), ([0.5], [4, 4]), ("a", [4, 4])),
        *(({"a": 1}, {"b": 1}), ({"a": "1"}, {"a": 1}), ([math.inf], [0.5, 0.5])),
    ],
    ids=repr,
)
def test_a_value_of_another_type_is_refused_when_the_run_starts(value, there) -> None:
    with pytest.raises(ConfigurationError, match="'rate'") as caught:
        new_values(SetTo(rate=value), {"rate": there})
    assert caught.value.keys == ("rate",)


def test_a_whole_number_does_for_a_float_and_a_list_for_another_one() -> None:
    found = new_values(SetTo(rate=1, layers=(8,), any=[1, "a"]), {"rate": 0.5, "layers": [4, 4], "any": None})
    assert found == {"rate": 1.0, "layers": [8], "any": [1, "a"]}
    assert type(found["rate"]) is float
