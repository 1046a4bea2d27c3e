"""Compressed corpora are what they hold: same keys, same splits, same hash as the files without compression."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from birthmark.data.config import DataConfig, corpus_suffix
from birthmark.data.corpora import open_corpus
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
