"""The door to object stores: names and bytes, and errors that tell no secrets. Nothing else imports obstore."""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import io
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from simckpt.archive.places import Place
from simckpt.errors import ArchiveDamagedError, ArchiveUnavailableError, ConfigurationError
from simckpt.storage import durable
from simckpt.storage.archived import Copied

PORTION = 8 << 20  # [bytes] of one request of a large object
RECORD_LIMIT = 1 << 28  # [bytes] of a small object: an index of a million leaves
_PARTS = 5000  # of one upload; S3 takes 10,000

_LOOK = 0.1  # [s] between looks, during a request, whether it is to be given up

T = TypeVar("T")
_memories: dict[str, Any] = {}


@dataclass(frozen=True)
class Patience:
    """How long to wait for an object store.

    Attributes:
        timeout: of one request, a portion of a large object [s].
        retries: of one request, after errors of the server and the network, with growing pauses.
        limit: of one request and its retries [s].
    """

    timeout: float = 60.0
    retries: int = 5
    limit: float = 180.0


class Objects:
    """The objects at one place; every method raises ArchiveUnavailableError if the store cannot be reached or refuses.

    Attributes:
        going_on: asked before each request and all through it; if False, what is under way is given up.

    Args:
        place: where they are.
        patience: how long to wait.
        make: whether a folder that is missing is made.
        disk: the system calls, for tests.

    Raises:
        ConfigurationError: obstore is not installed.
        ArchiveUnavailableError: the folder is missing, or obstore refuses what the environment configures.
    """

    def __init__(
        self, place: Place, patience: Patience | None = None, *, make: bool = True, disk: durable.Disk | None = None
    ) -> None:
        self.place = place
        self.going_on: Callable[[], bool] = lambda: True
        self._disk = disk or durable.Disk()
        try:
            import obstore
        except ImportError as error:
            message = "archives need obstore: install simckpt[archive], or `pip install obstore`"
            raise ConfigurationError(message) from error
        self._obstore = obstore
        if place.scheme == "file" and not make and not Path(place.prefix).is_dir():
            raise ArchiveUnavailableError(f"the archive {place} is not there: is it mounted, or was it moved?")
        self._patience = patience or Patience()
        self._store = self._do(lambda: _opened(place, self._patience), "cannot be opened")

    def __repr__(self) -> str:
        return f"<Objects {str(self.place)!r}>"

    def _do(self, act: Callable[[], T], what: str) -> T:
        request = _Request(act)
        self._check_going_on()
        # a thread that nobody waits for at the end: obstore does not hear Ctrl-C, and a server may never answer
        threading.Thread(target=request.run, name="simckpt request", daemon=True).start()
        while not request.done.wait(_LOOK):
            self._check_going_on()
        # the error is made outside of the handler: what obstore tells may hold signed addresses, and would hang on it
        try:
            return request.result()
        except FileNotFoundError:
            absent = True
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            absent, reason = False, _reason(error)
        if absent:
            raise FileNotFoundError(what)
        raise ArchiveUnavailableError(f"the archive {self.place}: {what}: {reason}; what is here stays as it is")

    def put(self, name: str, source: Path | bytes) -> None:
        """Writes an object, in the place of an older one if there is one; nobody ever sees a part of it.

        Args:
            name: of the object.
            source: its bytes, or the file that holds them. FileNotFoundError if that is gone.
        """
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        portion = max(PORTION, size // _PARTS)

        def act() -> None:
            if size <= portion:
                self._obstore.put(self._store, name, source, use_multipart=False)
                return
            parts = self._parts(source, portion)
            self._obstore.put(self._store, name, parts, chunk_size=portion, use_multipart=True, max_concurrency=4)

        self._do(act, f"{name} cannot be written")
        self._sync(name)

    def _parts(self, source: Path | bytes, portion: int) -> Iterator[bytes]:
        """Yields the portions of an upload, which is given up if one of them cannot be had."""
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb", buffering=0) as file:
            while data := file.read(portion):
                self._check_going_on()
                yield data

    def _check_going_on(self) -> None:
        if not self.going_on():
            raise ArchiveUnavailableError("it was stopped")

    def create(self, name: str, data: bytes) -> bool:
        """Writes a small object if there is none of that name; returns whether there was none, or one of these bytes.

        An answer that got lost counts: the second try meets the object that the first one has written.
        """

        def act() -> bool:
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        made = self._repeated(act, f"{name} cannot be written") or self.read(name) == data
        if made:
            self._sync(name)
        return made

    def _repeated(self, act: Callable[[], bool], what: str) -> bool:
        """Does what obstore does not do again by itself after a time-out, as that may not be: here it may."""
        for attempt in range(self._patience.retries):
            try:
                return self._do(act, what)
            except ArchiveUnavailableError as error:
                if _TIMED_OUT not in str(error):
                    raise
            self._check_going_on()
            time.sleep(min(0.1 * 2**attempt, 5.0))
        return self._do(act, what)

    def read(self, name: str) -> bytes | None:
        """Returns a small object, or None if there is none of that name."""

        def act() -> bytes | None:
            found = self._obstore.get(self._store, name)
            return None if found.meta["size"] > RECORD_LIMIT else bytes(found.bytes())

        try:
            return self._do(act, f"{name} cannot be read")
        except FileNotFoundError:
            return None

    def portions(self, name: str, size: int) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of the first `size` bytes of an object; raises FileNotFoundError if there is none."""
        for start in range(0, size, PORTION):
            self._check_going_on()
            end = min(size, start + PORTION)
            data = self._do(lambda: self._part(name, start, end), f"{name} cannot be read")  # noqa: B023
            yield start, data
            if len(data) < end - start:
                return

    def _part(self, name: str, start: int, end: int) -> bytes:
        return bytes(self._obstore.get_range(self._store, name, start=start, end=end))

    def digest(self, name: str, size: int) -> Copied | None:
        """Returns what is at that name, read whole, if its size is this one; else None."""
        hasher, what = hashlib.sha256(), f"{name} cannot be read"
        with contextlib.suppress(FileNotFoundError):
            if size <= PORTION:
                data = self._do(lambda: self._whole(name, size), what)
                if data is None:
                    return None
                hasher.update(data)
                return Copied(size, f"sha256:{hasher.hexdigest()}")
            if self._do(lambda: self._obstore.head(self._store, name), what)["size"] == size:
                for _, part in self.portions(name, size):
                    hasher.update(part)
                return Copied(size, f"sha256:{hasher.hexdigest()}")
        return None

    def _whole(self, name: str, size: int) -> bytes | None:
        found = self._obstore.get(self._store, name)
        return bytes(found.bytes()) if found.meta["size"] == size else None

    def list(self, prefix: str = "") -> dict[str, int]:
        """Returns {name: size} of all objects below a prefix, which ends where a part of a name does."""

        def act() -> dict[str, int]:
            found = self._obstore.list(self._store, prefix or None, chunk_size=1000)
            return {each["path"]: each["size"] for portion in found for each in portion}

        try:
            return self._do(act, "its objects cannot be listed")
        except FileNotFoundError:
            return {}

    def delete(self, name: str) -> None:
        """Removes an object; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: self._obstore.delete(self._store, name), f"{name} cannot be removed")
            self._sync(name)

    def check_exclusive(self) -> None:
        """Raises ConfigurationError if this store lets two writers create the same object: then nothing is safe."""
        name = f"tmp/{secrets.token_hex(16)}"
        first, second = secrets.token_bytes(16), secrets.token_bytes(16)
        try:
            exclusive = self.create(name, first) and not self.create(name, second)
        finally:
            with contextlib.suppress(ArchiveUnavailableError):
                self.delete(name)
        if not exclusive:
            raise ConfigurationError(
                f"the object store of {self.place} ignores conditional writes (If-None-Match: *), so that two writers "
                f"would overwrite each other's commits: use another one, or a newer version of it",
                keys=["url"],
            )

    def _sync(self, name: str) -> None:
        """Makes what was done to an object of a folder durable, as an object store does before it answers."""
        if self.place.scheme == "file":
            durable.sync_path(self._disk, Path(self.place.prefix), *name.split("/"))


