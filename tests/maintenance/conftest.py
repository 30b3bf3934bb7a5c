"""One store with everything in it, built once and copied for each test."""

import shutil

import pytest
from maintenance_helpers import rich_store

from simckpt.storage import StoreFiles


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return rich_store(tmp_path_factory.mktemp("rich") / "store").path


@pytest.fixture
def store(original, tmp_path):
    shutil.copytree(original, tmp_path / "store", symlinks=True)
    return StoreFiles.open(tmp_path / "store")
