"""Takes hostile things through every door of simckpt, each in a process of its own with little memory and time.

    python tests/hostile/doors.py <job.json>

The job: {"cases": [[name, kind, path], ...], "allowed": [folders], "good": <good store>, "scratch": folder}, and with
"broken" the name of a check that is left out, to see that this is noticed.
Prints a line of JSON for each case: what each door said, and what was opened that should not have been. A process that
crashes, hangs or takes more memory than it may is seen by its parent.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:
    # a hostile file must not be able to make the programs here load it; the fast suite does without
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "storage")]

import breaking  # noqa: E402
import forging  # noqa: E402
from source_helpers import read_source  # noqa: E402

import simckpt  # noqa: E402
from simckpt import cli, comparison  # noqa: E402
from simckpt.branching import branch, importing, lineage  # noqa: E402, F401
from simckpt.errors import SimckptError  # noqa: E402
from simckpt.storage import exports, hdf5_reader  # noqa: E402

PACKAGE = Path(simckpt.__file__).parent
MEMORY = 512 << 20  # [bytes] more than what Python and the libraries take; the largest of the files has a hundredth
SECONDS = 30  # of processor time, for all doors of one thing


class Watch:
    """Notes what is opened, started or imported; told by Python itself."""

    def __init__(self, allowed: list[str]) -> None:
        self._allowed = (*allowed, sys.prefix, sys.base_prefix, str(PACKAGE), str(Path(__file__).parent))
        self.found: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ("open", "os.listdir", "os.scandir"):
            self._check(event, *arguments)
        elif event in (
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "exec",
            "compile",
            "pickle.find_class",
        ):
            self._started(event, arguments)

    def _check(self, event: str, path: Any, mode: Any = None, flags: Any = 0) -> None:
        if isinstance(path, int) or path is None:
            return
        path = os.fsdecode(path)
        if Path(path).is_absolute():
            # only the last part may be a link here, and then O_NOFOLLOW is needed to be safe
            if not os.path.realpath(path).startswith(self._allowed) and not path.startswith(("/proc/", "/dev/null")):
                self.found.append(f"{event} {path}")
        elif "/" in path or path in ("..", "") or not flags & os.O_NOFOLLOW:
            self.found.append(f"{event} {path!r} relative, flags {flags:o}")

    def _started(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and arguments[0] == sys.executable and "hdf5_child.py" in str(arguments[1]):
            return
        # what libraries compile for themselves comes from their own files
        if event in ("exec", "compile"):
            name = getattr(arguments[0], "co_filename", arguments[1] if event == "compile" else "")
            if str(name).startswith(("<", sys.prefix, sys.base_prefix, str(PACKAGE))):
                return
        self.found.append(f"{event} {str(arguments)[:200]}")


def doors(kind: str, path: Path, good: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Gives the name of each door and a call that goes through it."""
    if kind == "hdf5":
        yield "describe", lambda: hdf5_reader.describe(path)
        return
    target = scratch / "target"
    if kind == "export":
        yield "open_export", lambda: exports.open_export(path)
        yield "read", lambda: read_source(exports.open_export(path))
        yield "import", lambda: simckpt.Store(target).import_checkpoint(path)
        yield "cli import", lambda: command("import", target, path, "--run", "other")
        return
    yield "Store", lambda: simckpt.Store(path)
    try:
        store = simckpt.Store(path)
        names = store.files.runs()
    except SimckptError:
        return
    finally:
        for words in (["ls"], ["ls", "--json"], ["log"], ["log", "--json"]):
            yield f"cli {' '.join(words)}", lambda words=words: command(words[0], path, *words[1:])
    yield "runs", store.runs
    yield "contents", store.contents
    yield "html", store._repr_html_
    yield "graph", lambda: str(store.graph())
    yield "checkpoints", store.checkpoints
    yield "find", lambda: store.checkpoints("learning_rate < 1 and host = 'x'", damaged={})
    yield "nothing near", lambda: store.checkpoint("nothing-near")
    for name in names:
        yield from run_doors(store, name, good, scratch)