class _Request(Generic[T]):
    """Something that is done in another thread, and its result."""

    def __init__(self, act: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._act = act
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result.append(self._act())
        except BaseException as error:
            self._error = error
        finally:
            self.done.set()

    def result(self) -> T:
        # no cycle of error and traceback is left behind, which would keep what is uploaded in memory
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result[0]


def _opened(place: Place, patience: Patience) -> Any:
    from obstore import store

    if place.scheme == "memory":
        return _memories.setdefault(str(place), store.MemoryStore())
    if place.scheme == "file":
        return store.LocalStore(place.prefix, mkdir=True)
    client: dict[str, Any] = {"timeout": timedelta(seconds=patience.timeout)}
    retry = {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=patience.limit)}
    options: dict[str, Any] = {"client_options": client, "retry_config": retry}
    prefix = place.prefix or None
    if place.scheme == "gs":
        return store.GCSStore(place.bucket, prefix=prefix, **options)
    if place.scheme == "az":
        return store.AzureStore(place.bucket, prefix=prefix, **options)
    config = _aws_files(os.environ)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or config.get("endpoint")
    # whoever names an address without encryption means it
    client["allow_http"] = bool(endpoint and endpoint.startswith("http://"))
    return store.S3Store(place.bucket, prefix=prefix, **config, **options)


