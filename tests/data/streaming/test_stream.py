"""Every document once in a pass, in windows; shuffled in buffers; from any place on as if nothing had been between."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from birthmark.data.config import SourceConfig
from birthmark.data.corpora import open_corpus
from birthmark.data.prepare import prepare
from birthmark.data.streaming import START, StreamPlace
from birthmark.data.tokenizer import TextTokenizer
from birthmark.errors import RunError, UsageError

SEQ_LEN = 16


def stream(config, number, place=START):
    return prepare(config, vocab_size=320, seq_len=SEQ_LEN).train.stream(number, "", place)


def documents(config, file, turn=0, turns=1):
    """Tokens of a file's rows that training reads, by pyarrow and the rule of tables that are on the disk."""
    held_out = {d.text for d in open_corpus(replace(config, stream=False)).documents() if d.split == "val"}
    assert held_out
    tokenizer = TextTokenizer.load(Path(config.tokenizer))
    texts = pq.read_table(Path(str(config.path)) / f"{file}.parquet")["text"].to_pylist()[turn::turns]
    kept = [text for text in texts if text and text not in held_out]
    return np.concatenate([[*ids.tolist(), tokenizer.end_of_text] for ids in tokenizer.encode(kept)])


def windows(tokens, n):
    return [tokens[i * SEQ_LEN : i * SEQ_LEN + SEQ_LEN + 1].tolist() for i in range(n)]


