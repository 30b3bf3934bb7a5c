"""Credentials never reach an error, a log, a record or a repr, whatever goes wrong."""

import contextlib
import io
import logging
import traceback
import warnings

import pytest
from archive_helpers import RUN, archive, filled
from fake_s3 import FAULTS
from storage_helpers import snapshot

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.errors import SimckptError

TOLD = Patience(timeout=0.4, retries=0, limit=2.0)


def everything_told(error: BaseException) -> str:
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    parts = [text.getvalue(), repr(error), str(error), repr(vars(error))]
    inner = [each for each in (error.__cause__, error.__context__) if each is not None]
    return "\n".join([*parts, *map(everything_told, inner)])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", [1, 3, 8, 14])
def test_no_error_of_a_pass_tells_a_secret(tmp_path, fake, fault, at, caplog):
    caplog.set_level(logging.DEBUG)
    fake.hang = 1.0
    files, _ = filled(tmp_path / "store", 1)
    fake.fault = lambda number, name: fault if number >= at else None
    mover = Archive(files, "s3://bucket/place", patience=TOLD)
    told = repr(mover) + repr(mover._opened())
    with warnings.catch_warnings(record=True) as caught:
        try:
            told += str(mover.move())
        except SimckptError as error:
            told += everything_told(error)
    told += "".join(str(each.message) for each in caught) + caplog.text
    for name, secret in fake.environment().items():
        if "KEY" in name:
            assert secret not in told, name
            for file, data in snapshot(files.path).items():
                assert secret.encode() not in data, file


def test_what_a_server_sends_is_not_repeated(tmp_path, fake, monkeypatch):
    # a server tells the key id and the string to sign in the body of a refusal
    secret = "AKIATESTTESTTESTTEST"
    original = fake._answer

    def telling(request, status, content, headers=None):
        if status == 403:
            content = (
                f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{secret}</AWSAccessKeyId></Error>".encode()
            )
        original(request, status, content, headers)

    fake._answer = telling
    fake.fault = lambda number, name: "403"
    files, _ = filled(tmp_path / "store", 1)
    with pytest.raises(SimckptError) as caught:
        Archive(files, "s3://bucket/place", patience=TOLD).move()
    assert "SignatureDoesNotMatch" in str(caught.value)
    assert secret not in everything_told(caught.value)


def test_credentials_come_from_the_configuration_files(tmp_path, fake, monkeypatch):
    for name in fake.environment():
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = AKIAFROMTHEFILE00000\naws_secret_access_key = told-to-nobody-at-all\n"
    )
    (tmp_path / "config").write_text(f"[profile mine]\nregion = eu-central-1\nendpoint_url = {fake.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    seen = []
    original = fake._handle

    def noting(request):
        seen.append(request.headers.get("Authorization", ""))
        original(request)

    fake._handle = noting
    files, _ = filled(tmp_path / "store", 1)
    assert archive(files, "s3://bucket/place").move().problems == []
    assert "AKIAFROMTHEFILE00000" in seen[0]
    assert "eu-central-1" in seen[0]


def test_the_command_line_repeats_no_secret(tmp_path):
    from typer.testing import CliRunner

    from simckpt.cli import app

    files, _ = filled(tmp_path / "store", 1)
    secret = "hunter2hunter2"
    for command in (
        ["archive", str(files.path), f"s3://user:{secret}@bucket/place"],
        ["push", str(files.path), RUN, f"s3://bucket/place?X-Amz-Signature={secret}"],
        ["pull", f"az://container?sig={secret}", str(files.path)],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert secret not in done.output
        with contextlib.suppress(ValueError):
            assert secret not in done.stderr
    assert not simckpt.Store(files.path).files.archive()
