"""Corpora elsewhere: fsspec's memory, and a server on this machine that hangs, forbids and fails."""

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from base64 import b64encode
from collections import Counter
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest
from yarl import URL

from birthmark.data import remote
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.fetching import fetched, localised
from birthmark.data.prepare import prepare
from birthmark.data.probes import passage_probe
from birthmark.errors import RunError, UsageError
from birthmark.urls import VARIABLE

SEQ_LEN, VOCAB = 8, 320


TEXT = " ".join(f"λ{n * n % 997}" for n in range(900))


def megatron(path, lengths):
    """Documents of these lengths, of uint16; see tests/data/test_token_files.py for the layout."""
    tokens = [i % 300 for i in range(sum(lengths))]
    starts = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    n = len(lengths)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, n + 1)
    rest = struct.pack(f"<{n}i", *lengths) + struct.pack(f"<{n}q", *starts) + struct.pack(f"<{n + 1}q", *range(n + 1))
    path.with_suffix(".idx").write_bytes(header + rest)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "_BACK_OFF_S", 0.01)


@pytest.fixture
def memory():
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


@pytest.fixture
def config(tmp_path):
    return DataConfig(cache_dir=str(tmp_path / "cache"), val_fraction=0.2, n_workers=1, timeout_s=5)


def upload(folder, memory, to):
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{to}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def copies(config):
    found = Path(config.cache_dir).glob("remote-*/*")
    return {path: path.stat().st_mtime_ns for path in found if path.name != "meta.json"}


def test_a_folder_is_what_it_is_here(config, folder, memory):
    upload(folder, memory, "/bucket/corpus")
    here = open_corpus(replace(config, path=str(folder)))
    there = replace(config, path="memory://bucket/corpus")
    corpus = open_corpus(localised(there))
    assert list(corpus.documents()) == list(here.documents())
    assert corpus.content_hash() == here.content_hash()
    before = copies(config)
    assert len(before) == 40
    localised(there)
    assert copies(config) == before
    # Another content there is another copy here.
    memory.pipe_file("/bucket/corpus/part0/file00.txt", b"changed")
    assert open_corpus(localised(there)).content_hash() != here.content_hash()
    assert len(copies(config)) == 41


