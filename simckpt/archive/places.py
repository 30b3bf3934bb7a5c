"""Where an archive is: addresses such as `s3://bucket/prefix`, which never hold a secret."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from simckpt.errors import ConfigurationError
from simckpt.storage.archived import URL_LIMIT

SCHEMES = ("s3", "gs", "az", "file", "memory")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SLIP = re.compile(r"//|@")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PART = re.compile(r"[^\x00-\x1f\x7f?#%\\]+")


@dataclass(frozen=True)
class Place:
    """An address, taken apart.

    Attributes:
        scheme: "s3", "gs", "az", "file", or "memory" for one that lives in this process, to try things out.
        bucket: or container, or the name of a memory; empty for a folder.
        prefix: of all names in it, without a slash at either end; the absolute path of a folder.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return Path(self.prefix).as_uri()
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_place(address: str | os.PathLike[str]) -> Place:
    """Returns the place that an address names.

    Args:
        address: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder`, or the path of a
            folder.

    Raises:
        ConfigurationError: another kind of address, or one with a user, a password or a query in it, which may be
            secrets: credentials come from the environment and the usual files. The message does not repeat them.
    """
    text = os.fspath(address)
    if not isinstance(text, str) or not text or len(text) > URL_LIMIT or "\0" in text:
        raise _wrong("it is no text, empty or too long")
    scheme = _SCHEME.match(text) if isinstance(address, str) else None
    if scheme is None:
        # a slip such as s3//user:secret@bucket must not become a folder, whose name is written down
        if isinstance(address, str) and (text.startswith("//") or (text[0] not in "/.~" and _SLIP.search(text))):
            raise _wrong(
                "it has a // or an @, but no s3:// or the like at its beginning; a folder of such a name is given as "
                "an absolute path, or begins with ./"
            )
        return Place("file", "", str(Path(text).expanduser().resolve()))
    if scheme[1].lower() not in SCHEMES:
        raise _wrong(f"{scheme[1]!r} is none of {', '.join(SCHEMES)}")
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        raise _wrong("it cannot be understood") from None
    if "@" in parts.netloc or "?" in text or "#" in text:
        raise _wrong(
            "it has a user, a password, a query or a fragment, which may be secrets and would be written down: give "
            "the bucket and the prefix alone, and the credentials by the environment or the usual configuration files"
        )
    if parts.scheme == "file":
        if host not in (None, "", "localhost") or not parts.path.startswith("/") or not parts.path.strip("/"):
            raise _wrong("after file:// comes the absolute path of a folder, as in file:///mnt/archive")
        return Place("file", "", str(Path(unquote(parts.path)).resolve()))
    if not _BUCKET.fullmatch(parts.netloc):
        raise _wrong(f"after {parts.scheme}:// comes the name of a bucket, as in {parts.scheme}://bucket/prefix")
    prefix = parts.path.strip("/")
    if prefix and not all(_PART.fullmatch(part) and part not in (".", "..") for part in prefix.split("/")):
        raise _wrong("parts of its prefix are empty, `.` or `..`, or hold characters such as %, ? and \\")
    return Place(parts.scheme, parts.netloc, prefix)


def _wrong(why: str) -> ConfigurationError:
    return ConfigurationError(f"this is no address of an archive: {why}", keys=["url"])
