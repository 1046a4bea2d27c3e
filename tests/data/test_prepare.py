import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from birthmark.data.backcopy import trigger_mask
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.prepare import prepare
from birthmark.data.tokenised import tokenise
from birthmark.errors import UsageError


@pytest.fixture
def config(folder, tmp_path):
    return DataConfig(path=str(folder), val_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def test_from_corpus_to_batches(config):
    """An epoch is the windows of the slowly encoded documents, each once; validation is theirs in order."""
    data = prepare(config, vocab_size=300, seq_len=16)
    assert data.vocab_size == data.train.vocab_size == data.val.vocab_size == 300
    raw = Tokenizer.from_file(str(data.tokenizer_path))
    for split, source in (("train", data.train), ("val", data.val)):
        stream = []
        for document in open_corpus(config).documents():
            if document.split == split:
                stream += [*raw.encode(document.text).ids, 0]
        expected = [stream[i : i + 17] for i in range(0, len(stream) - 16, 16)]
        assert source.n_tokens == len(stream)
        assert source.n_samples == len(expected)
        samples = source.batch(0, len(expected)).tolist()
        assert (sorted(samples) == sorted(expected)) if split == "train" else (samples == expected)


def test_record_is_json_and_adds_up(config, folder):
    data = prepare(config, vocab_size=300, seq_len=16)
    record = json.loads(json.dumps(data.record))
    assert record["kind"] == "files"
    assert record["documents"]["train"] + record["documents"]["val"] == 40
    assert record["bytes"]["train"] + record["bytes"]["val"] == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )
    assert record["tokens"]["train"] == data.train.n_tokens
    assert data.bytes_per_token == record["bytes"]["val"] / record["tokens"]["val"]
    assert 0 < record["unigram_entropy"] < np.log(300) + 1
    assert data.groups == {}
    assert data.token_texts([0, 1000]) == ["<|endoftext|>", "[1000]"]


def test_validation_text_without_a_token_is_one_line(tmp_path):
    """A tokenizer may give none for white space, and have no end of text."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    (tmp_path / "words.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    (tmp_path / "text.txt").write_text("a b\n" * 200 + " " * 100)
    config = DataConfig(
        path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "words.json"), cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(UsageError, match=r"^data\.path: 0 val tokens do not fill one window"):
        prepare(config, vocab_size=300, seq_len=16)
    assert tokenise(config, 300).tokens[""].facts["bytes_per_token"] is None


def test_validation_text_is_unseen_by_the_tokenizer(config, folder):
    """Words that only validation documents hold never become tokens."""
    probe = prepare(config, vocab_size=300, seq_len=16)
    corpus = open_corpus(config)
    val_texts = {document.text for document in corpus.documents() if document.split == "val"}
    for path in folder.rglob("*"):
        if path.is_file() and path.read_bytes().decode() in val_texts:
            path.write_bytes(path.read_bytes() + b" zqzqzq" * 500)
    data = prepare(config, vocab_size=300, seq_len=16)
    assert data.record["tokenizer_hash"] == probe.record["tokenizer_hash"]
    assert data.record["content_hash"] != probe.record["content_hash"]


def test_data_seed_changes_the_order_and_nothing_else(config):
    one, other = (prepare(replace(config, data_seed=seed), vocab_size=300, seq_len=16) for seed in (0, 1))
    n = one.train.n_samples
    assert not np.array_equal(one.train.batch(0, n), other.train.batch(0, n))
    assert sorted(one.train.batch(0, n).tolist()) == sorted(other.train.batch(0, n).tolist())
    assert np.array_equal(one.val.batch(0, 8), other.val.batch(0, 8))


def test_tokenizer_from_a_file(config, tokenizer, tmp_path):
    path = tmp_path / "own.json"
    path.write_bytes(tokenizer.content)
    config = replace(config, tokenizer=str(path))
    data = prepare(config, vocab_size=512, seq_len=16)
    assert data.vocab_size == 320
    assert data.tokenizer_path == path
    assert data.record["tokenizer_hash"] == tokenizer.sha256
    with pytest.raises(UsageError, match=r"model\.vocab_size: 319 is smaller than the 320 tokens of data\.tokenizer"):
        prepare(config, vocab_size=319, seq_len=16)


def test_backcopy():
    config = DataConfig(path="backcopy", data_seed=3)
    data = prepare(config, vocab_size=64, seq_len=64)
    assert data.bytes_per_token is None
    assert data.tokenizer_path is None
    assert data.train.n_samples is None
    assert data.val.n_tokens is None
    assert data.groups["trigger"] is trigger_mask
    assert not np.array_equal(data.train.batch(0, 32), data.val.batch(0, 32))
    assert data.token_texts([0, 4]) == ["BOS", "a1"]
    record = json.loads(json.dumps(data.record))
    assert record["optimal_loss"] < record["unigram_entropy"] < np.log(64) + 0.1
    assert (data.val.batch(0, 4)[:, 0] == 0).all()
    assert (prepare(replace(config, bos=False), vocab_size=64, seq_len=64).val.batch(0, 4) != 0).all()


def test_fields_of_tables_are_refused_where_no_source_is_one(config, tmp_path):
    text, tokens = str(config.path), str(tmp_path / "a.npy")
    np.save(tokens, np.arange(300, dtype=np.uint16))
    for path in (text, tokens):
        alone = replace(config, path=path, text_field="body")
        source = replace(config, path="stdlib", sources=[SourceConfig(path, text_field="body")])
        for asked in (alone, source):
            with pytest.raises(
                UsageError, match=r"^data\.text_field: 'body' is read of tables only, .* leave the field"
            ):
                prepare(asked, vocab_size=300, seq_len=16)
    for path in (text, tokens):
        with pytest.raises(UsageError, match=r"^data\.max_bad_rows: 3 is read of tables only, "):
            prepare(replace(config, path=path, max_bad_rows=3), vocab_size=300, seq_len=16)


def test_fields_of_tables_are_read_of_some_source_or_of_evaluation_texts(config, tmp_path):
    rows = [
        {"body": f"question {i} of an evaluation, with words that nobody else would write in this order"}
        for i in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, 17])))
    table = SourceConfig(str(tmp_path / "rows.jsonl"), text_field="body")
    mixed = replace(config, path="stdlib", sources=[SourceConfig(str(config.path)), table], max_bad_rows=1, n_workers=1)
    assert prepare(mixed, vocab_size=300, seq_len=16).record["sources"]["rows"]["skipped"] == {"bad": 1}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    searched = replace(config, decontaminate=str(tmp_path / "rows.jsonl"), text_field="body", n_workers=1)
    assert prepare(searched, vocab_size=300, seq_len=16).record["decontaminate"]["n_grams"] > 0
