"""Opening and restoring a store runs no code of its files: nothing that could is reachable, and nothing tries."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "simckpt"
TESTS = Path(__file__).parent.parent

# modules that read what a stranger may have written
READING = ["storage", "state", "restore.py", "comparison.py", "checkpoint.py", "catalog.py", "branching/importing.py"]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "runpy", "code"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module"}


# torch's own format is a pickle; what is written is never unpickled here, but by torch, weights alone
WRITING_PICKLES = {"torch_export.py": {"pickle"}}
UNSAFE = ("np", "numpy", "torch", "pickle")


def _is_weights_only(call: ast.Call) -> bool:
    return any(
        each.arg == "weights_only" and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in call.keywords
    )


def modules() -> list[Path]:
    found: list[Path] = []
    for part in READING:
        path = PACKAGE / part
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


def test_nothing_that_reads_can_run_code() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found = {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES
            assert found <= WRITING_PICKLES.get(path.name, set()), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                is_method = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") in ("re", "torch")
                assert name not in FORBIDDEN_CALLS or is_method, f"{path}:{node.lineno} calls {name}"
                if name in ("load", "loads", "Unpickler") and isinstance(function, ast.Attribute):
                    assert getattr(function.value, "id", "") not in UNSAFE or _is_weights_only(node), (
                        f"{path}:{node.lineno}"
                    )


PROGRAM = """
import builtins, pickle, sys, _pickle, marshal
sys.path[:0] = [{format!r}, {tests!r}]
import make_golden
import numpy as np, torch
import simckpt
from simckpt.state import decode, LoopState
golden = {golden!r}
# what is loaded late is loaded now, by a restore of the same kinds of state
restored = []
def restore():
    store = simckpt.Store(golden)
    for run in store.runs():
        for checkpoint in run.checkpoints(abandoned=True):
            read = checkpoint.read()
            for name, encoded in read.items():
                decode(encoded.leaves, encoded.structure)
            state = {{name: decode(e.leaves, e.structure) for name, e in read.items()}}
            live = {{name: LoopState(**tree) for name, tree in state.items()
                     if all(type(key) is str and key.isidentifier() for key in tree)}}
            if live:
                checkpoint.restore(live)
                restored.append(checkpoint.id)
            checkpoint.leaves(); checkpoint.hyperparameters
restore()
known = set(sys.modules)
def refuse(*arguments, **more):
    raise AssertionError("code was about to be run")
for module in (pickle, _pickle):
    for name in ("load", "loads", "Unpickler"):
        setattr(module, name, refuse)
marshal.loads = marshal.load = refuse
torch.load = np.load = refuse
builtins.eval = builtins.exec = builtins.compile = refuse
original = builtins.__import__
def only_known(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name not in sys.modules:
        raise AssertionError(f"{{name}} was about to be imported")
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = only_known
restore()
assert set(sys.modules) == known, set(sys.modules) - known
assert len(restored) >= 4
print("restored")
"""


def test_a_restore_of_the_golden_store_evaluates_unpickles_and_imports_nothing() -> None:
    program = PROGRAM.format(
        format=str(TESTS / "format"), tests=str(TESTS), golden=str(max((TESTS / "format" / "golden").iterdir()))
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "restored", done.stderr[-3000:]
