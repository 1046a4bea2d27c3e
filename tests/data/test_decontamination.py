"""Documents that repeat evaluation texts, against sets of tuples of words."""

import random
import re
from types import SimpleNamespace

import pytest

from birthmark.data import decontamination
from birthmark.data.config import DataConfig
from birthmark.data.decontamination import NGrams
from birthmark.data.encode import Document
from birthmark.data.prepare import prepare
from birthmark.data.splitting import duplicates_in_words
from birthmark.data.tokenised import tokenise
from birthmark.errors import UsageError


def slow_ngrams(text, n):
    words = "".join(c for c in text.lower() if c.isalnum() or c.isspace()).split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def random_text(rng, n_words, n_different):
    signs = ["", "", ",", ".", " -- ", "'s", "_", "\n"]
    return "".join(
        f"{rng.choice(['', '(', '“'])}{rng.choice(['wörd', 'WORD', 'Word'])}{rng.randrange(n_different)}"
        f"{rng.choice(signs)}{rng.choice([' ', chr(10), '  '])}"
        for _ in range(n_words)
    )


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("block", [1 << 21, 60])
def test_what_is_found_is_what_sets_of_words_find(n, block, monkeypatch):
    monkeypatch.setattr(decontamination, "_LONGEST", block)
    rng = random.Random(n)
    evaluation = [random_text(rng, rng.randrange(40), 3) for _ in range(6)]
    ngrams = NGrams.of([Document("train", text) for text in evaluation], n)
    expected = set().union(*(slow_ngrams(text, n) for text in evaluation))
    assert len(ngrams) == len(expected)
    found = []
    for _ in range(120):
        text = random_text(rng, rng.randrange(60), rng.choice([4, 5, 40]))
        found.append(ngrams.are_in(Document("train", text)))
        assert found[-1] == bool(slow_ngrams(text, n) & expected)
    assert any(found) or n == 1
    assert not all(found)


@pytest.mark.parametrize("block", [7, 40, 100])
@pytest.mark.parametrize("n_long", [0, 99, 1000])
def test_a_text_without_spaces_is_cut_and_held_once(block, n_long, monkeypatch):
    monkeypatch.setattr(decontamination, "_LONGEST", 100)
    text = f"first second {'a' * n_long} third\n{'b' * n_long}fourth " + "word " * 50
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    found = list(decontamination._words(SimpleNamespace(blocks=lambda: blocks)))
    assert all(found[:-1]), "a part without a word was waited for"
    words = [word for part in found for word in part]
    assert "".join(words) == "".join(text.split())
    assert max(map(len, words)) < 100 + 2 * block
    if n_long < 99:
        assert words == text.split()
    assert {"first", "second", "third"} <= set(words)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "corpus").mkdir()
    rng = random.Random(0)
    for i in range(40):
        words = [f"w{rng.randrange(1000)}" for _ in range(60)]
        if i % 8 == 0:
            words[20:20] = [f"Question{i},", *(f"the{j}" for j in range(12))]
        (tmp_path / "corpus" / f"{i:02d}.txt").write_text(" ".join(words))
    (tmp_path / "questions.txt").write_text(
        "\n".join(f"question{i} " + " ".join(f"The{j}" for j in range(12)) for i in range(0, 40, 16))
    )
    return DataConfig(path=str(tmp_path / "corpus"), val_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def with_texts(config, tmp_path, **fields):
    return DataConfig(**{**vars(config), "decontaminate": str(tmp_path / "questions.txt"), **fields})


@pytest.mark.parametrize("n_workers", [1, 2])
def test_training_documents_are_left_out_and_counted(config, tmp_path, n_workers):
    plain = tokenise(config, 300)
    cleaned = prepare(with_texts(config, tmp_path, n_workers=n_workers), vocab_size=300, seq_len=16)
    evaluation = slow_ngrams((tmp_path / "questions.txt").read_text(), 13)
    dirty = [path.stem for path in (tmp_path / "corpus").iterdir() if slow_ngrams(path.read_text(), 13) & evaluation]
    assert sorted(dirty) == ["00", "16", "32"]
    before, after = plain.tokens[""].facts, cleaned.record
    left_out = after["skipped"]["contaminated"]
    assert 1 <= left_out <= 3
    assert after["documents"] == {"train": before["documents"]["train"] - left_out, "val": before["documents"]["val"]}
    assert after["decontaminate"]["n_grams"] == len(evaluation)
    assert duplicates_in_words(after).endswith(f"{left_out} repeat an evaluation text and are left out of the training")
    # The tokenizer saw none of it either.
    assert after["tokenizer_hash"] != plain.tokenizer.sha256 if plain.tokenizer else False


def test_texts_that_nothing_repeats_change_nothing(config, tmp_path):
    (tmp_path / "questions.txt").write_text(" ".join(f"unheard{i}" for i in range(20)))
    plain = tokenise(config, 300)
    cleaned = tokenise(with_texts(config, tmp_path), 300)
    assert cleaned.shards[""].folder == plain.shards[""].folder
    assert cleaned.tokenizer_path == plain.tokenizer_path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decontaminate": "/no/where"}, "data.decontaminate: '/no/where' does not exist"),
        ({"decontaminate_ngram": 0}, "data.decontaminate_ngram"),
        ({"decontaminate": None, "decontaminate_ngram": 8}, "data.decontaminate_ngram: is not read without"),
        ({"path": "backcopy"}, "data.decontaminate: backcopy has no text"),
    ],
)
def test_wrong_fields_are_one_line(config, tmp_path, fields, message):
    problems = with_texts(config, tmp_path, **fields).problems()
    assert any(problem.startswith(message) for problem in problems), problems


def test_nothing_to_compare_and_nothing_left(config, tmp_path):
    (tmp_path / "questions.txt").write_text("too short a text")
    with pytest.raises(UsageError, match=r"^data\.decontaminate: no text of .* has 13 words"):
        tokenise(with_texts(config, tmp_path), 300)
    whole = " ".join(path.read_text() for path in (tmp_path / "corpus").iterdir())
    (tmp_path / "questions.txt").write_text(re.sub(r"\s+", " ", whole))
    with pytest.raises(UsageError, match=r"^data\.decontaminate: every training document of the corpus repeats"):
        tokenise(with_texts(config, tmp_path), 300)
