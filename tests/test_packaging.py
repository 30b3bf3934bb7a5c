"""What users install."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_library_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # a copy, for a build leaves folders behind
    for name in ("pyproject.toml", "README.md", "LICENSE", "simckpt", "envs", "scripts", "tests"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"simckpt"}
    for needed in ("simckpt/py.typed", "simckpt/storage/FORMAT.md", "simckpt/README.md", "simckpt/cli/__init__.py"):
        assert needed in names
