"""Compressed corpora are what they hold: same keys, same splits, same hash as the files without compression."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from birthmark.data import text_columns
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.suffixes import corpus_suffix
from birthmark.errors import RunError, UsageError


def zst(content):
    """Two frames, one after another, as `zstd` and `pzstd` write long files."""
    half = len(content) // 2
    codec = pyarrow.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:half], content[half:]))


PACK = {".gz": gzip.compress, ".zst": zst}


def packed(path, suffix):
    path.with_name(path.name + suffix).write_bytes(PACK[suffix](path.read_bytes()))
    path.unlink()
    return path.with_name(path.name + suffix)


@pytest.fixture
def config(tmp_path):
    return DataConfig(cache_dir=str(tmp_path / "cache"), val_fraction=0.2, n_workers=1)


@pytest.mark.parametrize("suffix", PACK)
def test_text(suffix, config, folder):
    config = replace(config, path=str(folder))
    plain, before = list(open_corpus(config).documents()), open_corpus(config).content_hash()
    for path in [path for path in folder.rglob("*") if path.is_file()][::2]:
        packed(path, suffix)
    assert list(open_corpus(config).documents()) == plain
    assert open_corpus(config).content_hash() == before


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_rows(kind, suffix, config, tmp_path):
    rows = [f'{i}, "λ",\n    数据 {i * i}' for i in range(30)]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    else:
        path.write_text("text\n" + "".join('"' + row.replace('"', '""') + '"\n' for row in rows))
    corpus = open_corpus(replace(config, path=str(path)))
    plain, before = list(corpus.documents()), corpus.content_hash()
    corpus = open_corpus(replace(config, path=str(packed(path, suffix))))
    assert list(corpus.documents()) == plain
    assert [document.text for document in plain] == rows
    assert corpus.content_hash() == before
    # Unpacked once.
    stamps = {p: p.stat().st_mtime_ns for p in Path(config.cache_dir).glob("unpacked-*/*")}
    assert len(stamps) == 2
    open_corpus(replace(config, path=str(path.with_name(path.name + suffix)))).content_hash()
    assert {p: p.stat().st_mtime_ns for p in Path(config.cache_dir).glob("unpacked-*/*")} == stamps


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_damage_is_one_line(name, suffix, damage, config, tmp_path):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": " ".join(map(str, range(i, i * i)))}) + "\n" for i in range(50)))
    file = packed(path, suffix)
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "other": b"no such thing" * 9, "empty": b""}[damage])
    with pytest.raises(UsageError, match=r"^.*a\.(txt|jsonl)\.(gz|zst): damaged (gz|zst) \(") as error:
        list(open_corpus(replace(config, path=str(file))).documents())
    assert "\n" not in str(error.value)
    # Nothing half unpacked is left.
    file.write_bytes(whole)
    assert list(open_corpus(replace(config, path=str(file))).documents())


def test_a_compressed_table_is_none_that_is_read(config, tmp_path):
    shutil.copyfile(__file__, tmp_path / "a.parquet.gz")
    problems = replace(config, path=str(tmp_path / "a.parquet.gz")).problems()
    assert ["of no known kind" in problem for problem in problems] == [True]
    assert [corpus_suffix(n) for n in ("A.TXT.GZ", "b.jsonl.zst", "c.gz", "d.py")] == [".txt", ".jsonl", ".gz", ".py"]


def test_a_small_table_that_holds_much_is_refused_and_leaves_no_copy(config, tmp_path, monkeypatch):
    """40 texts of 1 MB in 3 kB: each is the same entry of the dictionary."""
    text, file, disk = "hello world " * 87_000, tmp_path / "x.parquet", shutil.disk_usage(tmp_path)
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40, pyarrow.int32()), [text])
    parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd")
    assert file.stat().st_size < 20_000
    config = replace(config, path=str(file))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk._replace(free=70_000_000))
    with pytest.raises(RunError, match=r"x\.parquet: takes more than half of the 0\.1 GB free in .*cache.* when it is"):
        _ = open_corpus(config)._dataset
    assert {path.suffix for path in Path(config.cache_dir).rglob("*") if path.is_file()} <= {".lock", ".json"}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk._replace(free=100_000_000))
    assert set(open_corpus(config)._dataset.with_format("arrow")[:]["text"].to_pylist()) == {text.encode()}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_dictionary_is_taken_apart_in_portions(suffix, tmp_path, monkeypatch):
    """With nulls, and texts of all lengths; against Arrow's reading of the whole."""
    monkeypatch.setattr(text_columns, "_MOST_BYTES", 1 << 16)
    texts = pyarrow.array([None if suffix == ".arrow" else "a", "", "b", "c" * (1 << 15), "d" * (1 << 17)])
    places = [3, 0, 1, None, 4, 2, 3, 3, 3, 2, 4, 4, 1] + [2] * 3000 + [3]
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(pyarrow.array(places, pyarrow.int32()), texts)})
    file = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, file, store_schema=False)  # as others write it: Arrow's own restores dictionaries
    else:
        with pyarrow.ipc.new_file(file, table.schema) as out:
            out.write_table(table)
    portions = list(text_columns.read_column(file.name, str(file), suffix, "text"))
    assert max(part.nbytes for part in portions) < (1 << 17) + (1 << 16)
    assert [row for part in portions for row in part.to_pylist()] == [
        None if place is None or (text := texts[place].as_py()) is None else text.encode() for place in places
    ]


def test_a_small_file_that_holds_much_is_refused_and_leaves_no_copy(config, tmp_path, monkeypatch):
    file, disk = tmp_path / "x.jsonl.gz", shutil.disk_usage(tmp_path)

    def written(*blocks, free=disk.free):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk._replace(free=free))
        with gzip.open(file, "wb", 1) as out:
            out.writelines(blocks)
        return replace(config, path=str(file))

    monkeypatch.setattr("birthmark.data.bad_rows._MOST_LINE", 1 << 21)
    with pytest.raises(UsageError, match=r"x\.jsonl\.gz: a line of more than 2 MiB; give a file with one row a line$"):
        open_corpus(written(b'{"text": "a"}\n{"text": "', *[bytes(1 << 20)] * 3))
    rows = [b'{"text": "a"}\n' * 80_000] * 4
    with pytest.raises(RunError, match=r"x\.jsonl\.gz: takes more than half of the 0\.0 GB free in .*cache when it is"):
        open_corpus(written(*rows, free=8_000_000))
    assert {path.suffix for path in Path(config.cache_dir).rglob("*")} == {".lock"}
    assert open_corpus(written(*rows, free=9_000_000)).content_hash()
