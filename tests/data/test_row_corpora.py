"""Real files through the real library; nothing leaves the machine."""

import hashlib
import os
import subprocess
import sys

import datasets
import pytest
import xxhash

from birthmark.data import row_corpora
from birthmark.data import row_corpora as rows
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.shards import build_shards
from birthmark.errors import UsageError

TEXTS = [
    'first, with "quotes"\nand a line',
    "NA",
    "λ 数据 🎈",
    "",
    "null",
    *(f"row {i} of the table" for i in range(40)),
]
HELD_OUT = [f"row {i}" for i in (2, 5, 7, 12, 14, 20, 22, 29, 36, 38)]
SUFFIXES = ["parquet", "arrow", "json", "jsonl", "csv"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_are_documents(tmp_path, open_table, suffix, write_table):
    corpus = open_table(write_table(tmp_path / f"table.{suffix}", TEXTS))
    documents = list(corpus.documents())
    assert [document.text for document in documents] == [text for text in TEXTS if text]
    assert {document.split for document in documents} == {"train", "val"}
    assert corpus.skipped == {"empty": 1}
    assert corpus.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_equal_rows_share_a_split_wherever_they_stand(tmp_path, open_table, write_table):
    def splits(texts):
        found = {}
        path = write_table(tmp_path / "table.jsonl", texts)
        for document in open_table(path).documents():
            found.setdefault(document.text, set()).add(document.split)
        return found

    once = splits(TEXTS)
    twice = splits(TEXTS[::-1] + TEXTS)
    assert all(len(split) == 1 for split in twice.values())
    assert once == twice


def test_several_files(tmp_path, open_table, write_table):
    paths = [write_table(tmp_path / f"{i}.parquet", [f"file {i} row {j}" for j in range(3)]) for i in (1, 0)]
    expected = [f"file {i} row {j}" for i in (1, 0) for j in range(3)]
    assert [document.text for document in open_table(*paths).documents()] == expected


def test_one_row_is_split(tmp_path, open_table, write_table):
    train, val = open_table(write_table(tmp_path / "one.parquet", ["x" * 100, None])).documents()
    assert (train.split, val.split) == ("train", "val")
    assert len(train.text) + len(val.text) == 100


def test_content_hash_sees_a_changed_byte_that_the_clock_does_not(tmp_path, open_table, write_table):
    path = write_table(tmp_path / "table.jsonl", TEXTS)
    corpus = open_table(path)
    first, texts = corpus.content_hash(), [document.text for document in corpus.documents()]
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"row 7 of", b"ROW 7 of"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = open_table(path)
    assert changed.content_hash() != first
    assert [document.text for document in changed.documents()] == [text.replace("row 7 ", "ROW 7 ") for text in texts]


COUNTED = """
import sys
from pathlib import Path
from birthmark.data.cache import files_sha256

paths, opened = [Path(path) for path in sys.argv[2:]], []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
print(*files_sha256(paths, Path(sys.argv[1])))
print(sum(opened.count(str(path)) for path in paths))
"""


def test_processes_of_a_node_read_a_table_once_and_not_again_before_it_changes(tmp_path, python):
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)

    def reads(n):
        command = [python, "-c", COUNTED, str(tmp_path / "cache"), *map(str, paths)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(n)]
        found = [process.communicate(timeout=60)[0].splitlines() for process in started]
        expected = " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
        assert [hashes for hashes, _ in found] == [expected] * n
        return sum(int(count) for _, count in found)

    assert reads(2) == 2
    assert reads(1) == 0
    before = paths[0].stat()
    paths[0].write_bytes(b"A" + paths[0].read_bytes()[1:])
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reads(1) == 2


