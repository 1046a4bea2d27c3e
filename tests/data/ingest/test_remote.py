"""Corpora elsewhere: fsspec's memory, and a server on this machine that hangs, forbids and fails."""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import fsspec
import pytest

from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.ingest import remote
from birthmark.data.mixing.mixture import Mixture
from birthmark.data.prepare import prepare
from birthmark.data.probes import passage_probe
from birthmark.data.tokenizer import TextTokenizer
from birthmark.errors import RunError, UsageError

SEQ_LEN, VOCAB = 8, 320


def make_text(seed: int, n_words: int) -> str:
    rng = random.Random(seed)
    return "".join(
        rng.choice(["brown ", "fox λ ", "return self", ".value\n", "if 数据 ", "else:\n    "]) for _ in range(n_words)
    )


def megatron(path: Path, lengths: list[int]) -> None:
    """Documents of these lengths, of uint16; see tests/data/test_token_files.py for the layout."""
    tokens = [i % 300 for i in range(sum(lengths))]
    starts = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    n = len(lengths)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, n + 1)
    rest = struct.pack(f"<{n}i", *lengths) + struct.pack(f"<{n}q", *starts) + struct.pack(f"<{n + 1}q", *range(n + 1))
    path.with_suffix(".idx").write_bytes(header + rest)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", 0.01)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"), val_fraction=0.2, n_workers=1, timeout_s=5)


