import numpy as np
import pytest

from birthmark.data.backcopy import BackCopy
from birthmark.data.batches import FixedWindows, uniforms
from birthmark.data.probes import N_CONTROLS, bos_controls, passage_probe, random_probe, text_ids, text_probe
from birthmark.data.tokenizer import train_bpe
from birthmark.errors import UsageError


def test_first_rows_of_a_larger_probe_are_the_smaller_probe():
    large = random_probe(1000, 64, 33, probe_seed=5)
    assert large.shape == (64, 33)
    assert large.dtype == np.int64
    for n in (1, 7, 63):
        assert np.array_equal(random_probe(1000, n, 33, probe_seed=5), large[:n])


def test_seeds_differ():
    assert not np.array_equal(random_probe(1000, 4, 32, 0), random_probe(1000, 4, 32, 1))


@pytest.mark.parametrize("vocab_size", [2, 7, 1000])
def test_uniform_over_the_whole_vocabulary(vocab_size):
    probe = random_probe(vocab_size, 500, 128, probe_seed=1)
    counts = np.bincount(probe.ravel(), minlength=vocab_size)
    assert len(counts) == vocab_size
    expected = probe.size / vocab_size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < vocab_size - 1 + 5 * np.sqrt(2 * (vocab_size - 1))


def test_rows_and_positions_are_independent():
    u = random_probe(1 << 20, 256, 64, probe_seed=0) / 2**20 - 0.5
    correlation = (u @ u.T) / (u**2).sum(1).mean()
    off_diagonal = correlation[~np.eye(256, dtype=bool)]
    assert np.abs(off_diagonal).max() < 6 / np.sqrt(64)
    assert abs(off_diagonal.mean()) < 0.01


def test_random_tokens_of_a_tokenizer(word_tokenizer):
    """Rows of a padded table that no text reads are not drawn; where there are none, nothing changes."""
    ids = text_ids(word_tokenizer, 512)
    probe = random_probe(512, 64, 32, 0, ids)
    assert set(probe.ravel().tolist()) == set(range(270))
    assert probe.dtype == np.int64
    assert np.array_equal(random_probe(512, 5, 32, 0, ids), probe[:5])
    assert text_ids(word_tokenizer, 270) is None
    assert text_ids(None, 512) is None
    # A table of fewer rows than the tokenizer has tokens.
    assert text_ids(word_tokenizer, 60) is None


def test_controls_of_bos(word_tokenizer):
    random_NT = random_probe(270, 40, 6, 0)
    text_NT = np.concatenate([np.full((40, 1), 269), random_NT], 1)
    found = bos_controls(word_tokenizer, random_NT, text_NT)
    assert found["bos"].shape == (N_CONTROLS, 6)
    assert (found["bos"][:, 0] == 269).all()
    assert np.array_equal(found["bos"][:, 1:], random_NT[:N_CONTROLS, :-1])
    assert np.array_equal(found["text_without_bos"], random_NT[:N_CONTROLS])
    # Text that does not begin with BOS is text without it already.
    assert set(bos_controls(word_tokenizer, random_NT, random_NT)) == {"bos"}
    assert set(bos_controls(word_tokenizer, random_NT, None)) == {"bos"}
    assert bos_controls(train_bpe(["ab ab"], 258), random_NT, text_NT) == {}


def test_shares_nothing_with_data_of_the_same_seed():
    data = uniforms("backcopy", "train", 0, first=0, shape=(64, 65))
    assert not np.isin(uniforms("probe", 0, first=0, shape=(64, 64)), data).any()


def test_known_values():
    """A probe is part of what a stored measurement means; its tokens may not change unnoticed."""
    assert random_probe(50_000, 1, 4, probe_seed=0).tolist() == [[36361, 4950, 43803, 25680]]


def test_text_probe(make_tokens):
    val = FixedWindows(make_tokens(101), seq_len=10, vocab_size=101)
    assert val.n_samples == 10
    assert np.array_equal(text_probe(val, 3, 4), [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])
    with pytest.raises(UsageError, match=r"holds 10 of 4 tokens; raise data\.val_fraction"):
        text_probe(val, 11, 4)
    with pytest.raises(UsageError, match=r"model\.max_seq_len"):
        text_probe(val, 3, 11)
    assert text_probe(BackCopy(16, 8, 0, "val"), 1000, 8).shape == (1000, 8)


def test_passages_begin_as_the_tokenizer_has_it(word_tokenizer, tmp_path):
    texts = {"a.md": "one two three " * 40, "b.txt": "x", "c.py": "# licence, licence\nfive = 6\n" * 9}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "d.py").write_text(texts["c.py"])
    assert word_tokenizer.before_text == [269]
    probe = passage_probe(str(tmp_path), word_tokenizer, 6, 8, 270)
    assert probe.shape == (6, 8)
    assert probe.dtype == np.int64
    assert (probe[:, 0] == 269).all()
    assert len({tuple(row) for row in probe.tolist()}) == 6
    read = [word_tokenizer.decode(row[1:]) for row in probe]
    # One of each document first; the second file is too short, and the fourth the same as the third.
    assert texts["a.md"].startswith(read[0])
    assert texts["c.py"].startswith(read[1])
    assert all(any(part in text for text in texts.values()) for part in read)
    assert np.array_equal(passage_probe([str(tmp_path / "a.md"), str(tmp_path)], word_tokenizer, 2, 8, 270), probe[:2])
    with pytest.raises(UsageError, match=r"different passages of 7 tokens, and 500 are asked for"):
        passage_probe(str(tmp_path), word_tokenizer, 500, 8, 270)
    with pytest.raises(UsageError, match="gives token 269, the model has 60"):
        passage_probe(str(tmp_path), word_tokenizer, 2, 8, 60)
    with pytest.raises(UsageError, match=r"no room behind 1 special ones; give a larger seq_len$"):
        passage_probe(str(tmp_path), word_tokenizer, 2, 1, 270)