@pytest.mark.heavy
def test_the_survey_is_that_of_one_row_after_the_other(tmp_path, open_table, monkeypatch, write_table):
    texts = [f"row {i} λ " * (i % 7) for i in range(700)] + [None, "x" * 5000]
    path = write_table(tmp_path / "table.parquet", texts)
    monkeypatch.setattr(rows, "_MOST_ROWS", 64)
    monkeypatch.setattr(rows, "_MOST_BYTES", 500)
    contents = [(text or "").encode() for text in texts]
    hashes = [xxhash.xxh3_64(content, seed=int.from_bytes(b"birthmrk", "little")).intdigest() for content in contents]
    for workers, span in ((1, 1 << 26), (2, 10_000)):
        monkeypatch.setattr(row_corpora, "_SPAN_BYTES", span)
        corpus = open_table(path, n_workers=workers, cache_dir=str(tmp_path / f"cache{workers}"))
        assert corpus.keys.tolist() == hashes
        assert corpus.sizes.tolist() == list(map(len, contents))
        assert [document.text for document in corpus.documents()] == [text for text in texts if text]


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_rows_of_the_hub_are_hashed_by_blocks_however_they_are_read(kind, monkeypatch):
    texts = ["a", None, "", "λ", *(f"row {i} " * (i % 5) for i in range(60)), "", ""]
    contents = [(text or "").encode() for text in texts]
    table = datasets.Dataset.from_dict({"text": texts}, features=datasets.Features({"text": datasets.Value(kind)}))
    monkeypatch.setattr(rows, "BLOCK_ROWS", 8)
    expected = b""
    for first in range(0, len(texts), 8):
        block = contents[first : first + 8]
        sizes = b"".join(len(content).to_bytes(8, "little") for content in block)
        parts = hashlib.sha256(b"".join(block)).digest() + hashlib.sha256(sizes).digest()
        expected += hashlib.sha256(parts).digest()
    for most_rows, most_bytes in ((1 << 14, 1 << 23), (7, 1 << 23), (16, 20)):
        monkeypatch.setattr(rows, "_MOST_ROWS", most_rows)
        monkeypatch.setattr(rows, "_MOST_BYTES", most_bytes)
        facts = rows.Rows(table, 0, len(texts)).facts(with_sha256=True)
        assert facts.sha256 == expected
        # A span that begins with a block gives the blocks of the whole.
        assert rows.Rows(table, 24, len(texts)).facts(with_sha256=True).sha256 == expected[3 * 32 :]


@pytest.mark.parametrize(("span", "n_workers"), [(1 << 26, 1), (10_000, 2)])
def test_the_hash_of_a_hub_set_is_the_same_however_its_survey_is_shared_out(tmp_path, monkeypatch, span, n_workers):
    texts = [f"row {i} of the set" for i in range(2500)]
    monkeypatch.setattr(row_corpora.HubCorpus, "_load", lambda self: datasets.Dataset.from_dict({"text": texts}))
    monkeypatch.setattr(row_corpora, "_SPAN_BYTES", span)
    corpus = row_corpora.HubCorpus(DataConfig(path="hf:set", cache_dir=str(tmp_path), n_workers=n_workers))
    total = hashlib.sha256()
    for first in range(0, 2500, 1024):
        block = [text.encode() for text in texts[first : first + 1024]]
        sizes = b"".join(len(content).to_bytes(8, "little") for content in block)
        total.update(hashlib.sha256(hashlib.sha256(b"".join(block)).digest() + hashlib.sha256(sizes).digest()).digest())
    assert corpus.content_hash() == total.hexdigest()


def test_splits_of_known_rows_stay(tmp_path, open_table, write_table):
    """What a run held out stays held out."""
    corpus = open_table(write_table(tmp_path / "table.parquet", [f"row {i}" for i in range(40)]))
    assert [d.text for d in corpus.documents() if d.split == "val"] == HELD_OUT


def test_shards_are_reused_without_the_library(tmp_path, open_table, tokenizer, monkeypatch, write_table):
    path = write_table(tmp_path / "table.jsonl", TEXTS)
    first = build_shards(open_table(path), tokenizer, tmp_path / "cache", val_fraction=0.2)
    assert first.meta["splits"]["train"]["documents"] + first.meta["splits"]["val"]["documents"] == len(TEXTS) - 1
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = build_shards(open_table(path), tokenizer, tmp_path / "cache", val_fraction=0.2)
    assert again.meta == first.meta
    with pytest.raises(UsageError, match=r"pip install datasets"):
        list(open_table(write_text(tmp_path / "other.jsonl")).documents())


