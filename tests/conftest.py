"""Settings that must be in place before any test module is imported."""

import ctypes.util
import multiprocessing
import os
import signal

import pytest

# one thread per process: thread pools cost time on two cores, and reductions must not depend on their number
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# mujoco picks its GL library when it is imported, and fails there if the library is missing
os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "disabled")
# every start of a run asks git three times, for a tenth of the time of all tests: to most of them there is no git
os.environ["GIT_DIR"] = os.devnull
# a shell's background jobs ignore it, and so would all programs that tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _sync_nothing(descriptor: int) -> None:
    os.fstat(descriptor)  # what is not open is still refused


# no test pulls the plug, and much of their time would go into waiting for the disk; programs that tests start do sync
os.fsync = _sync_nothing


@pytest.fixture
def with_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test's own working trees be found."""
    monkeypatch.delenv("GIT_DIR")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What simckpt keeps for a user goes to folders of the tests' own, that of child processes as well."""
    for name in ("cache", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path_factory.getbasetemp() / name))


@pytest.fixture(autouse=True)
def default_start_method() -> None:
    """Undoes what torchrl does when it is imported: it makes `spawn` the way in which all processes are started."""
    multiprocessing.set_start_method(None, force=True)
