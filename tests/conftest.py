"""Settings that must be in place before any test module is imported."""

import ctypes.util
import multiprocessing
import os

import pytest

# one thread per process: thread pools cost time on two cores, and reductions must not depend on their number
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# mujoco picks its GL library when it is imported, and fails there if the library is missing
os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "disabled")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogs of stores go to a folder of the tests' own, those of child processes as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def default_start_method() -> None:
    """Undoes what torchrl does when it is imported: it makes `spawn` the way in which all processes are started."""
    multiprocessing.set_start_method(None, force=True)
