import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from birthmark.data.batches import FixedWindows, ShardedTokens, TokenWindows
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.packing import PADDING, DocumentBorders, Layout, best_fit, document_starts, in_order, pieces_of
from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.models.linear_cross_entropy import IGNORED

END, BOS = 0, 1
SIZES = st.lists(st.integers(1, 12), max_size=60).map(lambda sizes: np.array(sizes, dtype=np.int64))


def slow_best_fit(sizes, capacity):
    """Piece by piece, the formula itself."""
    bins = []
    for size in sorted(sizes.tolist(), reverse=True):
        rooms = [(capacity - sum(held), i) for i, held in enumerate(bins) if capacity - sum(held) >= size]
        if rooms:
            bins[min(rooms)[1]].append(size)
        else:
            bins.append([size])
    return sorted(bins)


@given(SIZES, st.integers(12, 30))
def test_best_fit_is_best_fit_decreasing(sizes, capacity):
    bins = best_fit(sizes, capacity)
    # Which of two sequences with the same room takes a piece is open: what is full, and how full, is not.
    filled = [sum(held) for held in slow_best_fit(sizes, capacity)]
    assert sorted(np.bincount(bins, weights=sizes).tolist()) == sorted(filled)
    assert sorted(set(bins.tolist())) == list(range(len(set(bins.tolist()))))


@given(SIZES, st.integers(12, 30))
def test_documents_in_order_go_where_the_one_before_went(sizes, capacity):
    room, number, slow = 0, -1, []
    for size in sizes.tolist():
        if size > room:
            room, number = capacity, number + 1
        room -= size
        slow.append(number)
    assert in_order(sizes, capacity).tolist() == slow


def test_many_pieces_are_packed_at_once():
    sizes = np.random.default_rng(0).integers(2, 1025, 300_000)
    bins = best_fit(sizes, 1025)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= 1025
    assert len(filled) < 1.01 * sizes.sum() / 1025


@pytest.mark.parametrize("bos", ["none", "sequence", "document"])
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(2, 9))
def test_every_token_is_a_target_once(bos, lengths, seq_len):
    """But the first of a document, unless a BOS stands before it."""
    starts = np.cumsum([0, *(n + 1 for n in lengths)])
    pieces = pieces_of(starts[:-1], int(starts[-1]), seq_len, bos)
    seen = []
    for start, length, begins in zip(*(array.tolist() for array in pieces), strict=True):
        assert 1 <= length + (begins and bos == "document") <= seq_len + (bos != "sequence")
        assert begins == (start in starts[:-1].tolist())
        first = start + (0 if bos == "sequence" or (bos == "document" and begins) else 1)
        seen += range(first, start + length)
    unseen = set() if bos != "none" else set(starts[:-1].tolist())
    assert sorted(seen) == sorted(set(range(int(starts[-1]))) - unseen)


def corpus(tmp_path, lengths, closed=True):
    """Documents of different tokens, in three files that cut documents anywhere."""
    at, documents = 10, []
    for n in lengths:
        documents.append([*range(at, at + n), END])
        at += n
    if not closed:
        documents[-1].pop()
    tokens = np.array([token for document in documents for token in document], dtype="<u4")
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for path, part in zip(paths, np.array_split(tokens, 3), strict=True):
        part.tofile(path)
    return ShardedTokens(paths, "<u4"), documents


LENGTHS = [3, 5, 1, 0, 40, 2, 7, 4, 6, 3, 1, 12, 9]


@pytest.mark.parametrize("bos", ["none", "sequence", "document"])
def test_concat_is_one_text_with_bos_where_it_is_asked_for(tmp_path, bos):
    tokens, documents = corpus(tmp_path, LENGTHS)
    assert document_starts(tokens, END).tolist() == np.cumsum([0, *map(len, documents[:-1])]).tolist()
    text = [token for document in documents for token in ([BOS, *document] if bos == "document" else document)]
    windows = FixedWindows(
        tokens, 8, 200, cut=Layout("concat", bos, END, BOS).cut(tokens, "x", seq_len=8, of={}, cache_dir=tmp_path)
    )
    if bos == "sequence":
        slow = [[BOS, *text[i : i + 8]] for i in range(0, len(text) - 7, 8)]
    else:
        slow = [text[i : i + 9] for i in range(0, len(text) - 8, 8)]
    assert windows.batch(0, windows.n_samples).tolist() == slow
    assert windows.n_targets(np.arange(3)).tolist() == [8] * 3