def run_doors(store: simckpt.Store, name: str, good: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    run = store.run(name) if not _refused(lambda: store.run(name)) else None
    yield f"{name}: run", lambda: store.run(name)
    if run is not None:
        yield f"{name}: latest", run.latest
        yield f"{name}: checkpoints", run.checkpoints
        yield f"{name}: lineage", lambda: str(run.lineage())
        yield f"{name}: events", lambda: store.files.events(name)
        yield f"{name}: marks", lambda: store.files.marks(name)
    for seq in (1, 2, 3, 4):
        yield f"{name}: verify {seq}", lambda seq=seq: store.files.verify(name, seq)
    found: list[simckpt.Checkpoint] = []
    with contextlib.suppress(SimckptError):
        found = [each for each in store.checkpoints(abandoned=True, damaged={}) if each.run == name]
    for place, checkpoint in enumerate(found):
        label = f"{name}: {checkpoint.seq}"
        if checkpoint.seq != 2 and checkpoint is not found[0]:
            yield f"{label} read", checkpoint.read
            continue
        yield f"{label} html", checkpoint._repr_html_
        yield f"{label} facts", lambda c=checkpoint: [c.hyperparameters, c.git, c.device, c.rollback, c.metrics, c.tags]
        yield f"{label} leaves", checkpoint.leaves
        yield f"{label} read", checkpoint.read
        yield f"{label} item", lambda c=checkpoint: c["nothing near"]
        for component in ("loop", "policy"):
            yield f"{label} {component}", lambda c=checkpoint, component=component: c[component]
            yield f"{label} restore {component}", lambda c=checkpoint, component=component: restore(c, component)
        yield f"{label} restore", lambda c=checkpoint: c.restore(forging.live())
        yield f"{label} diff", lambda c=checkpoint: compare(c, good, scratch)
        yield f"{label} fingerprint", lambda c=checkpoint: comparison.fingerprint(c)
        yield f"{label} distances", lambda c=checkpoint: comparison.distances(c, _good(good))
        yield f"{label} export", lambda c=checkpoint, place=place: c.export(scratch / f"{name}-{place}.h5")
        yield f"{label} import", lambda c=checkpoint: simckpt.Store(scratch / "target").import_checkpoint(c)
        yield f"{label} cli show", lambda c=checkpoint: command("show", store.path, c.id)
        yield f"{label} cli diff", lambda c=checkpoint: command("diff", store.path, c.id, f"{good}:{forging.RUN}")


def _good(good: Path) -> simckpt.Checkpoint:
    return simckpt.Store(good).run(forging.RUN).at(step=1)


def restore(checkpoint: simckpt.Checkpoint, component: str) -> None:
    checkpoint.restore({component: forging.live()[component]})


def compare(checkpoint: simckpt.Checkpoint, good: Path, scratch: Path) -> None:
    found = comparison.compare(checkpoint, _good(good))
    found.as_json()
    found._repr_html_()
    comparison.compare(_good(good), checkpoint)


def _refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except SimckptError:
        return True
    return False


class CommandFault(Exception):
    """The command line showed a traceback, or control characters."""


def command(*words: Any) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.app([str(word) for word in words], standalone_mode=False)
        except SystemExit as error:
            code = error.code
    text = output.getvalue()
    if "Traceback" in text:
        raise CommandFault(text[-2000:])
    odd = {each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Cs") and each != "\n"}
    if odd:
        raise CommandFault(f"control characters {sorted(map(ascii, odd))} in what {words[0]} prints")
    if code not in (None, 0, 1, 2):
        raise CommandFault(f"exit code {code}")


def go_through(kind: str, path: Path, good: Path, watch: Watch, scratch: Path) -> dict[str, Any]:
    """Returns what the doors said, and whether the state of a hostile checkpoint was taken."""
    passed, refused, faults, taken = 0, {}, [], False
    watch.on = True
    for name, call in doors(kind, path, good, scratch):
        try:
            call()
            passed += 1
            taken = taken or name in ("describe", "import", f"{forging.RUN}: 2 restore")
        except SimckptError as error:
            refused[type(error).__name__] = refused.get(type(error).__name__, 0) + 1
            str(error).encode("utf-8", "backslashreplace")
        except FileNotFoundError as error:
            faults.append(f"{name}: {error!r}")
        except Exception as error:
            import traceback

            place = traceback.extract_tb(error.__traceback__)[-1]
            faults.append(f"{name}: {type(error).__name__}: {str(error)[-600:]} at {place.filename}:{place.lineno}")
    watch.on = False
    return {"taken": taken, "passed": passed, "refused": refused, "faults": faults, "foreign": sorted(set(watch.found))}


def virtual_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit(memory: int, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    total = virtual_size() + memory
    resource.setrlimit(resource.RLIMIT_AS, (total, total))
    # waiting takes no processor time: a FIFO, say
    signal.alarm(10 * seconds)


def run_forked(work: Callable[[], Any], *, memory: int, seconds: int) -> dict[str, Any]:
    """Returns what `work` returns in a process of its own, or {"died": how}."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receiving)
            limit(memory, seconds)
            data = json.dumps(work()).encode("ascii")
            with os.fdopen(sending, "wb") as file:
                file.write(data)
            code = 0
        finally:
            os._exit(code)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if status:
        return {"died": f"signal {status & 127}" if status & 127 else f"exit code {status >> 8}"}
    found: dict[str, Any] = json.loads(data)
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    good = Path(job["good"])
    # whatever is loaded late shall be loaded now
    with tempfile.TemporaryDirectory() as scratch:
        for name, call in doors("store", good, good, Path(scratch)):
            try:
                call()
            except SimckptError as error:
                if name == "Store" or name.endswith(("restore", "read", "import", "diff")):
                    raise AssertionError(name) from error
    watch = Watch(job["allowed"])
    if "broken" in job:
        breaking.BROKEN[job["broken"]]()
    for name, kind, path in job["cases"]:
        scratch = Path(tempfile.mkdtemp(dir=job["scratch"]))

        def work(kind: str = kind, path: str = path, scratch: Path = scratch) -> dict[str, Any]:
            return go_through(kind, Path(path), good, watch, scratch)

        found = run_forked(work, memory=MEMORY, seconds=SECONDS)
        shutil.rmtree(scratch, ignore_errors=True)
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main()
