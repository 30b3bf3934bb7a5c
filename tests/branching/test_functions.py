"""Functions are named, and found again by another process; what no other process finds is refused."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fan_out_loops as loops
import numpy as np
import pytest

from simckpt.branching.functions import check_call, described, function_of
from simckpt.errors import ConfigurationError


def test_a_function_is_found_again() -> None:
    description = json.loads(json.dumps(described(functools.partial(loops.train, until=50))))
    found = function_of(description)
    assert isinstance(found, functools.partial)
    assert found.func is loops.train
    assert found.keywords == {"until": 50}


def test_numbers_of_numpy_reach_a_function_as_plain_ones() -> None:
    given = functools.partial(
        loops.train, until=np.int64(50), rates=(np.float32(0.5), {"a": np.bool_(True)}), name=np.str_("x")
    )
    keywords = json.loads(json.dumps(described(given)["keywords"]))
    assert keywords == {"until": 50, "rates": [0.5, {"a": True}], "name": "x"}


class Holder:
    def method(self) -> None:
        pass

    def __call__(self, store: str, run: str) -> None:
        pass


def closure() -> Any:
    def train(store: str, run: str) -> None:
        pass

    return train


def replaced(store: str, run: str) -> None:
    pass


_kept, replaced = replaced, functools.partial(replaced)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda: None, "top level"),
        (closure(), "top level"),
        (Holder().method, "top level"),
        (Holder, "top level"),
        (Holder(), "top level"),
        (print, "top level"),
        ("train", "top level"),
        (functools.partial(closure(), 1), "top level"),
        (_kept, "has another value of that name"),
        (functools.partial(loops.train, until=Holder()), "more than JSON can hold"),
        (functools.partial(loops.train, until=float("nan")), "more than JSON can hold"),
        (functools.partial(loops.train, until={1: 2}), "more than JSON can hold"),
        (functools.partial(loops.train, until=np.zeros(2)), "more than JSON can hold"),
    ],
    ids=[
        "lambda",
        "closure",
        "method",
        "class",
        "object",
        "builtin",
        "text",
        "partial of a closure",
        "another of that name",
        "object as an argument",
        "nan",
        "keys that are numbers",
        "array",
    ],
)
def test_what_another_process_cannot_find_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        described(function)


def test_a_module_that_no_other_process_can_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(file: Path, name: str) -> Any:
        file.parent.mkdir(exist_ok=True)
        file.write_text("def train(store, run): pass\n")
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.train

    hidden = loaded(tmp_path / "a" / "only_here.py", "only_here")
    with pytest.raises(ConfigurationError, match=r"is found nowhere on sys\.path"):
        described(hidden)
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert described(hidden)["module"] == "only_here"
    # another file of that name comes first
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "b")
    with pytest.raises(ConfigurationError, match=r"is found on sys.path as .*/b/only_here.py"):
        described(hidden)


async def asynchronous(store: str, run: str) -> None:
    pass


def yielding(store: str, run: str) -> Any:
    yield


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (loops.double, "cannot be called with"),
        (functools.partial(loops.train, unti=50), "cannot be called with"),
        (asynchronous, "does nothing when it is called"),
        (functools.partial(yielding), "does nothing when it is called"),
    ],
    ids=["too few arguments", "unknown argument", "async", "generator"],
)
def test_a_call_that_could_not_work_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        check_call(function, "store", "run")
    check_call(functools.partial(loops.train, until=50), "store", "run")


SCRIPT = """
import functools, json, sys
from simckpt.branching.functions import described
from simckpt.errors import ConfigurationError

def noted(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

def top(store, run): pass

if len(sys.argv) > 3:
    def later(store, run): pass
else:
    def later(store, run): pass

@noted
def decorated(store, run): pass

def twice(store, run): pass
def bound(store, run): pass

def main():
    global hidden
    def hidden(store, run): pass

if __name__ == "__main__":
    def below(store, run): pass
    def twice(store, run): pass
    if True:
        def deep(store, run): pass
    kept, bound = bound, functools.partial(bound, 1)
    main()
    exec("def made(store, run): pass")
    answers = {}
    for name in ("top", "later", "decorated", "bound", "twice", "below", "deep", "hidden", "made"):
        try:
            answers[name] = described(globals()[name])["name"]
        except ConfigurationError as error:
            answers[name] = str(error)
    exec("def top(store, run): pass")
    try:
        answers["top anew"] = described(top)["name"]
    except ConfigurationError as error:
        answers["top anew"] = str(error)
    print(json.dumps(answers))
"""


@pytest.mark.parametrize("how", ["a script", "a script without an ending", "python -m", "stdin"])
def test_functions_of_a_script_are_those_that_an_import_of_it_would_define(how: str, tmp_path: Path) -> None:
    file = tmp_path / ("script" if "without" in how else "script.py")
    file.write_text(SCRIPT)
    words = {"python -m": ["-m", "script"], "stdin": ["-"]}.get(how, [file.name])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *words], input=SCRIPT, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    if how == "stdin":
        assert all(
            "was defined in a notebook or at a prompt: put it into a module" in each for each in answers.values()
        )
        return
    for name in ("top", "later", "decorated", "bound"):
        assert answers[name] == name
    for name in ("below", "twice", "deep"):
        assert f"find {name}: it is defined below `if __name__ == '__main__':`" in answers[name]
    for name in ("hidden", "made", "top anew"):
        assert "does not define it" in answers[name]


def test_a_script_without_an_ending_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script"
    script.write_text("def double(value): return 2 * value\n")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    description = {"module": "__main__", "file": str(script), "main": True, "name": "double"}
    assert function_of({**description, "arguments": [], "keywords": {}})(4) == 8
