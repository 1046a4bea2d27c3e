import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from birthmark.data import shards as pieces
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.encode import SPLITS
from birthmark.data.shards import SHARD_TOKENS, build_shards, unigram_cross_entropy
from birthmark.data.tokenizer import TextTokenizer
from birthmark.errors import RunError, UsageError


def build(folder, tokenizer, cache, shard_tokens=SHARD_TOKENS):
    corpus = open_corpus(DataConfig(path=str(folder), val_fraction=0.2))
    return build_shards(corpus, tokenizer, cache, val_fraction=0.2, shard_tokens=shard_tokens)


def read_all(shards, split):
    return [
        token
        for path in sorted(shards.folder.glob(f"{split}-*.bin"))
        for token in np.fromfile(path, dtype=shards.meta["dtype"]).tolist()
    ]


@pytest.mark.parametrize("shard_tokens", [1 << 28, 1000, 333])
def test_tokens_are_those_of_the_documents(folder, tokenizer, tmp_path, shard_tokens):
    shards = build(folder, tokenizer, tmp_path / "cache", shard_tokens=shard_tokens)
    raw = Tokenizer.from_str(tokenizer.content.decode())
    for split in SPLITS:
        documents = [
            d for d in open_corpus(DataConfig(path=str(folder), val_fraction=0.2)).documents() if d.split == split
        ]
        expected = [token for document in documents for token in [*raw.encode(document.text).ids, 0]]
        assert read_all(shards, split) == expected
        tokens = shards.tokens(split)
        assert tokens.read(np.array([0]), len(tokens))[0].tolist() == expected
        facts = shards.meta["splits"][split]
        assert facts == {
            "documents": len(documents),
            "tokens": len(expected),
            "bytes": sum(len(document.text.encode()) for document in documents),
        }
        sizes = [f["tokens"] for name, f in shards.meta["files"].items() if name.startswith(split)]
        assert sum(sizes) == len(expected)
        assert all(size == shard_tokens for size in sizes[:-1])
    assert shards.meta["dtype"] == "<u2"


def test_wide_vocabulary_takes_four_bytes(folder, tokenizer, tmp_path):
    narrow = build(folder, tokenizer, tmp_path / "cache")
    wide_tokenizer = TextTokenizer(tokenizer.content)
    wide_tokenizer.__dict__["vocab_size"] = (1 << 16) + 1
    wide = build(folder, wide_tokenizer, tmp_path / "cache")
    assert wide.meta["dtype"] == "<u4"
    assert wide.folder != narrow.folder
    assert read_all(wide, "val") == read_all(narrow, "val")


def test_a_byte_that_changes_makes_others(folder, tokenizer, tmp_path):
    first = build(folder, tokenizer, tmp_path / "cache")
    victim = folder / "part0" / "file00.txt"
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    changed = build(folder, tokenizer, tmp_path / "cache")
    assert changed.folder != first.folder
    assert read_all(changed, "train") + read_all(changed, "val") != read_all(first, "train") + read_all(first, "val")


def test_unigram_entropy(folder, tokenizer, tmp_path):
    shards = build(folder, tokenizer, tmp_path / "cache")
    train, val = read_all(shards, "train"), read_all(shards, "val")
    p = [(train.count(token) + 1) / (len(train) + tokenizer.vocab_size) for token in range(tokenizer.vocab_size)]
    slow = -sum(np.log(p[token]) for token in val) / len(val)
    assert shards.meta["unigram_entropy"] == pytest.approx(slow, rel=1e-12)
    assert unigram_cross_entropy(np.zeros(8), np.ones(8)) == pytest.approx(np.log(8))


def test_ids_outside_the_vocabulary(folder, tokenizer, tmp_path):
    contradicting = TextTokenizer(tokenizer.content)
    contradicting.__dict__["vocab_size"] = 300
    with pytest.raises(RunError, match=r"data\.tokenizer: gave id 3\d\d, its vocabulary has 300"):
        build(folder, contradicting, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("shards-*[!k]"))


_SCRIPT = """
import sys, time
from pathlib import Path
from birthmark.data import shards, tokenizer
from birthmark.data.config import DataConfig
from birthmark.data.corpora import open_corpus

folder, tokenizer_path, cache, mode = sys.argv[1:]
corpus = open_corpus(DataConfig(path=folder, val_fraction=0.2))
shards._PIECE_BYTES = 10_000
if mode == "stop":
    whole = shards.tokenise_piece
    def stop(job):
        if job.number == 3:
            begun = shards._IdsWriter(job, "train")
            print("half", flush=True)
            time.sleep(60)
        return whole(job)
    shards.tokenise_piece = stop
else:
    print("ready", flush=True)
    while not Path(mode).exists():
        time.sleep(0.002)
built = shards.build_shards(corpus, tokenizer.TextTokenizer.load(tokenizer_path), Path(cache), val_fraction=0.2)
print(built.folder, (built.folder / "train-00000.bin").stat().st_ino, flush=True)
"""


