"""Stores behind URLs, through fsspec: files that are listed, copied, read in ranges and written."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from ..errors import RunError, UsageError
from ..files import path_below
from ..messages import for_terminal, one_line, reason_of
from ..urls import VARIABLE, credentials_of, hide_credentials, keep_credentials, with_credentials
from .suffixes import files_beside

_TRIES = 3
_BACK_OFF_S = 1.0
_POLL_S = 0.05
#: Bytes of the largest file of a store that does not say how long it is, and of the longest page of a listing.
MOST_UNSTATED, _MOST_LISTING = 1 << 30, 1 << 26
#: Folders in one another, folders and files of a listing: a server makes up pages that link ever deeper.
_MOST_DEEP, _MOST_FOLDERS, _MOST_FILES = 50, 1 << 14, 1 << 20
#: Bytes a second below which a transfer counts as silent: one byte now and then keeps a connection open for ever.
_LEAST_SPEED = 1000
#: Ranges that are asked for at a time.
_RANGES_AT_ONCE = 64
#: Facts of stores about a file that change whenever it does.
_IDENTITY = (
    *("size", "ETag", "etag", "md5Hash", "Content-MD5", "Digest"),
    *("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created"),
)
#: Package that brings a protocol, where its name is not that of the protocol.
_PACKAGES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"},
    **{"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "sftp": "paramiko", "ssh": "paramiko", "oss": "ossfs"},
}


class _Alive(Protocol):
    """Function to call at each sign of life: with the bytes of a part of a transfer, or without."""

    def __call__(self, more: int | None = None, /) -> None: ...


class Found(NamedTuple):
    """A file of a remote store."""

    key: str
    """Path below the named folder, or the file's name."""
    path: str
    """Path in its file system."""
    facts: dict[str, Any]

    @property
    def said(self) -> dict[str, str]:
        """Facts that change whenever the file does."""
        return {key: str(self.facts[key]) for key in _IDENTITY if self.facts.get(key) is not None}