def test_tables_tokenizers_and_tokens(config, tokenizer, tmp_path, memory):
    rows = "".join(json.dumps({"text": f"{i} {TEXT[: 9 * i]}"}) + "\n" for i in range(40))
    memory.pipe_file("/b/rows.jsonl", rows.encode())
    memory.pipe_file("/b/t.json", tokenizer.content)
    (tmp_path / "tokens").mkdir()
    megatron(tmp_path / "tokens" / "a.bin", [5, 20, 7, 30, 11, 16, 8] * 5)
    upload(tmp_path / "tokens", memory, "/b/tokens")
    sources = [SourceConfig("memory://b/rows.jsonl", 1.0), SourceConfig("memory://b/tokens/a.bin", 1.0)]
    asked = replace(config, sources=sources, tokenizer="memory://b/t.json")
    data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert list(data.train.sources) == ["rows", "a"]
    here = prepare(replace(config, path=str(tmp_path / "tokens" / "a.bin")), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert data.train.sources["a"].batch(0, 9).tolist() == here.train.batch(0, 9).tolist()
    assert data.record["sources"]["a"]["content_hash"] == here.record["content_hash"]
    assert data.record["path"] == ["memory://b/rows.jsonl", "memory://b/tokens/a.bin"]
    assert data.record["tokenizer"] == "memory://b/t.json"


def test_a_probe_reads_remote_text(tokenizer, memory, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    memory.pipe_file("/b/a.txt", TEXT.encode())
    found = passage_probe("memory://b/a.txt", tokenizer, 3, 16, VOCAB)
    assert found.shape == (3, 16)


CONTENT = TEXT.encode()


@pytest.fixture
def asked():
    """Number of requests to the server by path, HEAD among them."""
    return Counter()


@pytest.fixture
def server(serve, asked):
    """A server whose files fail as their names say."""

    def halves(path):
        if path == "/trickles.txt":
            yield from (b"a" for _ in range(100) if not serve.closing.wait(0.05))
        yield CONTENT[: len(CONTENT) // 2]
        if path == "/stalls.txt":
            serve.closing.wait(20)
        if path != "/cut.txt":
            yield CONTENT[len(CONTENT) // 2 :]

    def answer(path, headers):
        asked[path] += 1
        if path.startswith("/endless"):
            return 200, {"Content-Type": "text/html"}, repeat(b'<a href="a.txt">a</a>' * 1000)
        if path == "/hangs.txt":
            serve.closing.wait(20)
        status = {"/forbidden.txt": 403, "/missing.txt": 404, "/broken.txt": 500}.get(path, 200)
        if status != 200:
            return status, {}, b""
        return 200, {"Content-Length": str(len(CONTENT))}, halves(path)

    return serve(answer)


def test_over_http(config, server, asked):
    found = fetched(f"{server}/good.txt", config)
    assert (found.read_bytes(), found.name) == (CONTENT, "good.txt")
    before = asked["/good.txt"]
    assert fetched(f"{server}/good.txt", config) == found
    assert asked["/good.txt"] - before <= 1  # whether it has changed


def test_a_server_that_fails_twice(config, serve):
    tried = []

    def answer(path, headers):
        tried.append(path)
        return (503, {}, b"") if len(tried) in (2, 3) else (200, {}, CONTENT)

    assert fetched(f"{serve(answer)}/twice.txt", config).read_bytes() == CONTENT
    assert len(tried) == 4


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("forbidden.txt", UsageError, r"forbidden\.txt: is forbidden \(403\); check the address and your credentials$"),
        ("missing.txt", UsageError, r"missing\.txt: is not there; check the address$"),
        ("broken.txt", RunError, r"broken\.txt: cannot be read after 3 tries \("),
        ("cut.txt", RunError, r"cut\.txt: cannot be read after 3 tries \("),
        ("hangs.txt", RunError, r"hangs\.txt: no answer for 0\.3 s; check the network, or raise data\.timeout_s$"),
        ("stalls.txt", RunError, r"stalls\.txt: no answer for 0\.3 s; check the network, or raise data\.timeout_s$"),
        ("trickles.txt", RunError, r"less than 1 kB a second for 0\.3 s; check the network, or raise data\.timeout_s$"),
    ],
)
def test_a_server_that_does_not_give(name, kind, message, config, server):
    start = time.monotonic()
    with pytest.raises(kind, match=rf"^data\.path: http://.*{message}") as error:
        fetched(f"{server}/{name}", replace(config, timeout_s=0.3))
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 10
    # Nothing half copied.
    assert copies(config) == {}


def test_a_slow_server_is_waited_for(config, serve):
    """Pages, and a file, that take longer than ``timeout_s`` together."""
    pages = {"/dir": listing("a/"), "/dir/a": listing("b/"), "/dir/a/b": listing("c.txt")}

    def parts():
        yield from (b"x" * 1000 for _ in range(4) if not serve.closing.wait(0.15))

    def answer(path, headers):
        if page := pages.get(path.rstrip("/")):
            time.sleep(0.15)
            return page
        return 200, {"Content-Length": "4000"}, parts()

    folder = fetched(f"{serve(answer)}/dir/", replace(config, timeout_s=0.4))
    assert (folder / "a/b/c.txt").read_bytes() == b"x" * 4000


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/a.txt", r"s3:// needs a package; pip install s3fs$"),
        ("gs://bucket/a.txt", r"gs:// needs a package; pip install gcsfs$"),
        ("nonsense://bucket/a.txt", r"nonsense:// is no protocol that fsspec knows$"),
        ("memory://nothing/there.txt", r"there\.txt: is not there; check the address$"),
    ],
)
def test_what_cannot_be_asked(url, message, config, memory):
    with pytest.raises(UsageError, match=rf"^data\.path: .*{message}") as error:
        prepare(replace(config, path=url), vocab_size=300, seq_len=8)
    assert "\n" not in str(error.value)


