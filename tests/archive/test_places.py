"""Addresses of archives, and that no secret stands in one."""

from pathlib import Path

import pytest

from simckpt.archive.places import Place, parse_place
from simckpt.errors import ConfigurationError, FormatError
from simckpt.storage.archived import ArchiveRecord

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        ("memory://trial", "memory://trial"),
        ("file:///mnt/archive", "file:///mnt/archive"),
        ("file://localhost/mnt/archive", "file:///mnt/archive"),
        ("/mnt/archive", "file:///mnt/archive"),
        (Path("/mnt/archive"), "file:///mnt/archive"),
        ("file:///mnt/with%20space", "file:///mnt/with%20space"),
    ],
)
def test_an_address_is_understood_and_written_in_one_way(address, text):
    place = parse_place(address)
    assert str(place) == text
    assert parse_place(str(place)) == place


def test_a_relative_path_is_a_folder_of_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_place("archive") == Place("file", "", str(tmp_path / "archive"))


@pytest.mark.parametrize(
    "address",
    [
        f"s3://user:{SECRET}@bucket/prefix",
        f"s3://{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?X-Amz-Signature={SECRET}",
        f"s3://bucket/prefix#{SECRET}",
        f"az://container/prefix?sig={SECRET}",
        f"https://user:{SECRET}@host/bucket",
        f"ftp://user:{SECRET}@host/bucket",
        f"file:///mnt/archive?token={SECRET}",
        f"s3://[{SECRET}",
        f"memory://{SECRET}:x",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address):
    with pytest.raises(ConfigurationError) as caught:
        parse_place(address)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert caught.value.__context__ is None or SECRET not in str(caught.value.__context__)


@pytest.mark.parametrize(
    "address",
    ["", "s3://", "s3://b/../c", "s3://bucket/a//b", "s3://bucket/a\\b", "file://host/a", "file:///", "s3:bucket"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigurationError):
        parse_place(address)


@pytest.mark.parametrize("url", [f"s3://user:{SECRET}@bucket", f"s3://bucket?sig={SECRET}"])
def test_no_record_of_an_archive_holds_a_secret(url):
    with pytest.raises(FormatError):
        ArchiveRecord("0" * 32, url, 0.0).to_bytes()


@pytest.mark.parametrize("text", [f"s3//user:{SECRET}@b", f"s3/user:{SECRET}@b/c", f"//user:{SECRET}@b", f"b@{SECRET}"])
def test_an_address_without_its_scheme_is_no_folder_and_is_not_repeated(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_place(text)
    assert SECRET not in str(caught.value)
    assert parse_place(f"./{text}").scheme == "file", "who means a folder says so"
