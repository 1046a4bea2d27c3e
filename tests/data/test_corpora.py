import os
from dataclasses import replace
from importlib.metadata import metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.data import encode, text_files
from birthmark.data.config import NAMED_CORPORA, DataConfig
from birthmark.data.corpora import CORPORA, open_corpus
from birthmark.data.documents import TRAIN, VAL, WITHIN, codes_of, name_hash, split_single_document, validation_mask
from birthmark.data.encode import encode_documents
from birthmark.errors import RunError, UsageError


def config(*paths, val_fraction=0.2):
    return DataConfig(path=[str(path) for path in paths], val_fraction=val_fraction)


def test_every_file_once_in_key_order(folder):
    documents = list(open_corpus(config(folder)).documents())
    keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert [document.text for document in documents] == [(folder / key).read_bytes().decode() for key in keys]
    assert {document.split for document in documents} == {"train", "val"}


def test_n_bytes_and_order_of_naming(folder):
    corpus = open_corpus(config(folder, folder / "part0" / "file00.txt"))
    assert corpus.n_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_split_belongs_to_the_name(folder, tmp_path):
    def val_texts():
        return {d.text for d in open_corpus(config(folder)).documents() if d.split == "val"}

    before = val_texts()
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert {d.text for d in open_corpus(config(moved)).documents() if d.split == "val"} == before
    moved.rename(folder)
    (folder / "aaa.txt").write_text("a new first document")
    assert val_texts() - {"a new first document"} == before


def test_val_fraction_is_met_in_expectation():
    hashes = np.array([name_hash(f"file{i}.txt".encode()) for i in range(10_000)], dtype=np.uint64)
    for fraction in (0.02, 0.5, 0.9):
        n_val = validation_mask(hashes, fraction).sum()
        assert abs(n_val - 10_000 * fraction) < 5 * np.sqrt(10_000 * fraction * (1 - fraction))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20), st.floats(1e-9, 1 - 1e-9))
def test_two_documents_give_two_splits_and_equal_ones_share_theirs(hashes, fraction):
    keys = np.array([*hashes, hashes[0], min(hashes), max(hashes)], dtype=np.uint64)
    codes = codes_of(keys, np.ones(len(keys), dtype=bool), fraction).tolist()
    by_key = {}
    for key, code in zip(keys.tolist(), codes, strict=True):
        by_key.setdefault(key, set()).add(code)
    assert all(len(found) == 1 for found in by_key.values())
    assert set(codes) == ({TRAIN, VAL} if len(by_key) > 1 else {WITHIN})


@given(st.text(st.sampled_from("ab\n "), min_size=2, max_size=300), st.floats(0.001, 0.999))
def test_a_single_text_is_split_in_two(text, fraction):
    train, val = split_single_document(text, fraction)
    assert (train.split, val.split) == ("train", "val")
    assert train.text
    assert val.text
    assert train.text + val.text == text