# ── servers that lead elsewhere ──────────────────────────────────────────────────────────────────────────────────────


def listing(*names):
    """A server's page of files."""
    return 200, {"Content-Type": "text/html"}, "".join(f'<a href="{name}">x</a>' for name in names).encode()


@pytest.mark.parametrize(
    ("link", "refused"),
    [
        ("/dir/{planted}", True),
        ("C:/evil.txt", True),
        ("a\\..\\evil.txt", True),
        ("a//b.txt", True),
        (f"{'x' * 300}.txt", True),
        ("a\x7f.txt", True),
        # These are no part of the folder, as hidden files are not.
        ("{planted}", False),
        ("/dir/../../../../../..{planted}", False),
        ("a/../../../../../../../..{planted}", False),
        ("..\\..\\evil.txt", False),
    ],
)
def test_a_listing_plants_nothing(config, serve, tmp_path, link, refused):
    planted = tmp_path / "home" / "planted.txt"
    name = link.format(planted=planted)

    def answer(path, headers):
        return listing(name, "good.txt") if path == "/dir/" else (200, {}, b"import os")

    before = set(tmp_path.rglob("*"))
    expected = pytest.raises(UsageError, match=r"^data\.path: http://.*/dir/: what is there names '")
    with expected if refused else contextlib.nullcontext() as error:
        assert [path.name for path in fetched(f"{serve(answer)}/dir/", config).iterdir()] == ["good.txt"]
    assert error is None or str(error.value).isprintable()
    new = set(tmp_path.rglob("*")) - before
    assert not [path for path in new if not path.is_relative_to(config.cache_dir)]
    assert len([path for path in new if path.is_symlink()]) == (not refused)


def test_a_listing_of_files_and_folders_is_read(config, serve):
    pages = {"/dir/": listing("a.txt", "/dir/sub/", "?C=N;O=D", "/"), "/dir/sub/": listing("b.txt")}
    pages["/dir/sub"] = 301, {"Location": "/dir/sub/"}, b""

    def answer(path, headers):
        return pages.get(path, (200, {}, path.encode()))

    folder = fetched(f"{serve(answer)}/dir/", config)
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.txt")}
    assert found == {"a.txt": "/dir/a.txt", "sub/b.txt": "/dir/sub/b.txt"}


