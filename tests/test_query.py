"""The language of `simckpt find --where`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simckpt.errors import QueryError
from simckpt.query import FIELDS, check_names, conditions, dotted, full_name, parse

FACTS = {
    "step": 2000,
    "run": "ant_v5",
    "id": "0123456789abcdef" * 2,
    "git.commit": "4f2c9a1" + "0" * 33,
    "git.dirty": False,
    "pinned": True,
    "tag": frozenset({"good", "paper-3"}),
    "experiment": None,
    "created": 1_800_000_000.0,
    "eval/return": 3100.5,
    "loss": math.nan,
    "learning_rate": 3e-4,
    "anneal": True,
    "env_id": "Ant-v5",
    "odd name": 1,
}


def matches(text: str) -> bool:
    return parse(text).matches(FACTS.get)


@pytest.mark.parametrize(
    "text",
    [
        "step = 2000",
        "step == 2_000",
        "step = 2e3",
        "step >= 2000 and step <= 2000",
        "step > 1999 and step < 2001",
        "step != 1",
        "step <> 1",
        "eval/return > 3000 and git.commit = '4f2c9a1'",
        "eval/return>3000",
        "run = 'ant_v5'",
        'run = "ant_v5"',
        "run like 'ant%'",
        "run like '%v_'",
        "id = '012345'",
        "id != '999'",
        "pinned",
        "pinned = true",
        "not git.dirty",
        "git.dirty = FALSE",
        "experiment = null",
        "missing = null",
        "run != null",
        "tag = 'good'",
        "tag = 'paper-3'",
        "tag != 'bad'",
        "tag like 'paper-%'",
        "tag != null",
        "not tag = 'bad'",
        "loss = nan",
        "not loss > 0",
        "eval/return < inf",
        "eval/return > -inf",
        "created > '2027-01-15'",
        "created < '2027-01-16 00:00'",
        "created = '2027-01-15T09:00+01:00'",
        "created >= 1800000000",
        "learning_rate < 0.001",
        "learning_rate = .0003",
        "anneal",
        "env_id = 'Ant-v5'",
        "`odd name` = 1",
        "step = 1 or step = 2000",
        "step = 2000 or step = 1 and run = 'no'",
        "not (step = 1 or run = 'no') and pinned",
        "not not pinned",
        "NOT git.dirty AND pinned",
        "((step = 2000))",
    ],
)
def test_conditions_that_are_met(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize(
    "text",
    [
        "step = 1",
        "step > 2000",
        "missing = 1",
        "missing != 1",
        "missing > 1",
        "missing",
        "experiment = 'a'",
        "experiment != 'a'",
        "run = 'Ant_v5'",
        "run like 'v5'",
        "run like 'antXv5'",
        "id = '123'",
        "env_id = 'Ant'",
        "git.commit != '4f2c9a1'",
        "tag = 'goo'",
        "tag != 'good'",
        "tag = null",
        "loss > 0",
        "loss < 0",
        "loss = 0",
        "learning_rate = nan",
        "env_id > 3",
        "env_id = 5",
        "anneal = 1",
        "step = 2000 and (step = 1 or run = 'no')",
        "(step = 2000 or step = 1) and run = 'no'",
        "not pinned or step = 1",
    ],
)
def test_conditions_that_are_not_met(text: str) -> None:
    assert not matches(text)


def test_quotes_are_doubled_inside_of_quotes() -> None:
    assert conditions(parse("run = 'it''s'"))[0].value == "it's"
    assert conditions(parse('run = "say ""hi"""'))[0].value == 'say "hi"'
    assert conditions(parse('run = "it\'s"'))[0].value == "it's"


def test_a_pattern_holds_no_regular_expression() -> None:
    assert not parse("run like 'a.*'").matches({"run": "abc"}.get)
    assert parse("run like 'a.*'").matches({"run": "a.*"}.get)
    assert parse("run like 'a%c'").matches({"run": "a\nb\nc"}.get)


