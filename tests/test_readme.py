"""What the documentation names exists."""

import ast
import re
from pathlib import Path

import pytest

import simckpt
import simckpt.testing

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "simckpt").rglob("*.md")),
    *(ROOT / name / "README.md" for name in ("envs", "scripts")),
]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_files_named_in_the_readme_exist() -> None:
    for name in re.findall(r"`((?:scripts|tests|envs|simckpt)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_names_used_in_the_readme_exist() -> None:
    for dotted in re.findall(r"simckpt\.((?:testing\.)?[A-Za-z_]+)", README):
        value: object = simckpt
        for part in dotted.split("."):
            assert hasattr(value, part), dotted
            value = getattr(value, part)


def test_code_blocks_of_the_readme_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_no_placeholder_is_left_in_the_readme() -> None:
    assert not re.search(r"@[A-Z]+@", README)