def test_a_redirect_to_another_protocol_is_refused(config, serve, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for to in (secret.as_uri(), "ftp://127.0.0.1/a.txt", "data:text/plain,abc"):
        server = serve(lambda path, headers, to=to: (302, {"Location": to}, b""))
        with pytest.raises(UsageError, match=f"a.txt: redirects to {re.escape(to)}, which is not followed; give the"):
            fetched(f"{server}/a.txt", config)


@pytest.mark.parametrize(
    ("asked", "to", "refused"),
    [("https", "http", True), ("http", "https", False), ("https", "https", False), ("http", "http", False)],
)
def test_a_redirect_keeps_encryption(asked, to, refused):
    url, to = URL(f"{asked}://192.0.2.1/a.txt"), f"{to}://192.0.2.2/b.txt"
    redirect = SimpleNamespace(url=url, response=SimpleNamespace(headers={"Location": to}))
    with pytest.raises(Exception, match=f"^redirects to {to}, which") if refused else contextlib.nullcontext():
        asyncio.run(remote.Store(str(url), 5)._check_redirect(None, None, redirect))


@pytest.mark.parametrize(
    ("links", "n_folders", "message"),
    [
        (["x/"], 60, "lists folders more than 50 deep; name one of them, or the files"),
        (["x/", "y/"], 20, "lists more than 20 folders or 200 files; name a folder in it, or the files"),
        ([f"{i}.txt" for i in range(201)], 20, "lists more than 20 folders or 200 files; name a folder"),
    ],
)
def test_a_listing_without_an_end_is_refused(config, serve, monkeypatch, links, n_folders, message):
    monkeypatch.setattr(remote, "_MOST_FOLDERS", n_folders)
    monkeypatch.setattr(remote, "_MOST_FILES", 200)
    server = serve(lambda path, headers: listing(*(path + link if path[-1] == "/" else link for link in links)))
    with pytest.raises(UsageError, match=f"^data.path: {server}/d/: {message}"):
        fetched(f"{server}/d/", config)


def test_a_redirect_within_a_host_is_followed(config, serve):
    def answer(path, headers):
        return (302, {"Location": "/b.txt"}, b"") if path == "/a.txt" else (200, {}, b"text")

    assert fetched(f"{serve(answer)}/a.txt", config).read_bytes() == b"text"


def test_a_redirect_into_this_machine_is_refused(config, serve):
    """From an address of this machine that others reach too, which is what a remote host looks like."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the system says which of its addresses it would use
        except OSError:
            pytest.skip("this machine has no address but that of itself")
        host = probe.getsockname()[0]
    within = serve(lambda path, headers: (200, {}, b"within"))
    outside = serve(lambda path, headers: (302, {"Location": f"{within}/a.txt"}, b""), host)
    with pytest.raises(UsageError, match=f"a.txt: redirects to {within}/a.txt, which is not followed"):
        fetched(f"{outside}/a.txt", config)


@pytest.mark.parametrize(
    ("host", "within"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "169.254.169.254", "::ffff:127.0.0.1")),
        *((host, True) for host in ("fe80::1", "localhost")),
        *((host, False) for host in ("192.0.2.1", "10.0.0.1", "2001:db8::1")),
    ],
)
def test_addresses_of_this_machine(host, within):
    assert asyncio.run(remote._is_within(host)) is within


# ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────────


def guarded(path, headers):
    """A server that wants a user with a password, and a signature."""
    asked = urlsplit(path)
    right = "Basic " + b64encode(b"me:S3cr3t w0rd").decode()
    if headers["Authorization"] != right or parse_qs(asked.query).get("sig") != ["S3cr3t+s1g"]:
        return 401, {}, b""
    return listing("a.txt", "b.txt") if asked.path == "/dir/" else (200, {}, asked.path.encode())


def test_credentials_of_a_url_let_in_and_stay_out_of_the_cache(config, serve):
    server = serve(guarded)
    signed = server.replace("http://", "http://me:S3cr3t%20w0rd@")
    folder = fetched(f"{signed}/dir/?sig=S3cr3t%2Bs1g", config)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a.txt": "/dir/a.txt", "b.txt": "/dir/b.txt"}
    for path in Path(config.cache_dir).rglob("*"):
        assert "S3cr3t" not in str(path)
        assert path.is_dir() or b"S3cr3t" not in path.read_bytes()
    # Known to the process from now on.
    assert fetched(f"{server}/dir/", config) == folder


def test_the_environment_or_fsspec_lets_in(config, serve, monkeypatch):
    server = serve(guarded)
    with pytest.raises(
        UsageError, match=r"/a.txt: is forbidden \(401\); .* which BIRTHMARK_URL_CREDENTIALS gives too$"
    ):
        fetched(f"{server}/a.txt", config)
    monkeypatch.setenv(VARIABLE, f"{server.replace('//', '//me:S3cr3t%20w0rd@')}?sig=S3cr3t%2Bs1g")
    assert fetched(f"{server}/a.txt", config).read_bytes() == b"/a.txt"
    by_header = serve(lambda path, headers: (200, {}, b"in") if headers["X-Key"] == "S3cr3t" else (403, {}, b""))
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"X-Key": "S3cr3t"}}})
    assert fetched(f"{by_header}/a.txt", config).read_bytes() == b"in"


@pytest.mark.parametrize(
    ("path", "words"), [("/endless.txt", "sends more than 1,048,576"), ("/endless/", "lists more than 1,048,576")]
)
def test_a_server_that_never_ends_is_heard_to_a_bound(config, server, monkeypatch, path, words):
    monkeypatch.setattr(remote, "MOST_UNSTATED", 1 << 20)
    monkeypatch.setattr(remote, "_MOST_LISTING", 1 << 20)
    with pytest.raises(UsageError, match=rf"data\.path: {server}{path}: {words} bytes, and did not say so before"):
        localised(replace(config, path=server + path))