@pytest.mark.parametrize(
    ("text", "position", "said"),
    [
        ("", 0, "a condition such as step >= 1000"),
        ("   ", 0, "a condition"),
        ("step >", 6, "the query ends"),
        ("step > >", 7, "found >"),
        ("step > 1 run = 'a'", 9, "`and`, `or` or the end"),
        ("step > 1 and", 12, "a name"),
        ("(step > 1", 9, "`)`"),
        ("step > 1)", 8, "`and`, `or` or the end"),
        ("run = ant", 6, "put text in quotes"),
        ("run = 'ant", 6, "the closing ' is missing"),
        ("git.commit = 4f2c", 13, "put text in quotes"),
        ("step 5", 5, "one of = != < <= > >= like"),
        ("1 < step", 0, "a name"),
        ("step > 1; drop table records", 8, "';' has no meaning here"),
        ("step in 5", 5, "`and`, `or` or the end"),
        ("pinned > true", 7, "compared by = and != alone"),
        ("run < null", 4, "compared by = and != alone"),
        ("step like 5", 10, "a text in quotes"),
        ("step = '5'", 7, "step is compared with a number"),
        ("run = 5", 6, "run is compared with a text in quotes"),
        ("pinned = 1", 9, "pinned is compared with true or false"),
        ("step = true", 7, "step is compared with a number"),
        ("tag > 'a'", 4, "tags are compared by"),
        ("created > 'soon'", 10, "a moment such as '2027-01-15'"),
        ("(" * 60 + "pinned" + ")" * 60, 51, "at most 50 brackets"),
        ("step > " + "1" * 5000, 7, "a number has at most 400 digits"),
        ("step > -" + "1_" * 2500 + "1", 7, "a number has at most 400 digits"),
        ("loss < 0." + "1" * 5000, 7, "a number has at most 400 digits"),
        ("created > 1e" + "1" * 5000, 10, "a number has at most 400 digits"),
    ],
)
def test_what_has_no_meaning_is_an_error_that_shows_the_place(text: str, position: int, said: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert (caught.value.query, caught.value.position) == (text, position)
    lines = str(caught.value).splitlines()
    assert lines[-2:] == [f"  {text}", "  " + " " * position + "^"]


def test_an_error_in_a_query_of_several_lines_still_shows_the_place() -> None:
    with pytest.raises(QueryError) as caught:
        parse("step > 1\nand run = x")
    assert str(caught.value).splitlines()[-2:] == ["  step > 1 and run = x", " " * 21 + "^"]


def test_unknown_names_are_told_with_the_near_ones() -> None:
    text = "step > 1 and evl/return > 3"
    with pytest.raises(QueryError, match="did you mean 'eval/return'") as caught:
        check_names(text, parse(text), {"eval/return"}, {"learning_rate"}, {"torch"})
    assert caught.value.position == 13


def test_known_names_are_taken_short_and_with_their_group() -> None:
    text = "step > 1 and loss < 2 and metrics.loss < 2 and lr = 1 and hyperparameters.lr = 1 and versions.torch = '2'"
    check_names(text, parse(text), {"loss"}, {"lr"}, {"torch"})
    with pytest.raises(QueryError, match="'torch'"):
        check_names("torch = '2'", parse("torch = '2'"), {"loss"}, {"lr"}, {"torch"})


def test_a_short_name_that_is_no_metric_is_a_hyperparameter() -> None:
    assert full_name("optimizer.lr") == "hyperparameters.optimizer.lr"
    assert [full_name(name) for name in ("step", "git.commit", "versions.torch", "metrics.step")] == [
        "step",
        "git.commit",
        "versions.torch",
        "metrics.step",
    ]


def test_nested_hyperparameters_have_dotted_names() -> None:
    assert list(dotted({"lr": 1, "optimizer": {"lr": 2, "betas": {"first": 0.9}}})) == [
        "lr",
        "optimizer",
        "optimizer.lr",
        "optimizer.betas",
        "optimizer.betas.first",
    ]


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" * 309, "1e-999", "'9999-12-31T23:59-23:59'", "'0001-01-01'"])
def test_values_as_far_out_as_can_be_written_are_compared(value: str) -> None:
    for name in ("created", "step", "eval/return", "missing"):
        if name == "created" or not value.startswith("'"):
            for sign in ("=", "!=", "<", "<=", ">", ">="):
                assert matches(f"{name} {sign} {value}") in (True, False)


def test_what_is_not_above_a_value_is_not_always_below_it_or_equal() -> None:
    assert matches("not (missing > 3000)")
    assert not matches("missing <= 3000")


@given(st.text(max_size=40))
def test_any_text_is_a_query_or_a_query_error(text: str) -> None:
    try:
        query = parse(text)
    except QueryError as error:
        position = error.position
    else:
        assert query.matches(FACTS.get) in (True, False)
        position = 0
    assert 0 <= position <= len(text)


_ATOMS = st.sampled_from(["step = 2000", "step = 1", "pinned", "git.dirty", "missing = 1", "tag = 'good'"])


@given(
    st.recursive(
        _ATOMS,
        lambda inner: st.one_of(
            inner.map(lambda each: f"not ({each})"),
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        ),
        max_leaves=12,
    )
)
def test_and_or_not_and_brackets_mean_what_python_means_by_them(text: str) -> None:
    meaning = {"step = 2000": True, "step = 1": False, "pinned": True, "git.dirty": False, "missing = 1": False}
    python = text.replace("tag = 'good'", "True")
    for atom, value in meaning.items():
        python = python.replace(atom, str(value))
    assert matches(text) == eval(python)


def test_every_field_is_documented_by_the_command() -> None:
    from simckpt import cli

    help_text = " ".join((cli.find.__doc__ or "").split())
    for field in FIELDS.keys() - {"seq"}:
        assert field in help_text
