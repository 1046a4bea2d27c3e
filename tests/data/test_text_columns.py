"""Only the text's column is read: other columns may hold anything, and bytes that are UTF-8 are text."""

import csv
import gzip
import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.shards import build_shards
from birthmark.data.streaming import StreamedTable
from birthmark.errors import RunError, UsageError

#: Another column, of another type in each file.
OTHERS = [[None, None], [{"a": 1}, {"b": ["x"]}], [7, 8], ["word", "3"]]
TEXTS = [[f"file {i} λ", f"file {i}, second"] for i in range(len(OTHERS))]


def write(path, texts, others):
    rows = [{"other": other, "text": text} for text, other in zip(texts, others, strict=True)]
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.table({"other": others, "text": texts}), path)
        case ".arrow":
            table = pa.table({"other": others, "text": texts})
            make = pa.ipc.new_stream if others[0] is None else pa.ipc.new_file  # both formats have this suffix
            with make(path, table.schema) as writer:
                writer.write_table(table)
        case ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerows([["other", "text"], *([row["other"], row["text"]] for row in rows)])
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".gz":
            path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
        case ".zst":
            whole = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            path.write_bytes(pa.compress(whole, codec="zstd", asbytes=True))


@pytest.fixture
def config(tmp_path):
    return DataConfig(path=str(tmp_path / "set"), val_fraction=0.2, cache_dir=str(tmp_path / "cache"), n_workers=1)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "csv"])
def test_other_columns_of_another_type_in_every_file(suffix, config, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for i, (texts, others) in enumerate(zip(TEXTS, OTHERS, strict=True)):
        write(folder / f"{i}.{suffix}", texts, others)
    assert [document.text for document in open_corpus(config).documents()] == [
        text for texts in TEXTS for text in texts
    ]
    table = StreamedTable(config)
    assert [list(table.texts(i)) for i in range(table.n_files)] == TEXTS
    assert list(table.texts(3, first_row=1)) == TEXTS[3][1:]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_as_bytes_and_as_a_dictionary(suffix, kind, config, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / f"0.{suffix}", pa.array(["a λ", None, "b", "a λ"]).cast(kind), [1, 2, 3, 4])
    corpus = open_corpus(config)
    assert [document.text for document in corpus.documents()] == ["a λ", "b", "a λ"]
    assert corpus.n_bytes == 9
    assert corpus.skipped == {"empty": 1}
    assert list(StreamedTable(config).texts(0)) == ["a λ", None, "b", "a λ"]


def not_utf8(suffix, path):
    rows = [b"good", b"bad \xff", "λ".encode(), b"\xc3(", b"end"]
    if suffix == "json":
        path.write_text('[{"text":"good"},{"text":"bad \\ud800"},{"text":"λ"},{"text":"\\udfff"},{"text":"end"}]')
        return
    array = pa.array(rows, pa.binary())
    # A string column of damaged bytes: Arrow does not look at them.
    write(path, array.view(pa.string()) if suffix == "parquet" else array, [1] * 5)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "json"])
def test_bytes_that_are_no_text_are_bad_rows(suffix, config, tmp_path, tokenizer):
    path = tmp_path / f"set.{suffix}"
    not_utf8(suffix, path)
    allowed = replace(config, path=str(path), max_bad_rows=2)
    corpus = open_corpus(allowed)
    shards = build_shards(corpus, tokenizer, tmp_path / "cache", val_fraction=0.2)
    assert [document.text for document in corpus.documents()] == ["good", "λ", "end"]
    assert corpus.skipped == shards.meta["skipped"] == {"bad": 2}
    for most, row in ((1, 4), (0, 2)):
        with pytest.raises(UsageError, match=rf"^data\.path: row {row} of .* is not UTF-8 \(.*raise data.max_bad_rows"):
            open_corpus(replace(allowed, max_bad_rows=most)).check_any()
    with pytest.raises(RunError, match=r"column 'text' cannot be read after row 0"):
        list(StreamedTable(replace(config, path=str(path))).texts(0))


def test_bad_rows_of_the_hub_count_too(config, monkeypatch):
    table = datasets.Dataset(pa.table({"text": pa.array([b"a", b"\xff", b"b"])}))
    monkeypatch.setattr("birthmark.data.row_corpora.HubCorpus._load", lambda self: table)
    corpus = open_corpus(replace(config, path="hf:set", max_bad_rows=1))
    assert [document.text for document in corpus.documents()] == ["a", "b"]
    assert corpus.skipped == {"bad": 1}
    with pytest.raises(UsageError, match=r"row 2 of 'hf:set' is not UTF-8"):
        open_corpus(replace(config, path="hf:set")).content_hash()


def test_a_set_of_the_hub_in_lines_of_json(config, tmp_path, monkeypatch):
    """A folder of the hub's layout goes through the same calls."""
    (tmp_path / "set").mkdir()
    for i in range(2):
        write(tmp_path / "set" / f"train-{i}.jsonl.zst", TEXTS[i], OTHERS[i])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "hub")
    hub = replace(config, path=f"hf:{tmp_path / 'set'}")
    assert [document.text for document in open_corpus(hub).documents()] == TEXTS[0] + TEXTS[1]
    table = StreamedTable(hub)
    assert [list(table.texts(i)) for i in range(table.n_files)] == TEXTS[:2]


def test_a_column_that_no_row_has(config, tmp_path):
    readers = [lambda config: open_corpus(config).check_any(), lambda config: list(StreamedTable(config).texts(0))]
    for suffix in ("jsonl", "json", "csv", "parquet", "arrow"):
        path = tmp_path / f"set.{suffix}"
        write(path, ["a", "b"], [1, 2])
        for read in readers:
            with pytest.raises(UsageError, match=r"^data\.text_field: no column 'body' in .*'other', 'text'$"):
                read(replace(config, path=str(path), text_field="body"))
