"""A web server of others in a process of its own: listings, redirects, bodies and lengths that none should send."""

from __future__ import annotations

import ctypes
import gzip
import os
import signal
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

#: Names of files in a listing, by the way in which they are strange; ``{watched}`` is a folder that no command may
#: write into.
LISTINGS: dict[str, tuple[str, ...]] = {
    "good": ("a.txt", "b.txt"),
    "absolute": ("/absolute/{watched}/planted.txt", "a.txt"),
    "dots": ("../watched/planted.txt", "../../watched/planted.txt", "a/../../../watched/planted.txt", "a.txt"),
    "quoted": ("%2e%2e/%2e%2e/watched/planted.txt", "..%2f..%2fwatched%2fplanted.txt", "a.txt"),
    "slashes": ("/slashes//{watched}/planted.txt", "//{watched}/planted.txt", "a.txt"),
    "back slashes": ("..\\..\\watched\\planted.txt", "C:\\planted.txt", "a.txt"),
    "strange": ("a%00b.txt", "a%0ab.txt", "%f0%9f%98%80.txt", "x" * 400 + ".txt"),
    "elsewhere": ("http://127.0.0.1:1/a.txt", "file:///etc/passwd", "//127.0.0.1:1/a.txt", "a.txt"),
    "nothing": (),
    "scripts": ("a.py", "config.yaml", ".hidden", "a.txt"),
}
#: What a file or its head says, by the way in which it is strange.
ANSWERS = (
    "to a file", "to ftp", "in a circle", "endless", "endless listing", "too short", "too long", "no number", "bomb",
    "forbidden", "broken", "nothing at all",
)  # fmt: skip
_TEXT = b"the seed of a model leaves its mark on every head\n" * 60


class _Others(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    watched: ClassVar[str] = ""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        way, _, rest = self.path.lstrip("/").partition("/")
        way = way.replace("%20", " ").replace("_", " ")
        if way in LISTINGS or (way == "endless listing" and not rest):
            self._listing(way, body) if not rest else self._send(_TEXT, body)
        elif not rest and way not in ("forbidden", "broken", "nothing at all"):
            self._send(b'<a href="a.txt">a</a>', body, "text/html")
        else:
            self._strange(way, body)

    def _listing(self, way: str, body: bool) -> None:
        if way == "endless listing":
            self._stream((b'<a href="%d.txt">a</a>\n' % i for i in range(1 << 62)), body)
            return
        names = (name.format(watched=self.watched) for name in LISTINGS[way])
        self._send("".join(f'<a href="{name}">x</a>\n' for name in names).encode(), body, "text/html")

    def _strange(self, way: str, body: bool) -> None:
        moved = {"to a file": "file:///etc/passwd", "to ftp": "ftp://127.0.0.1/a.txt", "in a circle": self.path}
        if way in moved:
            self.send_response(302)
            self.send_header("Location", moved[way])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif way == "endless":
            self._stream(iter(lambda: _TEXT, b""), body)
        elif way == "bomb":
            self._send(gzip.compress(bytes(1 << 28)), body, coding="gzip")
        elif way in ("too short", "too long", "no number"):
            said = {"too short": str(len(_TEXT) + 100), "too long": str(len(_TEXT) - 100), "no number": "-7x"}[way]
            self._send(_TEXT, body, length=said)
            self.close_connection = True
        elif way in ("forbidden", "broken"):
            self.send_error(403 if way == "forbidden" else 500)
        else:
            self.close_connection = True

    def _send(self, content: bytes, body: bool, kind: str = "text/plain", coding: str = "", length: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", length or str(len(content)))
        if coding:
            self.send_header("Content-Encoding", coding)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _stream(self, parts: Iterator[bytes], body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if body:
            for part in parts:
                self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hear enough hang up."""


def serve(watched: Path) -> tuple[int, int]:
    """Start the server in a process that ends with this one; returns its process and its port."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    port = int(listening.getsockname()[1])
    if child := os.fork():
        listening.close()
        return child, port
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        _Others.watched = str(watched)
        server = _Server(("127.0.0.1", port), _Others, bind_and_activate=False)
        server.socket = listening
        server.serve_forever()
    finally:
        os._exit(0)