def upload(folder: Path, memory: fsspec.AbstractFileSystem, to: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{to}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def copies(config: DataConfig) -> dict[Path, int]:
    found = Path(config.cache_dir).glob("remote-*/*")
    return {path: path.stat().st_mtime_ns for path in found if path.name != "meta.json"}


def test_a_folder_is_what_it_is_here(config: DataConfig, folder: Path, memory: fsspec.AbstractFileSystem) -> None:
    upload(folder, memory, "/bucket/corpus")
    here = open_corpus(replace(config, path=str(folder)))
    there = replace(config, path="memory://bucket/corpus")
    corpus = open_corpus(remote.localised(there))
    assert list(corpus.documents()) == list(here.documents())
    assert corpus.content_hash() == here.content_hash()
    before = copies(config)
    assert len(before) == 40
    remote.localised(there)
    assert copies(config) == before
    # Another content there is another copy here.
    memory.pipe_file("/bucket/corpus/part0/file00.txt", b"changed")
    assert open_corpus(remote.localised(there)).content_hash() != here.content_hash()
    assert len(copies(config)) == 41


def test_tables_tokenizers_and_tokens(
    config: DataConfig, tokenizer: TextTokenizer, tmp_path: Path, memory: fsspec.AbstractFileSystem
) -> None:
    rows = "".join(json.dumps({"text": make_text(i, 60)}) + "\n" for i in range(40))
    memory.pipe_file("/b/rows.jsonl", rows.encode())
    memory.pipe_file("/b/t.json", tokenizer.content)
    (tmp_path / "tokens").mkdir()
    megatron(tmp_path / "tokens" / "a.bin", [5, 20, 7, 30, 11, 16, 8] * 5)
    upload(tmp_path / "tokens", memory, "/b/tokens")
    sources = [SourceConfig("memory://b/rows.jsonl", 1.0), SourceConfig("memory://b/tokens/a.bin", 1.0)]
    asked = replace(config, sources=sources, tokenizer="memory://b/t.json")
    data = prepare(asked, vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert isinstance(data.train, Mixture)
    assert list(data.train.sources) == ["rows", "a"]
    here = prepare(replace(config, path=str(tmp_path / "tokens" / "a.bin")), vocab_size=VOCAB, seq_len=SEQ_LEN)
    assert data.train.sources["a"].batch(0, 9).tolist() == here.train.batch(0, 9).tolist()
    assert data.record["sources"]["a"]["content_hash"] == here.record["content_hash"]
    assert data.record["path"] == ["memory://b/rows.jsonl", "memory://b/tokens/a.bin"]
    assert data.record["tokenizer"] == "memory://b/t.json"


def test_a_probe_reads_remote_text(
    tokenizer: TextTokenizer, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    memory.pipe_file("/b/a.txt", make_text(1, 400).encode())
    found = passage_probe("memory://b/a.txt", tokenizer, 3, 16, VOCAB)
    assert found.shape == (3, 16)


class _Handler(BaseHTTPRequestHandler):
    asked: ClassVar[Counter[tuple[str, str]]] = Counter()
    content = make_text(3, 900).encode()
    closing = threading.Event()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.asked[self.command, path] += 1
        n = self.asked[self.command, path]
        status = {"/forbidden.txt": 403, "/missing.txt": 404, "/broken.txt": 500}.get(path, 200)
        if path == "/twice.txt" and self.command == "GET" and n <= 2:
            status = 503
        if path == "/hangs.txt":
            self.closing.wait(20)
        self.send_response(status)
        self.send_header("Content-Length", str(len(self.content) if status == 200 else 0))
        self.end_headers()
        if self.command == "GET" and status == 200:
            half = len(self.content) // 2
            self.wfile.write(self.content[:half])
            if path == "/stalls.txt":
                self.wfile.flush()
                self.closing.wait(20)
            if path == "/cut.txt":
                self.close_connection = True
                return
            self.wfile.write(self.content[half:])

    do_GET = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    _Handler.asked.clear()
    _Handler.closing.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        found.daemon_threads = True
        thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        _Handler.closing.set()
        found.shutdown()


def test_over_http(config: DataConfig, server: str) -> None:
    found = remote.fetched(f"{server}/good.txt", config)
    assert found.read_bytes() == _Handler.content
    assert found.name == "good.txt"
    gets = _Handler.asked["GET", "/good.txt"]
    assert remote.fetched(f"{server}/good.txt", config) == found
    assert _Handler.asked["GET", "/good.txt"] == gets


def test_a_server_that_fails_twice(config: DataConfig, server: str) -> None:
    assert remote.fetched(f"{server}/twice.txt", config).read_bytes() == _Handler.content
    assert _Handler.asked["GET", "/twice.txt"] == 3


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("forbidden.txt", UsageError, r"forbidden\.txt: is forbidden \(403\); check the address and your credentials$"),
        ("missing.txt", UsageError, r"missing\.txt: is not there; check the address$"),
        ("broken.txt", RunError, r"broken\.txt: cannot be read after 3 tries \("),
        ("cut.txt", RunError, r"cut\.txt: cannot be read after 3 tries \("),
        ("hangs.txt", RunError, r"hangs\.txt: no answer for 0\.3 s; check the network, or raise data\.timeout_s$"),
        ("stalls.txt", RunError, r"stalls\.txt: no answer for 0\.3 s; check the network, or raise data\.timeout_s$"),
    ],
)
def test_a_server_that_does_not_give(
    name: str, kind: type[Exception], message: str, config: DataConfig, server: str
) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=rf"^data\.path: http://.*{message}") as error:
        remote.fetched(f"{server}/{name}", replace(config, timeout_s=0.3))
    assert "\n" not in str(error.value)
    assert time.monotonic() - start < 10
    # Nothing half copied.
    assert copies(config) == {}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/a.txt", r"s3:// needs a package; pip install s3fs$"),
        ("gs://bucket/a.txt", r"gs:// needs a package; pip install gcsfs$"),
        ("nonsense://bucket/a.txt", r"nonsense:// is no protocol that fsspec knows$"),
        ("memory://nothing/there.txt", r"there\.txt: is not there; check the address$"),
    ],
)
def test_what_cannot_be_asked(url: str, message: str, config: DataConfig, memory: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(UsageError, match=rf"^data\.path: .*{message}") as error:
        prepare(replace(config, path=url), vocab_size=300, seq_len=8)
    assert "\n" not in str(error.value)


def test_no_patience_at_all() -> None:
    assert DataConfig(timeout_s=0).problems()[0].startswith("data.timeout_s: 0 is no number of seconds")
