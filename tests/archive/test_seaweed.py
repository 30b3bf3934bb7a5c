"""The whole story on a real S3 server, which is killed and slow."""

import http.server
import shutil
import threading
import urllib.request

import pytest
from archive_helpers import RUN, add, archive, assert_restores, filled, local_seqs
from local_server import LocalServer

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.archive.objects import Objects
from simckpt.archive.places import parse_place
from simckpt.errors import ArchiveUnavailableError
from simckpt.policies import KeepLast

pytestmark = pytest.mark.slow
PATIENT = Patience(timeout=20.0, retries=5, limit=60.0)


def place(tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}"


def mover(files, tmp_path, count: int = 1) -> Archive:
    return Archive(files, place(tmp_path), policy=KeepLast(count), patience=PATIENT)


def test_checkpoints_go_there_and_come_back(tmp_path, seaweed):
    files, _ = filled(tmp_path / "store")
    assert mover(files, tmp_path).move().problems == []
    assert local_seqs(files) == {4}
    with files.claim(RUN):
        files.prune(RUN, 2, "test")
    moved = mover(files, tmp_path).move()
    assert (len(moved.removed), moved.problems) == (1, [])
    verified = mover(files, tmp_path).verify()
    assert (verified.repaired, verified.damaged) == ([], [])
    store = simckpt.Store(files.path)
    for seq in (1, 3, 4):
        assert_restores(store.files, seq)
    again = simckpt.Store(tmp_path / "again")
    again.pull(place(tmp_path))
    for seq in (1, 3, 4):
        again.files.verify(RUN, seq)
        assert_restores(again.files, seq)


def test_of_many_writers_of_one_object_one_is_first(tmp_path, seaweed):
    objects = [Objects(parse_place(place(tmp_path)), PATIENT) for _ in range(6)]
    objects[0].check_exclusive()
    for number in range(5):
        barrier, made = threading.Barrier(len(objects)), []

        def create(each, who, number=number, barrier=barrier, made=made):
            barrier.wait(30)
            if each.create(f"race-{number}", b"%d" % who):
                made.append(who)

        threads = [threading.Thread(target=create, args=(each, who)) for who, each in enumerate(objects)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert objects[0].read(f"race-{number}") == b"%d" % made[0]


def test_a_server_that_is_killed_in_an_upload_and_started_again_loses_nothing(tmp_path, seaweed):
    files, log = filled(tmp_path / "store", 2)
    original = tmp_path / "original"
    shutil.copytree(files.path, original)
    quick = Archive(files, place(tmp_path), policy=KeepLast(1), patience=Patience(5.0, 0, 5.0))
    quick.move()
    with files.claim(RUN):
        add(files, log, 3)
    # a state of many parts, so that the kill comes while they are on their way
    big = tmp_path / "big"
    big.write_bytes(b"\x5a" * (96 << 20))
    objects = Objects(parse_place(place(tmp_path)), Patience(5.0, 0, 5.0))
    failed = []

    def upload() -> None:
        try:
            objects.put("big", big)
        except ArchiveUnavailableError as error:
            failed.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join(0.3)
    seaweed.kill()
    thread.join()
    with pytest.raises(ArchiveUnavailableError):
        quick.move()
    assert 3 in local_seqs(files)
    seaweed.start()
    if failed:
        assert objects.read("big") is None, "a part of an upload is never to be seen"
    assert mover(files, tmp_path).move().problems == []
    for seq in (1, 2, 3):
        assert_restores(simckpt.Store(files.path).files, seq)


def test_a_slow_server_is_waited_for_and_nothing_is_lost(tmp_path, seaweed, monkeypatch):
    with Slow(seaweed.endpoint, delay=0.2) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        files, _ = filled(tmp_path / "store", 2)
        assert archive(files, place(tmp_path), 1).move().problems == []
        assert_restores(simckpt.Store(files.path).files, 1)


class Slow(LocalServer):
    """Passes each request on to a server, after a while."""

    def __init__(self, target: str, *, delay: float) -> None:
        ending = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16

            def log_message(self, *arguments: object) -> None:
                pass

            def _any(self) -> None:
                ending.wait(delay)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = urllib.request.Request(target + self.path, data=body or None, method=self.command)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "content-length"):
                        request.add_header(name, value)
                try:
                    answer = urllib.request.urlopen(request, timeout=30)
                except urllib.error.HTTPError as error:
                    answer = error
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                size = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", size or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

        super().__init__(Handler, ending)