def start(python, folder, tokenizer, tmp_path, mode):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.content)
    arguments = [python, "-c", _SCRIPT, str(folder), str(path), str(tmp_path / "cache"), mode]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_goes_on_from_its_finished_pieces(folder, tokenizer, tmp_path, python, monkeypatch):
    for _ in range(2):
        process = start(python, folder, tokenizer, tmp_path, "stop")
        assert process.stdout.readline().strip() == "half"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    left = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert [name.partition("-")[0] for name in left] == ["pieces", "shards"]
    assert ".tmp-" in left[1]
    (finished,) = (tmp_path / "cache").glob("pieces-*")
    assert sorted(path.name for path in finished.glob("*.json") if path.name[0] == "0") == [
        f"{i:06d}.json" for i in range(3)
    ]
    # What each start has begun goes at the next: where a disk is full, they would take all room that is made.
    assert len(list(finished.glob(".000003-train.bin.*"))) == 1
    # One of the finished pieces is damaged after all.
    damaged = finished / "000001-train.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    done_again = []
    whole = pieces.tokenise_piece
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(pieces, "tokenise_piece", lambda job: (done_again.append(job.number), whole(job))[1])
    shards = build(folder, tokenizer, tmp_path / "cache")
    assert done_again[:2] == [1, 3]
    assert 0 not in done_again
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [shards.folder]
    reference = build(folder, tokenizer, tmp_path / "other")
    assert reference.meta == shards.meta


@pytest.mark.parametrize("n_workers", [1, 2])
def test_neither_pieces_nor_processes_change_a_byte(folder, tokenizer, tmp_path, n_workers, monkeypatch):
    whole = build(folder, tokenizer, tmp_path / "one")
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 5_000)
    corpus = open_corpus(DataConfig(path=str(folder), val_fraction=0.2))
    assert len(list(corpus.pieces(5_000))) > 5
    shared = build_shards(corpus, tokenizer, tmp_path / "many", val_fraction=0.2, n_workers=n_workers)
    assert shared.meta == whole.meta
    assert shared.folder.name == whole.folder.name


def test_two_processes_build_one_result(folder, tokenizer, tmp_path, python):
    go = tmp_path / "go"
    processes = [start(python, folder, tokenizer, tmp_path, str(go)) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline().strip() == "ready"
    go.touch()
    results = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert results[0] == results[1]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    assert (Path(results[0][0]) / "train-00000.bin").stat().st_ino == int(results[0][1])
    assert build(folder, tokenizer, tmp_path / "cache").meta == build(folder, tokenizer, tmp_path / "other").meta


def test_a_node_reads_its_own_checked_copy(folder, tokenizer, tmp_path):
    corpus = open_corpus(DataConfig(path=str(folder), val_fraction=0.2))
    options = {"val_fraction": 0.2, "stage_to": tmp_path / "node" / "stage"}
    whole = build(folder, tokenizer, tmp_path / "cache")
    copy = build_shards(corpus, tokenizer, tmp_path / "cache", **options)
    assert copy.folder == tmp_path / "node" / "stage" / whole.folder.name
    assert copy.meta == whole.meta
    assert read_all(copy, "train") == read_all(whole, "train")
    times = {path: path.stat().st_mtime_ns for path in copy.folder.iterdir()}
    build_shards(corpus, tokenizer, tmp_path / "cache", **options)
    assert {path: path.stat().st_mtime_ns for path in copy.folder.iterdir()} == times
    # Damage of the copy is found when it is read again, damage of the shards when they are copied.
    for damaged in (copy.folder / "val-00000.bin", whole.folder / "val-00000.bin"):
        content = bytearray(damaged.read_bytes())
        content[3] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(RunError, match=rf"{re.escape(str(damaged))}: damaged"):
            build_shards(corpus, tokenizer, tmp_path / "cache", **options)
        shutil.rmtree(copy.folder, ignore_errors=True)
    assert not list(options["stage_to"].glob("shards-*[!k]"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"data\.stage_to: cannot write to"):
        build_shards(corpus, tokenizer, tmp_path / "cache", val_fraction=0.2, stage_to=tmp_path / "file" / "x")