@pytest.mark.parametrize("bos", ["none", "sequence", "document"])
@pytest.mark.parametrize("packing", ["documents", "best_fit"])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("token", [BOS, END])
def test_packed_sequences_hold_whole_documents(tmp_path, packing, bos, closed, token):
    tokens, documents = corpus(tmp_path, LENGTHS, closed)
    layout = Layout(packing, bos, END, token)
    cut = layout.cut(tokens, "x", seq_len=16, of={}, cache_dir=tmp_path / "cache")
    source = pickle.loads(pickle.dumps(TokenWindows(tokens, 16, 200, data_seed=1, cut=cut)))
    samples = source.batch(0, source.n_samples)
    assert samples.shape == (source.n_samples, 17)
    real = samples != PADDING
    assert (real[:, :-1] >= real[:, 1:]).all(), "padding stands at the end"
    assert np.array_equal(source.n_targets(np.arange(source.n_samples)), real[:, 1:].sum(1))
    assert cut.padding == pytest.approx(1 - real.mean())
    numbers = layout.borders.documents(torch.from_numpy(samples)).numpy()
    assert ((numbers == -1) == ~real).all()

    # Documents that fit stand whole in one sequence, each a document of its own there.
    found = [document for row in found_by(samples, numbers) for document in row]
    if bos == "sequence":
        assert all(row[0] == token for row in samples.tolist())
        found = [document[n == 0 :] for row in found_by(samples, numbers) for n, document in enumerate(row)]
    for document in documents:
        whole = [token, *document] if bos == "document" else document
        if len(whole) <= 16 and (len(whole) > 1 or bos == "sequence"):
            assert whole in found
    # The long one is in parts, and nothing of it is lost.
    parts = {token for document in found for token in document}
    assert parts - {BOS, END} == set(range(10, 10 + sum(LENGTHS)))


def found_by(samples, numbers):
    """The documents of each sequence."""
    return [
        [[t for t, n in zip(row, number, strict=True) if n == i] for i in range(max(number) + 1)]
        for row, number in zip(samples.tolist(), numbers.tolist(), strict=True)
    ]


def test_a_packing_is_found_once_and_best_fit_pads_least(tmp_path):
    tokens, _ = corpus(tmp_path, LENGTHS)
    padding = {}
    for packing in ("documents", "best_fit"):
        cut = Layout(packing, "none", END, BOS).cut(tokens, "x", seq_len=16, of={}, cache_dir=tmp_path / "cache")
        padding[packing] = cut.padding
        # Validation reads from the first on: it is of all kinds of documents.
        windows = FixedWindows(tokens, 16, 200, cut=cut)
        firsts = [next(t for t in row if t >= 10) for row in windows.batch(0, windows.n_samples).tolist()]
        assert firsts == sorted(firsts)
    assert padding["best_fit"] <= padding["documents"]
    folders = sorted((tmp_path / "cache").glob("packing-*"))
    times = [folder.stat().st_mtime_ns for folder in folders if folder.is_dir()]
    Layout("best_fit", "none", END, BOS).cut(tokens, "x", seq_len=16, of={}, cache_dir=tmp_path / "cache")
    again = [folder.stat().st_mtime_ns for folder in sorted((tmp_path / "cache").glob("packing-*")) if folder.is_dir()]
    assert again == times
    assert len(times) == 2


def test_borders_follow_the_ids():
    def numbers(borders, *ids):
        return borders.documents(torch.tensor([ids]))[0].tolist()

    assert numbers(DocumentBorders(END), 5, 6, END, 7, END, 8, PADDING) == [0, 0, 0, 1, 1, 2, -1]
    assert numbers(DocumentBorders(END), END, 7, 8) == [0, 1, 1]
    assert numbers(DocumentBorders(END, start=BOS), 5, END, BOS, 7, 8, END, 9) == [0, 0, 1, 1, 1, 1, 2]
    # One token for both: the first of a pair ends, the second begins.
    assert numbers(DocumentBorders(END, start=END), END, 5, END, END, 7, END) == [0, 0, 0, 1, 1, 1]
    assert numbers(DocumentBorders(END, start=END), 5, END, 7, END, END, END, END, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert numbers(DocumentBorders(END, start=END), END, END, 7, END) == [0, 1, 1, 1]
    assert numbers(DocumentBorders(END, behind_bos=True), END, 5, END, 7) == [0, 0, 0, 1]
    assert PADDING == IGNORED


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 20), st.integers(2, 20), st.booleans())
def test_documents_of_a_piece_are_those_of_the_whole(lengths, first, n, same):
    start = END if same else BOS
    text = [(d, token) for d, length in enumerate(lengths) for token in (start, *[5] * length, END)][first : first + n]
    # Of a piece that holds no text nobody can say which token begins and which ends.
    assume(any(token == 5 for _, token in text))
    found = DocumentBorders(END, start=start).documents(torch.tensor([[token for _, token in text]]))[0]
    assert found.tolist() == [document - text[0][0] for document, _ in text]


