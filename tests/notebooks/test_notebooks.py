"""The notebooks run from top to bottom, warn of nothing, and are kept without outputs."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = ["01_save_and_resume", "02_branching", "03_rollback_post_mortem", "04_hardware_in_the_loop"]


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_every_notebook_is_run_here() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_is_kept_without_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert not outputs(notebook)
    assert all(cell.get("execution_count") is None for cell in notebook.cells)


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder of the test's own: other users of the machine cannot talk to the kernel; 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        yield folder


@pytest.mark.parametrize("name", NAMES)
def test_runs_from_top_to_bottom_without_warnings(
    name: str, sockets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = read(name)
    manager = {"transport": "ipc", "ip": f"{sockets}/ipc", "connection_file": f"{sockets}/kernel.json"}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=240,
        config=Config({"AsyncKernelManager": manager}),
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    client.execute()

    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    assert not [output.text for output in streams if output.name == "stderr"]
    left = {entry.name for entry in tmp_path.iterdir() if entry.name.startswith("simckpt-notebook-")}
    assert not left
