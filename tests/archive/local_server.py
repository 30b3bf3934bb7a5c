"""A server on the loopback for the length of a block."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer:
    """Serves requests by a handler in threads of its own; what waits there ends with the event `_ending`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], ending: threading.Event) -> None:
        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self._ending = ending
        self._server = Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
