"""Live page of runs in progress, served on this machine only; it follows the runs and keeps the reader's view."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import RunError, UsageError
from ..measure.records import RunDir
from ..messages import one_line
from .run_page import build_report

HOST = "127.0.0.1"
#: Default port, and number of further ports that are tried.
PORT, _PORTS = 8420, 20
#: New lines of the log alone draw the page again after so many times the seconds that drawing takes: it shares the
#: machine with the training. A new snapshot draws it at once.
_PATIENCE = 20
#: Seconds that a request may take to arrive: one that never ends would hold its thread.
_REQUEST_S = 10.0
#: Seconds between two looks of a page, in `_FOLLOW`.
LOOKS_S = 2

# Asks whether there is a newer page, and loads it where it is looked at. A reload keeps the fragment of the address,
# which holds the view, and the place on the page.
_FOLLOW = """(() => {
  const drawn = document.currentScript.dataset.version;
  const note = document.createElement("p");
  note.id = "follow";
  note.setAttribute("role", "status");
  note.style.cssText = "position:fixed;right:12px;bottom:8px;margin:0;padding:2px 8px;border-radius:4px;" +
    "font:12px system-ui,sans-serif;color:#fff;background:#333c;z-index:99";
  note.textContent = "live, drawn " + new Date().toLocaleTimeString();
  document.body.append(note);
  const drawnAt = note.textContent;
  setInterval(async () => {
    try {
      const state = await (await fetch("/state", {cache: "no-store"})).json();
      note.textContent = state.problem || drawnAt;
      if (state.version !== drawn && !document.hidden) location.reload();
    } catch {
      note.textContent = "not live: birthmark report --watch has ended";
    }
  }, %d);
})();
""" % (LOOKS_S * 1000)  # noqa: UP031, braces are the script's


class LivePage:
    """Page of runs in their present state; drawn on request.

    Args:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[RunDir]) -> None:
        self.runs = runs
        self._lock = threading.Lock()
        self._seen: tuple[str, str] = ("", "")
        self._drawn_at = self._took = 0.0
        self.html, self.version, self.problem = "", "", ""
        self.tables: dict[str, bytes] = {}
        """The numbers of its pictures by the names that it links to."""

    def draw(self) -> None:
        """Draw the page; RunError names a damaged file of a run."""
        self._draw(self._look())

    def refresh(self) -> None:
        """Draw the page again if there is news. If a file is unreadable, the page is dropped, and ``problem``
        says why.
        """
        with self._lock:
            try:
                found = self._look()
                due = time.monotonic() > self._drawn_at + _PATIENCE * self._took
                if found[0] != self._seen[0] or (found[1] != self._seen[1] and due):
                    self._draw(found)
                self.problem = ""
            except (RunError, UsageError, OSError) as error:
                self.problem = f"not up to date: {one_line(error)}"

    def _look(self) -> tuple[str, str]:
        """Return digests of the snapshots, and of the progress of the logs; UsageError if a run is gone."""
        for run in self.runs:
            RunDir.open_measured(run.path)
        snapshots = [folder for run in self.runs for folder in run.snapshot_folders()]
        return _digest(snapshots), _digest([run.metrics for run in self.runs])

    def _draw(self, found: tuple[str, str]) -> None:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.html"
            build_report(self.runs, out)
            page = out.read_text(encoding="utf-8")
            self.tables = {file.relative_to(folder).as_posix(): file.read_bytes() for file in out.parent.rglob("*.csv")}
        # Changes during the drawing count as news again.
        self._seen, self.version = found, "-".join(found)
        self._drawn_at = time.monotonic()
        self._took = self._drawn_at - start
        self.html = _with_script(page, self.version)


def _digest(paths: Sequence[Path]) -> str:
    """Hash the paths that exist, and their times and sizes."""
    found = [(str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in paths if path.exists()]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _with_script(page: str, version: str) -> str:
    """Add the follower script to the page, and allow it in the page's security policy."""

    def allow(found: re.Match[str]) -> str:
        parts = (part.strip().partition(" ") for part in found[2].split(";"))
        sources = {name: rest for name, _, rest in parts if name}
        for name in ("script-src", "connect-src"):
            sources[name] = " ".join([*(s for s in sources.get(name, "").split() if s != "'none'"), "'self'"])
        return found[1] + "; ".join(f"{name} {rest}".strip() for name, rest in sources.items())

    page = re.sub(r'(http-equiv="Content-Security-Policy" content=")([^"]*)', allow, page, count=1)
    head, end, rest = page.rpartition("</body>")
    return f'{head}<script src="/follow.js" data-version="{version}"></script>\n{end}{rest}'


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET requests for the page, its numbers, its script and its state, and nothing else."""

    server: LiveServer
    server_version, sys_version = "birthmark", ""
    timeout = _REQUEST_S  # of each read

    def setup(self) -> None:
        """Set a limit for the whole request: each dripping byte would restart a limit per read."""
        super().setup()
        self._limit = threading.Timer(_REQUEST_S, self._cut_off)
        self._limit.daemon = True
        self._limit.start()

    def _cut_off(self) -> None:
        with suppress(OSError):  # it is over
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        """Answer a request."""
        self._limit.cancel()
        # A page of the web whose name leads to this machine must not read it.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].partition(":")[0] not in (HOST, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"open http://{HOST}:{self.server.server_port}/\n")
        page, path = self.server.page, self.path.partition("?")[0]
        if path == "/":
            page.refresh()
            return self._answer(HTTPStatus.OK, "text/html", page.html)
        if path == "/state":
            page.refresh()
            state = json.dumps({"version": page.version, "problem": page.problem})
            return self._answer(HTTPStatus.OK, "application/json", state)
        if path == "/follow.js":
            return self._answer(HTTPStatus.OK, "text/javascript", _FOLLOW)
        if (table := page.tables.get(path[1:])) is not None:
            return self._answer(HTTPStatus.OK, "text/csv", table)
        return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is the page alone: /\n")

    def _answer(self, status: HTTPStatus, kind: str, content: str | bytes) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def finish(self) -> None:
        """End the request and its limit."""
        self._limit.cancel()
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests are not news."""


class LiveServer(ThreadingHTTPServer):
    """Server of a page on this machine.

    Args:
        page: the page.
        port: port; None takes `PORT`, or the next one that is free.

    Raises:
        UsageError: the port is in use, or may not be used.
    """

    daemon_threads = True
    # Another server on the port is not pushed aside.
    allow_reuse_port = False

    def __init__(self, page: LivePage, port: int | None) -> None:
        self.page = page
        tried = [port] if port is not None else range(PORT, PORT + _PORTS)
        for number in tried:
            try:
                super().__init__((HOST, number), _Handler)
                return
            except OSError as error:
                reason = error.strerror or str(error)
        if port is not None:
            raise UsageError(f"--port {port}: {reason}; give another, or leave it out for one that is free")
        raise UsageError(f"no free port from {PORT} to {PORT + _PORTS - 1}: give one with --port")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that leaves before it has its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