def _aws_files(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what `~/.aws/credentials` and `~/.aws/config` say of the profile, where the environment is silent."""
    profile = environment.get("AWS_PROFILE", "default")
    shared = environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    general = environment.get("AWS_CONFIG_FILE", "~/.aws/config")
    section = profile if profile == "default" else f"profile {profile}"
    known = {**_section(general, section), **_section(shared, profile)}
    config: dict[str, Any] = {}
    if not any(name in environment for name in _AWS_CREDENTIALS):
        for name in ("access_key_id", "secret_access_key", "session_token"):
            if known.get(f"aws_{name}"):
                config[name] = known[f"aws_{name}"]
    if known.get("region") and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        config["region"] = known["region"]
    if known.get("endpoint_url") and not {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"} & environment.keys():
        config["endpoint"] = known["endpoint_url"]
    return config


# whoever sets one of these has decided where the credentials come from
_AWS_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def _section(path: str, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    # a file that cannot be read or understood holds no credentials for us; the object store will say so
    with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError, configparser.Error):
        parser.read(Path(path).expanduser(), encoding="utf-8")
        return dict(parser[section]) if parser.has_section(section) else {}
    return {}


_STATUS = re.compile(r"\b([45][0-9]{2}) [A-Z]")  # before its reason phrase
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_TIMED_OUT = "it timed out"
_KNOWN = (
    "Connection refused",
    "Connection reset",
    "dns error",
    "error sending request",
    "connection closed before message completed",
    "No space left on device",
    "Permission denied",
    "Read-only file system",
    "Not a directory",
    "Input/output error",
)


def _reason(error: Exception) -> str:
    """Returns why obstore failed, in words of our own: its text may hold signed addresses, and what servers send."""
    text = str(error)
    kind = {"PermissionDeniedError": "access is denied", "UnauthenticatedError": "the credentials are refused"}
    known = [kind[type(error).__name__]] if type(error).__name__ in kind else []
    known += [_TIMED_OUT] if "kind: Timeout" in text else [found for found in _KNOWN if found in text]
    known += [f"status {found}" for found in dict.fromkeys(_STATUS.findall(text.partition("Debug source")[0]))]
    known += list(dict.fromkeys(_CODE.findall(text)))
    return ", ".join(known[:4]) or type(error).__name__


def lost(place: Place, name: str, what: str = "is damaged or gone") -> ArchiveDamagedError:
    """Returns the error for an object that is not what was written."""
    return ArchiveDamagedError(f"{name} in the archive {place} {what}", path=f"{place}/{name}")
