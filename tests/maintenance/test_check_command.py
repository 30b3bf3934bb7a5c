"""`simckpt check`: what it prints, and its exit codes."""

import json
import os
import warnings

import pytest
from maintenance_helpers import RUN, everything, file_of, flip, place_of
from typer.testing import CliRunner

from simckpt.cli import app, application
from simckpt.errors import DamageWarning


def run(*arguments: object):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def damage(store) -> None:
    """Cuts off the array behind which there is nothing but the structure of its component."""
    path = file_of(store, "state")
    offset, size = place_of(path, "agent/weights")
    os.truncate(path, offset + size - 1)


def test_a_whole_store_is_0_and_a_damaged_one_3_with_names_and_advice(store):
    done = run(store.path, "--quick")
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "no damage")
    path = file_of(store, "state")
    flip(path, place_of(path, "agent/weights")[0] * 8)
    assert run(store.path, "--quick").exit_code == 0
    done = run(store.path)
    identity = store.index(RUN, 3).commit.id
    assert done.exit_code == 3
    for text in (f"runs/{RUN}/checkpoints/00000003/state.h5", "agent/weights", identity, "--repair"):
        assert text in done.output


def test_what_cannot_be_checked_is_2(tmp_path, store):
    assert run(tmp_path / "nothing").exit_code == 2
    assert run(store.path, "--part", "two").exit_code == 2
    assert run(store.path, "--part", "3/2").exit_code == 2
    assert run(store.path, "--dry-run").exit_code == 2
    assert run(store.path, "--repair", "--part", "1/2").exit_code == 2
    assert run(store.path, "--max-minutes", "0").exit_code == 2


def test_json_says_all_of_it(store):
    damage(store)
    done = run(store.path, "--json", "--quick", "--part", "1/1")
    told = json.loads(done.stdout)
    assert done.exit_code == 3
    assert (told["ok"], told["part"], told["left"]) == (False, [1, 1], 0)
    assert [(each["run"], each["seq"]) for each in told["lost"]] == [(RUN, 3)]
    assert "agent/weights" in told["lost"][0]["leaves"]
    assert {finding["kind"] for finding in told["findings"]} == {"leaves"}
    assert told["counts"]["checkpoints"] == 4


@pytest.mark.parametrize("as_json", [False, True])
def test_a_repair_is_shown_before_it_is_done(store, as_json):
    damage(store)
    more = ["--json"] if as_json else []
    before = everything(store.path)
    dry = run(store.path, "--quick", "--repair", "--dry-run", *more)
    assert dry.exit_code == 3
    assert everything(store.path) == before
    done = run(store.path, "--quick", "--repair", *more)
    assert done.exit_code == 0
    assert run(store.path, "--quick", *more).exit_code == 0
    if as_json:
        assert [action["done"] for action in json.loads(done.stdout)["actions"]] == [True]
    else:
        assert f"done: runs/{RUN}/checkpoints/00000003" in done.output
        assert "would be done" in dry.output


def test_a_check_in_pieces_says_what_is_left(store):
    done = run(store.path, "--max-minutes", "1e-9")
    # nothing was looked at: that is no "no damage"
    assert done.exit_code == 2
    assert "not finished" in done.output
    assert "--resume" in done.output
    assert "no damage" not in done.output
    told = json.loads(run(store.path, "--max-minutes", "1e-9", "--json").stdout)
    assert (told["ok"], told["left"] > 0) == (False, True)
    assert (told["counts"]["checkpoints"], told["counts"]["segments"]) == (0, 0)
    done = run(store.path, "--resume")
    assert done.exit_code == 0
    assert "are left" not in done.output


def test_names_in_a_store_cannot_write_to_the_terminal(store):
    (store.path / "bell\x07\x1b[31m").write_text("x")
    assert "\x1b" not in run(store.path, "--quick").output


def test_warnings_of_commands_are_their_text_alone():
    before = warnings.formatwarning
    with application.readable_errors():
        told = warnings.formatwarning(DamageWarning("number 5\x1b was passed over"), DamageWarning, "marking.py", 82)
        assert told == "simckpt: warning: number 5\\x1b was passed over\n"
    assert warnings.formatwarning is before