@pytest.mark.parametrize("number", [0, 2])
def test_a_stream_has_the_windows_of_its_file_pass_after_pass(streamed, number):
    tokens = documents(streamed, number)
    twice = np.concatenate([tokens, tokens, tokens])
    n = 8 * (2 * len(tokens) // SEQ_LEN // 8)
    found = stream(streamed, number).take(n).tolist()
    expected = windows(twice, n)
    assert found != expected
    orders = set()
    for i in range(0, n, 8):
        assert sorted(found[i : i + 8]) == sorted(expected[i : i + 8])
        orders.add(tuple(expected[i : i + 8].index(window) for window in found[i : i + 8]))
    assert len(orders) > n // 8 - 3  # another order in each buffer
    other = replace(streamed, data_seed=1)
    assert stream(other, number).take(n).tolist() != found


def test_streams_share_rows_where_there_are_fewer_files_and_files_where_there_are_more(streamed):
    plain = replace(streamed, shuffle_buffer=1)
    # Streams 1 and 4 of five read file 1.
    for number, turn in ((1, 0), (4, 1)):
        tokens = documents(plain, 1, turn, 2)
        n = (len(tokens) - 1) // SEQ_LEN
        assert stream(replace(plain, n_streams=5), number).take(n).tolist() == windows(tokens, n)
    assert stream(replace(plain, n_streams=5), 2).take(3).tolist() == windows(documents(plain, 2), 3)
    # One stream reads all three, each once in a pass.
    files = [documents(plain, i) for i in range(3)]
    n = (sum(map(len, files)) - 1) // SEQ_LEN
    orders = [windows(np.concatenate([files[i] for i in order]), n) for order in permutations(range(3))]
    assert stream(replace(plain, n_streams=1), 0).take(n).tolist() in orders


def test_a_stream_goes_on_from_any_place(streamed):
    config = replace(streamed, n_streams=2)
    whole = stream(config, 0).take(700)
    reader, done = stream(config, 0), 0
    assert reader.place == START
    # Within a buffer, at its end, in the next pass; each from the place of the one before.
    for n in (0, 3, 5, 8, 1, 300, 200):
        assert np.array_equal(reader.take(n), whole[done : done + n])
        done += n
        reader.close()
        reader = stream(config, 0, StreamPlace(*json.loads(json.dumps(reader.place))))
    assert reader.place.epoch > 0
    assert np.array_equal(reader.take(700 - done), whole[done:])
    reader.close()


@pytest.mark.parametrize("buffer", [8, 50, 10_000])
def test_the_last_buffer_of_the_allowed_passes_is_shorter(streamed, buffer):
    config = replace(streamed, epochs=2.0, shuffle_buffer=buffer)
    tokens = documents(config, 1)
    n = (2 * len(tokens) - 1) // SEQ_LEN
    expected = windows(np.concatenate([tokens, tokens]), n)
    reader = stream(config, 1)
    found = reader.take(n)
    last = n // buffer * buffer
    assert sorted(found[last:].tolist()) == sorted(expected[last:])
    assert found.tolist() != expected
    # From places in the last buffer and at its end, as if nothing had been between.
    for done in (last, (last + n) // 2, n):
        place = stream(config, 1)
        place.take(done)
        resumed = stream(config, 1, place.place)
        assert np.array_equal(resumed.take(n - done), found[done:])
        for _ in range(2):
            with pytest.raises(RunError, match=r"^data\.epochs is 2, and stream 1 of .* has been read as often"):
                resumed.take(1)
        place.close()
        resumed.close()
    reader.close()


def test_validation_is_the_first_documents_by_their_hash(streamed):
    data = prepare(streamed, vocab_size=320, seq_len=SEQ_LEN)
    held_out = [d.text for d in open_corpus(replace(streamed, stream=False)).documents() if d.split == "val"]
    tokenizer = TextTokenizer.load(Path(streamed.tokenizer))
    ids = np.concatenate([[*ids.tolist(), tokenizer.end_of_text] for ids in tokenizer.encode(held_out[:5])])
    n = (len(ids) - 1) // SEQ_LEN
    assert data.val.n_samples == n
    assert data.val.batch(0, n).tolist() == windows(ids, n)
    assert data.record["documents"] == {"val": 5}
    assert data.bytes_per_token == sum(len(t.encode()) for t in held_out[:5]) / len(ids)
    assert data.epochs(1000) == {}
    again = prepare(streamed, vocab_size=320, seq_len=SEQ_LEN)
    assert again.record == data.record
    (Path(str(streamed.path)) / "0.parquet").rename(Path(str(streamed.path)) / "00.parquet")
    assert prepare(streamed, vocab_size=320, seq_len=SEQ_LEN).record != data.record


@pytest.mark.parametrize(
    ("n_documents", "mend"),
    [(2, "give more data.val_documents, or"), (500, "give a larger set or data.val_fraction, or")],
)
def test_validation_that_is_too_short_names_what_gives_more(streamed, n_documents, mend):
    with pytest.raises(UsageError, match=rf"val tokens do not fill one window .* {mend} a smaller model\.max_seq_len$"):
        prepare(replace(streamed, val_documents=n_documents), vocab_size=320, seq_len=100_000)


def test_what_ends_is_told(streamed):
    with pytest.raises(RunError, match=r"^data\.epochs is 2, and stream 1 of .* has been read as often"):
        stream(replace(streamed, epochs=2.0), 1).take(2000)
    with pytest.raises(UsageError, match=r"^data\.n_streams: stream 299 of 300 has no text in its part"):
        stream(replace(streamed, n_streams=300), 299).take(1)
    file = Path(str(streamed.path)) / "1.parquet"
    content = file.read_bytes()
    reader = stream(streamed, 1)
    file.write_bytes(content[:600] + bytes(900) + content[1500:])
    with pytest.raises(RunError, match=r"1\.parquet: column 'text' cannot be read after row \d+"):
        reader.take(2000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_field": "body"}, "data.text_field: no column 'body' in "),
        ({"text_field": "n"}, "data.text_field: column 'n' holds int64, not text"),
        ({"path": "hf:nobody/nothing"}, "data.path: cannot open 'hf:nobody/nothing'"),
        ({"path": __file__}, f"data.stream: data.path {__file__!r} has .py; give tables of one kind"),
    ],
)
def test_a_set_that_cannot_be_streamed_is_one_line(streamed, fields, message):
    with pytest.raises(UsageError) as error:
        prepare(replace(streamed, **fields), vocab_size=320, seq_len=SEQ_LEN)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_local_files_are_looked_at_before_they_are_streamed(streamed, tmp_path):
    table, tokens = tmp_path / "rows.csv", tmp_path / "train.bin"
    table.write_text("text,label\nHello there,pos,\nBye,neg,\n")
    tokens.write_bytes(bytes(64))
    for path, message in (
        (str(table), f"{table}: line 2 "),
        ([str(streamed.path), str(tokens)], f"data.stream: data.path {[str(streamed.path), str(tokens)]!r} has .bin"),
    ):
        with pytest.raises(UsageError) as error:
            prepare(replace(streamed, path=path), vocab_size=320, seq_len=SEQ_LEN)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": False}, "data.n_streams: 3 is read by data.stream alone"),
        ({"tokenizer": "bpe"}, "data.stream: 'bpe' would read the whole set first"),
        ({"path": "stdlib"}, "data.stream: 'stdlib' is no set that streams"),
        (
            {"path": "stdlib", "sources": [SourceConfig("hf:a"), SourceConfig("hf:b")]},
            "data.stream: does not know the sizes",
        ),
        ({"end_token": 3}, "data.end_token: 3 is of a corpus on a disk"),
        *(
            (
                {"path": "stdlib", "sources": [SourceConfig("hf:a", 1.0, "web", **field)]},
                f"data.sources, 'web', {name}: {value!r} is of a corpus on a disk",
            )
            for field in ({"end_token": 5}, {"token_dtype": "uint16"}, {"val_path": "hf:b"})
            for name, value in field.items()
        ),
        ({"n_workers": 2}, "data.n_workers: 2 is of a corpus on a disk"),
        ({"timeout_s": 5.0}, "data.timeout_s: 5.0 is of files that are fetched whole"),
        ({"packing": "best_fit"}, "data.stream: reads documents one behind another"),
        ({"bos": "document"}, "data.stream: reads documents one behind another"),
        ({"epochs": 1.5}, "data.epochs: 1.5 is no whole number"),
        ({"n_streams": 0}, "data.n_streams is 0"),
        ({"shuffle_buffer": 0}, "data.shuffle_buffer is 0"),
        ({"val_documents": -1}, "data.val_documents is -1"),
    ],
)
def test_a_stream_that_cannot_be_is_one_line(streamed, fields, message):
    problems = replace(streamed, **fields).problems()
    assert any(problem.startswith(message) and "\n" not in problem for problem in problems), problems