def test_shards_of_other_splits_are_not_reused(tmp_path, open_table, tokenizer, monkeypatch, write_table):
    path = write_table(tmp_path / "table.jsonl", TEXTS)
    folders = set()
    for rule in (row_corpora.TableCorpus.split_rule, "text-xxh3"):
        monkeypatch.setattr(row_corpora.TableCorpus, "split_rule", rule)
        folders.add(build_shards(open_table(path), tokenizer, tmp_path / "cache", val_fraction=0.2).folder)
    assert len(folders) == 2


def write_text(path):
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    return path


def test_wrong_column_lists_the_columns(tmp_path, open_table, write_table):
    path = write_table(tmp_path / "table.csv", TEXTS, column="body")
    with pytest.raises(UsageError, match=r"data\.text_field: no column 'text' in .*'id', 'body'"):
        list(open_table(path).documents())
    with pytest.raises(UsageError, match=r"data\.text_field: column 'id' holds int64"):
        list(open_table(path, text_field="id").documents())
    assert next(iter(open_table(path, text_field="body").documents())).text == TEXTS[0]


def test_tables_without_text(tmp_path, open_table, write_table):
    with pytest.raises(UsageError, match="holds no text in its 3 rows"):
        list(open_table(write_table(tmp_path / "table.jsonl", ["", "", ""])).documents())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files(tmp_path, open_table, suffix):
    path = tmp_path / f"damaged.{suffix}"
    path.write_bytes(b'\x00\x01{"text": \xff\xfe')
    with pytest.raises(
        UsageError, match=r"data\.path: cannot load .*damaged|damaged\.[a-z]*: (line 1|its header) is"
    ) as error:
        list(open_table(path).documents())
    assert "\n" not in str(error.value)


def test_a_row_that_is_no_text_is_named(tmp_path, open_table, write_table):
    path = write_table(tmp_path / "table.jsonl", ["a", "b"] * 300)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[401] = lines[401].replace(b"b", b"b\xff")
    path.write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=r"table\.jsonl: line 402 is not UTF-8 \("):
        list(open_table(path).documents())


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_line_that_can_be_no_row_is_not_read(tmp_path, open_table, monkeypatch, suffix, write_table):
    monkeypatch.setattr("birthmark.data.bad_rows._MOST_LINE", 1 << 20)
    path = write_table(tmp_path / f"table.{suffix}", ["a" * (1 << 19), "b"])
    assert [len(document.text) for document in open_table(path).documents()] == [1 << 19, 1]
    with path.open("ab") as file:
        file.write(bytes(7 << 19))  # zeros without a line's end
    with pytest.raises(UsageError, match=rf"table\.{suffix}: a line of more than 1 MiB"):
        list(open_table(path).documents())


def test_unreachable_hub_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"^data\.path: cannot load 'hf:nobody/nothing:config'") as error:
        open_corpus(DataConfig(path="hf:nobody/nothing:config", cache_dir=str(tmp_path))).content_hash()
    assert "\n" not in str(error.value)


def test_dataset_of_the_hubs_layout(tmp_path, write_table):
    """A local repository in the hub's layout goes through the very same call, and the library prints nothing."""
    (tmp_path / "set").mkdir()
    write_table(tmp_path / "set" / "train-00000.parquet", ["alpha", "beta", "gamma"])
    code = (
        "from birthmark.data.config import DataConfig; from birthmark.data.corpora import open_corpus;"
        f"corpus = open_corpus(DataConfig(path='hf:{tmp_path}/set', cache_dir='{tmp_path}/cache'));"
        "print(corpus.content_hash(), [d.text for d in corpus.documents()])"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "['alpha', 'beta', 'gamma']" in done.stdout
    assert done.stderr == ""