class Store:
    """File system of one URL, with three tries per request, each ended after ``timeout_s`` without a sign of life.

    Args:
        url: a file, or a folder of files.
        timeout_s: seconds without a sign of life after which a request is given up.
        field: field of a config that names the URL, for messages.
        patience: field that sets ``timeout_s``, if there is one.
        insists: print a line for each failure, silence too, and ask again until ``timeout_s`` have passed; each request
            has a third of that.

    Raises:
        UsageError: a protocol that is unknown, or whose package is missing.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        field: str = "data.path",
        patience: str = "data.timeout_s",
        *,
        insists: bool = False,
    ) -> None:
        import fsspec

        url = keep_credentials(url)
        self.url, self.timeout_s, self.field, self.patience, self.insists = url, timeout_s, field, patience, insists
        self._silence_s = timeout_s / _TRIES if insists else timeout_s
        # Only fsspec's asynchronous stores may be asked by several threads.
        self._turn = threading.Lock()
        self.protocol = url.partition("://")[0].lower()
        # HTTP's stand beside the address, which then names a file and its listing alike.
        address = url if self.protocol in ("http", "https") else with_credentials(url, credentials_of(url))
        try:
            self._fs, self._root = fsspec.core.url_to_fs(address, **self._options())
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(self.protocol)
            if package is None and isinstance(error, ValueError):
                raise UsageError(f"{self.field}: {url}: {self.protocol}:// is no protocol that fsspec knows") from None
            mend = f"pip install {package or self.protocol}"
            raise UsageError(f"{self.field}: {url}: {self.protocol}:// needs a package; {mend}") from None

    def _options(self) -> dict[str, Any]:
        if self.protocol not in ("http", "https"):
            return {}
        from fsspec.config import conf

        try:
            import aiohttp
        except ImportError:
            return {}  # fsspec says so
        # aiohttp would end every copy after five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._silence_s, sock_read=self._silence_s)
        watched = aiohttp.TraceConfig()
        watched.on_request_redirect.append(self._check_redirect)
        watched.on_request_start.append(_note_size)
        watched.on_request_end.append(_check_range)

        class Bounded(aiohttp.ClientResponse):
            """Answer that is read whole, as a listing is, up to a bound."""

            async def read(self) -> bytes:
                parts, n_bytes = [], 0
                while self._body is None and (part := await self.content.read(1 << 16)):
                    parts.append(part)
                    n_bytes += len(part)
                    if n_bytes > _MOST_LISTING:
                        raise _TooLong(f"lists more than {_MOST_LISTING:,} bytes")
                self._body = b"".join(parts) if self._body is None else self._body
                return await super().read()

        limits = {"timeout": timeout, "trace_configs": [watched], "response_class": Bounded}
        # Arguments of a call override fsspec's configuration.
        configured = conf.get("http", {}) | conf.get("https", {})
        client = configured.get("client_kwargs", {}) | limits
        options: dict[str, Any] = {"client_kwargs": client, "skip_instance_cache": True}
        credentials = credentials_of(self.url)
        if credentials.user:
            word = b64encode(unquote(credentials.user).encode()).decode()
            options["headers"] = configured.get("headers", {}) | {"Authorization": f"Basic {word}"}
        if credentials.query:
            options["params"] = credentials.query
        return options

    async def _check_redirect(self, session: Any, context: Any, asked: Any) -> None:
        """Refuse a redirect to another protocol, but for one from HTTP to HTTPS, or to this machine if the URL names
        another.
        """
        from yarl import URL

        location = asked.response.headers.get("Location", "")
        to = asked.url.join(URL(location))
        strange = to.scheme not in (asked.url.scheme, "https")
        if strange or (await _is_within(to.host) and not await _is_within(asked.url.host)):
            where = hide_credentials(one_line(location))
            raise _Strange(f"redirects to {where}, which is not followed; give the address of the file itself")

    def below(self, folder: Path, key: str, *, nested: bool = False) -> Path:
        """Return the path of a file of the store in a folder of this machine.

        Raises:
            UsageError: its name leads out of the folder.
        """

        def refusal(why: str) -> UsageError:
            return UsageError(f"{self.field}: {self.url}: what is there names {why}")

        return path_below(folder, key, refusal, nested=nested)

    def files(self) -> list[Found]:
        """List the file, with those beside it that describe it, or the files of the folder, that the URL names."""
        if not self.url.endswith("/"):
            facts = self._facts(self._root)
            if facts.get("type") != "directory":
                return [Found(name_of(self.url), self._root, facts), *self._beside()]
        by_pages = self.protocol in ("http", "https")
        found = self._asked(self.url, self._pages if by_pages else lambda _: self._fs.find(self._root, detail=True))
        root = self._root.rstrip("/") + "/"
        files = [Found(path.removeprefix(root), path, facts) for path, facts in sorted(found.items())]
        files = [file for file in files if _belongs(file.key)]
        if not files:
            raise UsageError(f"{self.field}: {self.url}: no files there; name a file, or a folder that has some")
        if by_pages:  # a page says nothing of its files
            files = [file._replace(facts=self._facts(file.path)) for file in files]
        return files

    def _pages(self, alive: _Alive) -> dict[str, Any]:
        """Find the files of a folder by the links of its pages."""
        root = self._root.rstrip("/") + "/"
        found: dict[str, Any] = {}
        # What cannot be read would be left out in silence.
        pages = self._fs.walk(self._root, detail=True, on_error=_unless_missing)
        for n_folders, (_, folders, files) in enumerate(pages, 1):
            alive()
            found |= {facts["name"]: facts for facts in files.values()}
            keys = {name: facts["name"].removeprefix(root).rstrip("/") for name, facts in folders.items()}
            for name in [name for name, key in keys.items() if not _belongs(key)]:
                del folders[name]  # so that it is not walked
            if any(keys[name].count("/") >= _MOST_DEEP for name in folders):
                raise _Strange(f"lists folders more than {_MOST_DEEP} deep; name one of them, or the files")
            if n_folders > _MOST_FOLDERS or len(found) > _MOST_FILES:
                most = f"{_MOST_FOLDERS:,} folders or {_MOST_FILES:,} files"
                raise _Strange(f"lists more than {most}; name a folder in it, or the files")
        return found

    def _beside(self) -> Iterator[Found]:
        """Find the files that describe the tokens of the one that the URL names."""
        suffix = PurePosixPath(name_of(self.url)).suffix
        for other in files_beside(suffix):
            path = self._root.removesuffix(suffix) + other
            try:
                yield Found(name_of(path), path, self._facts(path))
            except UsageError:
                continue  # nanoGPT's and llm.c's files stand alone, and datatrove writes metadata for some

    def _facts(self, path: str) -> dict[str, Any]:
        return dict(self._asked(path, lambda _: self._fs.info(path)))

    def copy(self, found: Found, to: Path) -> None:
        """Copy a file.

        Raises:
            UsageError: the file is gone, or forbidden.
            RunError: the download hangs, or the file cannot be read.
        """
        promised, n_bytes = found.facts.get("size"), 0
        most = promised if promised is not None else MOST_UNSTATED

        def attempt(alive: _Alive) -> None:
            nonlocal n_bytes
            n_bytes = 0

            def heard(more: int) -> None:
                nonlocal n_bytes
                alive(more)
                n_bytes += more
                if n_bytes > most:
                    raise _TooLong(f"sends more than {'the ' if promised is not None else ''}{most:,} bytes")

            self._fs.get_file(found.path, str(to), callback=_progress(heard))
            size = to.stat().st_size
            if promised is not None and size != promised:
                raise OSError(f"{size} bytes came, {promised} were promised")

        self._asked(found.path, attempt)

    def ranges(self, parts: Sequence[tuple[str, int, int, int]]) -> list[bytes]:
        """Read ranges of files, several at a time.

        Args:
            parts: path in the file system, first byte, one past the last, above the first, bytes of the whole file.

        Raises:
            UsageError: a file is gone, forbidden, or of another size; or the store reads no ranges.
            RunError: the store does not answer, or fails.
        """
        found: dict[int, bytes] = {}
        # For `_note_size`, of each request.
        sizes = {unquote(urlsplit(path).path): n_bytes for path, _, _, n_bytes in parts}
        more = {"trace_request_ctx": sizes} if self.protocol in ("http", "https") else {}

        def attempt(alive: _Alive) -> None:
            # What came before a failure is not asked for again.
            left = [number for number in range(len(parts)) if number not in found]
            for first in range(0, len(left), _RANGES_AT_ONCE):
                some = left[first : first + _RANGES_AT_ONCE]
                with contextlib.nullcontext() if self._fs.async_impl else self._turn:
                    columns = [list(column) for column in zip(*(parts[number][:3] for number in some), strict=True)]
                    answers = self._fs.cat_ranges(*columns, on_error="return", **more)
                alive()
                failure: BaseException | None = None
                for number, answer in zip(some, answers, strict=True):
                    path, start, end, _ = parts[number]
                    if isinstance(answer, BaseException):
                        failure = answer
                    elif len(answer) > end - start:
                        raise _Strange(_NO_RANGES)
                    elif len(answer) < end - start:
                        failure = OSError(f"{len(answer)} bytes came of {path}, {end - start} were asked for")
                    else:
                        found[number] = bytes(answer)
                if failure is not None:
                    raise _Strange(_NO_RANGES) if isinstance(failure, _TooLong) else failure

        if parts:
            self._asked(parts[0][0], attempt)
        return [found[number] for number in range(len(parts))]

    # ── a folder that is written to ──────────────────────────────────────────────────────────────────────────────

    def listed(self) -> dict[str, Found]:
        """List all files below the URL by key, as the store has them now; none if there is no such folder.

        Raises:
            UsageError: it is forbidden, or there is no such bucket.
            RunError: the store does not answer, or fails.
        """

        def find(_: _Alive) -> dict[str, Any]:
            self._fs.invalidate_cache()
            # Some stores answer the listing of a folder that does not exist with an error, others with nothing.
            return dict(self._fs.find(self._root, detail=True)) if self._fs.exists(self._root) else {}

        root = self._root.rstrip("/") + "/"
        found = self._asked(self.url, find)
        return {path.removeprefix(root): Found(path.removeprefix(root), path, facts) for path, facts in found.items()}

    def put(self, key: str, content: Path | bytes) -> None:
        """Write a file below the URL, whole; the store must then say the size that was sent.

        Raises:
            UsageError: it is forbidden, or there is no such bucket.
            RunError: the store does not answer, fails, or says another size.
        """
        path = f"{self._root.rstrip('/')}/{key}"

        def attempt(alive: _Alive) -> None:
            if not self._fs.async_impl:  # a store of objects has no folders, and some would make a bucket
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            if isinstance(content, Path):
                self._fs.put_file(str(content), path, callback=_progress(alive))
            else:
                self._fs.pipe_file(path, content)
            self._fs.invalidate_cache(self._fs._parent(path))
            sent, said = content.stat().st_size if isinstance(content, Path) else len(content), self._fs.info(path)
            if said.get("size") not in (None, sent):
                raise OSError(f"{sent} bytes were sent, and the store says {said['size']}")

        self._asked(path, attempt, "written")

    def read(self, key: str) -> bytes | None:
        """Read a small file below the URL; None if there is none."""
        path = f"{self._root.rstrip('/')}/{key}"

        def attempt(_: _Alive) -> bytes | None:
            self._fs.invalidate_cache(self._fs._parent(path))
            return self._fs.cat_file(path) if self._fs.exists(path) else None

        found: bytes | None = self._asked(path, attempt)
        return found

    def remove(self, key: str) -> None:
        """Delete a file below the URL, if it is there."""
        path = f"{self._root.rstrip('/')}/{key}"

        def attempt(_: _Alive) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        self._asked(path, attempt, "deleted")

    def _asked(self, path: str, work: Callable[[_Alive], Any], verb: str = "read") -> Any:
        """Return the result of ``work``, which gets a function to call at each sign of life; retry on failure."""
        name = path if "://" in path else f"{self.protocol}://{path.lstrip('/')}"
        tries, began = 0, time.monotonic()
        while True:
            try:
                return self._within(work)
            except Exception as error:  # every store has its own
                tries, waited_s = tries + 1, time.monotonic() - began
                reason = _reason(error)
                hangs = isinstance(error, _Hangs) or reason == "hangs"
                if reason and not hangs:
                    raise UsageError(f"{self.field}: {name}: {reason}") from None
                slow = isinstance(error, _Hangs) and error.n_bytes
                what = f"less than {_LEAST_SPEED / 1000:g} kB a second" if slow else "no answer"
                silent = f"{what} for {waited_s if self.insists else self.timeout_s:.3g} s"
                said = silent if hangs else self._said(error)
                gives_up = waited_s >= self.timeout_s if self.insists else hangs or tries == _TRIES
                if gives_up and hangs:
                    mend = f", or raise {self.patience}" if self.patience else ""
                    raise RunError(f"{self.field}: {name}: {silent}; check the network{mend}") from None
                if gives_up:
                    raise RunError(f"{self.field}: {name}: cannot be {verb} after {tries} tries ({said})") from None
                if self.insists:
                    print(for_terminal(f"{self.field}: {name}: {said}; asking again"), file=sys.stderr)
            time.sleep(_BACK_OFF_S * 2 ** min(tries - 1, 3))

    def _said(self, error: Exception) -> str:
        said = hide_credentials(reason_of(error))
        if user := credentials_of(self.url).user:
            # A library that does not know users in URLs takes one for a part of a name.
            said = said.replace(f"{user}@", "").replace(f"{unquote(user)}@", "")
        return said

    def _within(self, work: Callable[[_Alive], Any]) -> Any:
        # A read that hangs cannot be ended from outside; its thread is left behind.
        result: dict[str, Any] = {}
        last, n_bytes = time.monotonic(), 0

        def alive(more: int | None = None) -> None:
            nonlocal last, n_bytes
            n_bytes, now = n_bytes + (more or 0), time.monotonic()
            if more is None or n_bytes > _LEAST_SPEED * (now - last):
                last, n_bytes = now, 0

        def run() -> None:
            try:
                result["value"] = work(alive)
            except BaseException as error:
                result["error"] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
            if thread.is_alive() and time.monotonic() - last > self._silence_s + 2 * _POLL_S:
                raise _Hangs(n_bytes)
        if "error" in result:
            raise result["error"]
        return result["value"]


def _progress(heard: Callable[[int], None]) -> Any:
    """Return fsspec's callback for a transfer that calls ``heard`` with the bytes of each part of it."""
    from fsspec.callbacks import Callback

    class Progress(Callback):
        def relative_update(self, inc: int = 1) -> None:
            heard(inc)

    return Progress()