def test_a_tokenizer_without_an_end_packs_nothing():
    with pytest.raises(UsageError, match=r"^data\.packing best_fit: data\.tokenizer has no end-of-text token.*$"):
        Layout("best_fit", "none", None, None)
    with pytest.raises(UsageError, match=r"^data\.bos document: data\.tokenizer has no end-of-text token.*$"):
        Layout("concat", "document", None, 3)
    with pytest.raises(UsageError, match=r"^data\.bos sequence: data\.tokenizer has neither BOS nor an end-of-text"):
        Layout("concat", "sequence", None, None)
    assert Layout("concat", "none", None, None).borders is None


@pytest.fixture
def config(folder, tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.content)
    return DataConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), val_fraction=0.2, tokenizer=str(path))


def test_a_run_reads_what_its_config_asks_for(config, folder):
    plain = prepare(config, vocab_size=400, seq_len=64)
    assert plain.n_targets is None
    assert "packing" not in plain.record
    assert plain.borders == DocumentBorders(end=0)

    asked = replace(config, packing="best_fit", bos="document")
    data = prepare(asked, vocab_size=400, seq_len=64)
    assert data.record["packing"] == "best_fit"
    assert 0 <= data.record["padding"] < 0.1
    assert data.n_targets is not None
    first = data.train.batch(0, 8)
    assert np.array_equal(data.n_targets(np.arange(8)), (first[:, 1:] != PADDING).sum(1))
    # Of two sources it is each one's own.
    both = replace(asked, path=DataConfig.path, sources=[])
    sources = [SourceConfig(str(folder)), SourceConfig(str(folder / "part0"))]
    mixed = prepare(replace(both, sources=sources), vocab_size=400, seq_len=64)
    assert mixed.n_targets is not None
    batch = mixed.train.batch(0, 16)
    assert np.array_equal(mixed.n_targets(np.arange(16)), (batch[:, 1:] != PADDING).sum(1))
    assert 0 <= mixed.record["sources"]["part0"]["padding"] < 1


@pytest.mark.parametrize(
    ("packing", "bos"),
    [("documents", "none"), ("documents", "document"), ("documents", "sequence"), ("best_fit", "none")],
)
def test_in_a_text_probe_the_next_text_stands_in_place_of_padding(config, packing, bos):
    data = prepare(replace(config, packing=packing, bos=bos), vocab_size=400, seq_len=128)
    left = [[token for token in row if token != PADDING] for row in data.val.batch(0, data.val.n_samples).tolist()]
    assert packing == "best_fit" or min(map(len, left)) < 100
    expected = []
    while left:
        row = left.pop(0)
        while len(row) < 100 and left:
            row += left.pop(0)[int(bos == "sequence") :]
        expected += [row[:100]] if len(row) >= 100 else []
    assert data.text_probe(len(expected), 100).tolist() == expected
    with pytest.raises(UsageError, match=rf"text of data\.path (fills|holds) {len(expected)} of 100 tokens; raise"):
        data.text_probe(len(expected) + 1, 100)


def test_a_text_probe_of_a_mixture_shows_nothing_twice(config, folder):
    sources = [SourceConfig(str(folder)), SourceConfig(str(folder / "part0"))]
    mixed = prepare(replace(config, path=DataConfig.path, sources=sources), vocab_size=400, seq_len=64)
    once = [row for one in mixed.val.sources.values() for row in one.batch(0, one.n_samples)[:, :32].tolist()]
    n = len(once)
    assert mixed.val.n_samples > n
    assert sorted(mixed.text_probe(n, 32).tolist()) == sorted(once)
    with pytest.raises(UsageError, match=f"holds {n} of 32 tokens"):
        mixed.text_probe(n + 1, 32)


def test_what_bos_was_before_it_had_names():
    for path, bos, at in [
        ("backcopy", True, "sequence"),
        ("backcopy", False, "none"),
        ("backcopy", "document", "document"),
        ("stdlib", True, "none"),
        ("stdlib", False, "none"),
        ("stdlib", "sequence", "sequence"),
    ]:
        assert DataConfig(path=path, bos=bos).bos_at == at
    problems = lambda **fields: DataConfig(**fields).problems()  # noqa: E731
    assert problems(bos="start") == ["data.bos: 'start' is neither document, sequence, none nor true or false"]
    assert problems(packing="tight") == ["data.packing: 'tight' is none of concat, documents, best_fit"]
    assert problems(path="backcopy", packing="documents") == [
        "data.packing: documents is not read by backcopy, whose sequences are one document each; leave it out"
    ]
