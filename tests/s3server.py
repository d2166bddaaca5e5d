"""A local S3 server, and a proxy before it that counts requests and can inject failures."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moto.server import ThreadedMotoServer

BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Slower, please.</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass
class Gate:
    """The settings and the request log of the proxy.

    Attributes:
        backend: host and port of the server.
        requests: method, path, Range and bytes of every answer.
        plan: what to do with a request, given its method, path and Range: None lets it through, a number is
            the status to answer with, "hang up" ends the connection, "half" sends half of the answer first.
        unsigned: the status for requests without credentials, or None.
    """

    backend: tuple[str, int]
    requests: list[tuple[str, str, str, int]] = field(default_factory=list)
    plan: Callable[[str, str, str], int | str | None] = lambda *_: None
    url: str = ""
    unsigned: int | None = None

    def fetched(self) -> int:
        """Return the bytes of files that were sent."""
        return sum(size for method, _, span, size in self.requests if method == "GET" and span)


def handler(gate: Gate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            span = self.headers.get("Range", "")
            what = gate.plan(self.command, self.path, span)
            if gate.unsigned and "Authorization" not in self.headers:
                what = gate.unsigned
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if what == "hang up":
                self.close_connection = True
                return
            status, headers, found = (
                (what, {}, DENIED if what == 403 else BUSY)
                if isinstance(what, int)
                else forward(gate.backend, self, body)
            )
            self.send_response(status)
            length = headers.get("Content-Length", str(len(found)))
            kept = ("Content-Type", "Content-Range", "ETag", "Last-Modified", "Accept-Ranges")
            for name, value in headers.items():
                if name.lower() in {k.lower() for k in kept}:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found[: len(found) // 2] if what == "half" else found)
            if what == "half":
                self.close_connection = True
            gate.requests.append((self.command, self.path, span, len(found)))

        do_GET = do_HEAD = do_PUT = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def forward(backend: tuple[str, int], request: BaseHTTPRequestHandler, body: bytes):
    connection = http.client.HTTPConnection(*backend, timeout=30)
    try:
        connection.request(request.command, request.path, body, dict(request.headers.items()))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@contextmanager
def moto() -> Iterator[tuple[str, int]]:
    """Start a server of moto; yield its host and port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()
    finally:
        server.stop()


@contextmanager
def gated(backend: tuple[str, int], unsigned: int | None = None) -> Iterator[Gate]:
    """Put a gate before a server."""
    gate = Gate(backend, unsigned=unsigned)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(gate))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    gate.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield gate
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
