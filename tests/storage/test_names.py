import pytest
from hypothesis import given
from hypothesis import strategies as st

from simckpt.errors import FormatError, InvalidNameError
from simckpt.storage import names


@pytest.mark.parametrize("name", ["a", "ant-ppo", "Ant_v5.seed-3", "0", "a" * 100])
def test_plain_names_are_accepted(name):
    assert names.check_run_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        ".hidden",
        "-a",
        "a..b",
        "a.",
        "a b",
        "a\n",
        "a\0",
        "ä",
        "\u0430",
        "a" * 101,
        "a\\b",
        "~",
    ],
)
def test_names_that_cannot_be_folders_are_refused_with_one_that_can(name):
    with pytest.raises(InvalidNameError) as caught:
        names.check_run_name(name)
    suggested = str(caught.value).rsplit("'", 2)[1]
    assert names.check_run_name(suggested) == suggested


@given(st.text())
def test_every_suggestion_is_a_name(name):
    try:
        names.check_run_name(name)
    except InvalidNameError as error:
        names.check_run_name(str(error).rsplit("'", 2)[1])


@given(st.text(min_size=1).filter(lambda text: all(not 0xD800 <= ord(letter) < 0xE000 for letter in text)))
def test_components_of_any_name_become_one_part_and_come_back(name):
    part = names.encode_part(name)
    assert "/" not in part
    assert "\0" not in part
    assert part not in ("", ".", "..")
    assert names.decode_part(part) == name


@pytest.mark.parametrize("part", ["%ff", "%ed%a0%80", "%61", "%2f", "a b", "%", "a%", "%zz", ".", "ä", "\ud800"])
def test_text_that_is_no_encoded_name_is_refused(part):
    with pytest.raises(FormatError):
        names.decode_part(part)


def test_a_name_that_utf_8_cannot_hold_is_refused():
    with pytest.raises(InvalidNameError):
        names.encode_part("a\ud800")


def test_random_ids_are_128_bits_in_hexadecimal():
    found = {names.random_id() for _ in range(100)}
    assert len(found) == 100
    assert all(names.ID.fullmatch(each) for each in found)