class _Hangs(Exception):  # noqa: N818 - says what it is
    """Error for a store that gives no sign of life, or ``n_bytes`` too slowly."""

    def __init__(self, n_bytes: int = 0) -> None:
        super().__init__()
        self.n_bytes = n_bytes


class _Strange(Exception):  # noqa: N818 - says what it is
    """Error for an answer that is refused, in the words of the message; another try is useless."""


class _TooLong(_Strange):
    """Error for a server that sends more than it promised, or without an end."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}, and did not say so before; download it by another way")


_NO_RANGES = "its server answers a range with the whole file; leave out data.cache_gb, which reads ranges"


async def _note_size(session: Any, context: Any, asked: Any) -> None:
    context.n_bytes = (context.trace_request_ctx or {}).get(asked.url.path)


async def _check_range(session: Any, context: Any, asked: Any) -> None:
    """Refuse an answer that is another range than the one asked for, or of a file of another size."""
    wanted, said = asked.headers.get("Range"), asked.response.headers.get("Content-Range")
    if wanted is None or said is None or asked.response.status != 206:
        return
    span, _, total = said.lower().removeprefix("bytes").strip().partition("/")
    if span != wanted.removeprefix("bytes="):
        what = f"the range {one_line(span, 60)} where {wanted.removeprefix('bytes=')} was asked for"
        raise _Strange(f"its server answers {what}; leave out data.cache_gb, which reads ranges")
    if context.n_bytes is not None and total not in ("*", str(context.n_bytes)):
        raise _Strange(f"has {one_line(total, 60)} bytes by now, and had {context.n_bytes}; start again")


def _belongs(key: str) -> bool:
    """Return True if an entry of a listing is part of it: links that lead elsewhere, and hidden files, are not."""
    return "://" not in key and "?" not in key and not any(part.startswith(".") for part in key.split("/"))


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


async def _is_within(host: str | None) -> bool:
    """Return True if a host is this machine, or on its local link, where clouds answer with credentials."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host or "", None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # it cannot be reached either
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return any(one.is_loopback or one.is_link_local or one.is_unspecified for one in plain)


def name_of(url: str) -> str:
    """Return the last part of a URL's path."""
    return unquote(PurePosixPath(urlsplit(url).path).name)


def _reason(error: BaseException) -> str:
    """Say why another try is useless; "" if it may help."""
    seen: list[BaseException] = [error]
    while (before := seen[-1].__cause__ or seen[-1].__context__) is not None and before not in seen:
        seen.append(before)
    if (strange := next((one for one in seen if isinstance(one, _Strange)), None)) is not None:
        return str(strange)
    if any(isinstance(one, TimeoutError) for one in seen):
        return "hangs"
    codes = (getattr(one, "status", None) for one in seen)
    status = next((code for code in codes if isinstance(code, int)), None)
    if status in (401, 403) or any(isinstance(one, PermissionError) for one in seen):
        where = f", which {VARIABLE} gives too" if status == 401 else ""
        return f"is forbidden{f' ({status})' if status else ''}; check the address and your credentials{where}"
    if any("Credential" in type(one).__name__ for one in seen):
        return "needs credentials; set them up as its package asks"
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError) and len(seen) == 1):
        return "is not there; check the address"
    return ""
