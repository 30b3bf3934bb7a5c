"""A small S3 server of our own in this process, which does wrong what it is told to, at the request that it is told.

It knows what the archive needs: whole and multipart uploads, `If-None-Match: *`, ranges, listings, removal. Signatures
are not checked. Nothing of the code under test is used.
"""

import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from local_server import LocalServer

BUCKET = "bucket"

# what may happen to a request: before anything is done, or after it was done and before it is answered
FAULTS = ("500", "503", "403", "drop before", "drop after", "500 after", "hang before", "hang after", "flip")


class FakeS3(LocalServer):
    """The server; a context manager.

    Attributes:
        objects: {key: bytes}.
        requests: (method, key or query) of all that came, in order.
        fault: (request number from 1, name of the request) -> one of FAULTS, or None.
        hook: called with the request's number before it is done (True) and after (False); true if that is not to be.
        exclusive: whether `If-None-Match: *` is heeded.
        delay: before each answer [s].
        hang: how long a request hangs [s].
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[int, str], str | None] = lambda number, name: None
        self.hook: Callable[[int, bool], object] = lambda number, before: None
        self.exclusive = True
        self.delay = 0.0
        self.hang = 3.0
        self._lock = threading.Lock()
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._ending = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # an answer in one piece: two small ones would wait for each other's acknowledgement
            disable_nagle_algorithm = True

            def log_message(self, *arguments: object) -> None:
                pass

            def _any(self) -> None:
                fake._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

        super().__init__(Handler, self._ending)

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-must-not-be-told",
            "AWS_REGION": "us-east-1",
        }

    def reset(self) -> None:
        """Forgets all requests, faults and hooks; the objects stay."""
        self.requests = []
        self.fault = lambda number, name: None
        self.hook = lambda number, before: None

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        parts = urlsplit(request.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        with self._lock:
            # the removal of one or more objects is a POST
            gone = _keys(body) if "delete" in query else []
            self.requests.append(("DELETE", " ".join(gone)) if gone else (request.command, key or parts.query))
            number = len(self.requests)
        fault = self.fault(number, f"{request.command} {key or parts.query}")
        if self.hook(number, True):
            return self._leave(request, hang=False)
        if self.delay:
            self._ending.wait(self.delay)
        if fault in ("500", "503", "403"):
            return self._answer(request, int(fault), b"<Error><Code>Injected</Code></Error>")
        if fault in ("drop before", "hang before"):
            return self._leave(request, hang=fault == "hang before")
        if fault == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        with self._lock:
            status, content, headers = self._do(request, key, query, body)
        self.hook(number, False)
        if fault in ("drop after", "hang after"):
            return self._leave(request, hang=fault == "hang after")
        if fault == "500 after":
            return self._answer(request, 500, b"<Error><Code>InternalError</Code></Error>")
        self._answer(request, status, content, headers)
        return None

    def _leave(self, request: BaseHTTPRequestHandler, *, hang: bool) -> None:
        if hang:
            self._ending.wait(self.hang)
        request.close_connection = True

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        size = (headers or {}).get("Content-Length")
        if size is None:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _do(
        self, request: BaseHTTPRequestHandler, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        method = request.command
        if method == "GET" and "list-type" in query:
            return self._listing(query)
        if method == "POST" and "delete" in query:
            names = _keys(body)
            for name in names:
                self.objects.pop(name, None)
            told = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return 200, f"<DeleteResult>{told}</DeleteResult>".encode(), {}
        if method == "POST" and "uploads" in query:
            identity = uuid.uuid4().hex
            self._uploads[identity] = {}
            return 200, f"<R><UploadId>{identity}</UploadId></R>".encode(), {}
        if method == "PUT" and "partNumber" in query:
            self._uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": '"part"'}
        if method == "POST" and "uploadId" in query:
            found = self._uploads.pop(query["uploadId"][0], None)
            if found is None:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            self.objects[key] = b"".join(found[number] for number in sorted(found))
            return 200, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>', {}
        if method == "DELETE" and "uploadId" in query:
            self._uploads.pop(query["uploadId"][0], None)
            return 204, b"", {}
        if method == "PUT":
            if self.exclusive and request.headers.get("If-None-Match") == "*" and key in self.objects:
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            self.objects[key] = body
            return 200, b"", {"ETag": '"x"'}
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, b"", {}
        if key not in self.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        data = self.objects[key]
        common = {"ETag": '"x"', "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())}
        if method == "HEAD":
            return 200, b"", {**common, "Content-Length": str(len(data))}
        span = request.headers.get("Range")
        if span:
            start, _, end = span.removeprefix("bytes=").partition("-")
            part = data[int(start) : int(end) + 1]
            return 206, part, {**common, "Content-Range": f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"}
        return 200, data, common

    def _listing(self, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        found = [key for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        page, more = found[:100], len(found) > 100
        lines = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2027-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key in page
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(lines)}"
        return 200, f"<ListBucketResult>{text}</ListBucketResult>".encode(), {"Content-Type": "application/xml"}


def _keys(body: bytes) -> list[str]:
    return [part.partition("</Key>")[0] for part in body.decode().split("<Key>")[1:]]