def test_a_single_text_is_split_at_a_line(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    train, val = open_corpus(config(path, val_fraction=0.1)).documents()
    assert train.text.endswith("\n")
    assert train.text.count("\n") + val.text.count("\n") == 100
    assert 8 <= val.text.count("\n") <= 12


def test_one_character_is_no_corpus(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UsageError, match="give more text"):
        list(open_corpus(config(tmp_path)).documents())


def test_content_hash_sees_every_change(folder):
    def content_hash():
        return open_corpus(config(folder)).content_hash()

    seen = [content_hash()]
    assert content_hash() == seen[0]
    victim = folder / "part1" / "file01.md"
    before = victim.stat()
    content = bytearray(victim.read_bytes())
    content[10] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    seen.append(content_hash())
    victim.rename(victim.with_name("file01b.md"))  # its place among the others stays
    seen.append(content_hash())
    (folder / "new.txt").write_text("new")
    seen.append(content_hash())
    (folder / "new.txt").unlink()
    assert content_hash() == seen[2]
    assert len(set(seen)) == 4


def test_names_and_contents_cannot_run_into_each_other(tmp_path):
    hashes = []
    for name, text in [("ab.txt", "c"), ("a.txt", "bc")]:
        root = tmp_path / name
        root.mkdir()
        (root / name).write_text(text)
        (root / "z.txt").write_text("z")
        hashes.append(open_corpus(config(root)).content_hash())
    assert hashes[0] != hashes[1]


def test_what_is_left_out_is_counted(folder):
    (folder / "nul.txt").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "empty.md").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"png")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "secret.txt").write_text("secret")
    (folder / ".dotfile.txt").write_text("dot")
    corpus = open_corpus(config(folder))
    assert corpus.skipped == {"binary": 1, "not UTF-8": 1, "empty": 1}
    assert len(list(corpus.documents())) == 40
    assert not any("secret" in document.text or document.text == "dot" for document in corpus.documents())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no files"),
        ({"a.txt": b"\0\0", "b.md": b"\xff"}, "1 binary, 1 not UTF-8|1 not UTF-8, 1 binary"),
        ({"a.txt": b""}, "1 empty"),
        ({"a.png": b"x", "b.png": b"x", "c": b"x"}, "1 nameless, 2 .png"),
        ({"a.txt": b"x", "b.parquet": b"x"}, "both text and tables"),
        ({"a.csv": b"x", "b.json": b"x"}, "no one kind of tabular"),
    ],
)
def test_folders_without_text(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        open_corpus(config(tmp_path)).content_hash()
    assert str(error.value).startswith("data.path: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["a.txt", "t/train.bin"], r"^data\.path: '.*train\.bin' holds 1 \.bin beside \.txt files; leave it out"),
        (["t/train.bin", "a.txt"], r"^data\.path: '.*train\.bin' holds 1 \.bin beside \.txt files"),
        (["a.txt", "rows"], r"^data\.path: '.*rows' holds 2 \.jsonl beside \.txt files"),
        (["rows", "t"], r"^data\.path: '.*t' holds 1 \.bin beside \.jsonl files"),
        (["a.txt", "none"], r"^data\.path: '.*none' holds no files beside \.txt files"),
    ],
)
def test_no_entry_is_left_out_unsaid(entries, message, tmp_path):
    for folder in ("t", "rows", "none"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "t" / "train.bin").write_bytes(bytes(100))
    for name in "ab":
        (tmp_path / "rows" / f"{name}.jsonl").write_text('{"text": "a row"}\n')
    with pytest.raises(UsageError, match=message) as error:
        open_corpus(config(*(tmp_path / entry for entry in entries)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("most_whole", [1 << 20, 100])
def test_a_file_that_changes_while_it_is_read(tmp_path, tokenizer, monkeypatch, most_whole):
    """A short one, which is read whole, and a long one, in blocks."""
    monkeypatch.setattr(text_files, "_MOST_WHOLE", most_whole)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    corpus = open_corpus(config(tmp_path))
    corpus.content_hash()
    (tmp_path / "a.txt").write_text("c" * 500)
    with pytest.raises(RunError, match=r"a\.txt: changed"):
        list(encode_documents(corpus.documents(), tokenizer))


@pytest.mark.parametrize("n_files", [1, 3])
def test_long_files_are_read_in_blocks_as_short_ones_whole(tmp_path, tokenizer, n_files, monkeypatch):
    for i in range(n_files):
        lines = [f"{i} λ line {j} " * (j % 9) + "\n" for j in range(400)]
        (tmp_path / f"{i}.txt").write_text("".join(lines) + "數" * 5000, encoding="utf-8")

    def parts():
        return [(document.split, document.text) for document in open_corpus(config(tmp_path)).documents()]

    def ids():
        of_split = {"train": [], "val": []}
        for encoded in encode_documents(open_corpus(config(tmp_path)).documents(), tokenizer):
            of_split[encoded.split] += encoded.ids.tolist()
        return list(of_split.items())

    whole, ids_of_whole = parts(), ids()
    monkeypatch.setattr(text_files, "_MOST_WHOLE", 100)
    monkeypatch.setattr(text_files, "_BLOCK", 1000)
    monkeypatch.setattr(encode, "_BATCH_CHARS", 3000)
    assert parts() == whole
    assert ids() == ids_of_whole


# The folder has 41 files then.
@pytest.mark.parametrize(("limit", "least", "n_workers"), [("_WORTH_KEEPING", 0, 2), ("_MANY_FILES", 41, 1)])
def test_the_survey_of_a_large_corpus_is_kept_until_a_file_changes(
    folder, tmp_path, monkeypatch, limit, least, n_workers
):  # fmt: skip
    (folder / "nul.txt").write_bytes(b"a\0b")
    small = open_corpus(config(folder))
    asked = replace(config(folder), cache_dir=str(tmp_path / "cache"), n_workers=n_workers)
    monkeypatch.setattr(text_files, limit, least)
    monkeypatch.setattr(text_files, "_SURVEYED_AT_ONCE", 20_000)
    for opened in (open_corpus(asked), open_corpus(asked)):
        assert opened.content_hash() == small.content_hash()
        assert opened.skipped == small.skipped == {"binary": 1}
        assert [d.text for d in opened.documents()] == [d.text for d in small.documents()]
        # The second must not read.
        monkeypatch.setattr(text_files, "_facts_of", None)
    monkeypatch.undo()
    monkeypatch.setattr(text_files, limit, least)
    victim = folder / "part0" / "file00.txt"
    before = victim.stat()
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_corpus(asked).content_hash() != small.content_hash()


def test_links_in_circles_end(folder):
    (folder / "part0" / "loop").symlink_to(folder)
    assert len(list(open_corpus(config(folder)).documents())) == 40


def test_every_named_corpus_can_be_opened():
    assert tuple(CORPORA) == NAMED_CORPORA
    assert [open_corpus(DataConfig(path=name)).kind for name in NAMED_CORPORA] == list(NAMED_CORPORA)


def test_stdlib_is_this_interpreters_source():
    """No document is read: the census of the folder is what is looked at."""
    corpus = open_corpus(DataConfig())
    assert corpus.kind == "stdlib"
    files = dict(corpus._files)
    assert files["os.py"].samefile(os.__file__)
    assert "json/decoder.py" in files
    assert not any("site-packages" in key or "__pycache__" in key for key in files)


def test_readmes_are_the_descriptions_of_the_installed_packages():
    corpus = open_corpus(DataConfig(path="readmes"))
    assert corpus.kind == "readmes"
    files = dict(corpus._files)
    text = files["numpy"].read_text()
    assert metadata("numpy")["Description"].strip().splitlines()[-1] in text
    assert len(corpus._files) == len(set(files.values()))
