"""The text that a tokenizer is trained on: even, bounded, and of the whole corpus."""

import random

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from birthmark.data import tokenised
from birthmark.data.tokenised import evenly, train_on_sample
from birthmark.data.tokenizer import train_bpe

_DRAWN = random.Random(0)
#: Each text has words of its own, from alphabets that change on the way.
TEXTS = [
    " ".join("".join(_DRAWN.choices(alphabet, k=5)) for _ in range(20)) + f"\n{number}; "
    for alphabet in ("etaoin", "λογοςи", "的一是不了")
    for number in range(70)
]


def word_bytes(texts):
    """Of different words as the library's own pre-tokenizer makes them, in which a character stands for a byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    return sum(map(len, {word for text in texts for word, _ in split(text)}))


def test_training_subset_is_even_and_deterministic():
    texts = [f"{i:04d}" for i in range(1000)]
    assert list(evenly(texts, 4000, limit=4000)) == texts
    some = list(evenly(texts, 4000, limit=1000))
    assert some == list(evenly(texts, 4000, limit=1000))
    assert len(some) == pytest.approx(250, abs=1)
    assert np.diff([int(text) for text in some]).max() <= 5


@pytest.mark.parametrize("part", [1, 0.9, 0.3, 0.05, 0])
def test_of_many_words_every_second_text_counts_or_every_fourth(tmp_path, part):
    most = int(part * word_bytes(TEXTS))
    stride = next((2**k for k in range(8) if word_bytes(TEXTS[:: 2**k]) <= most), len(TEXTS))
    found = train_on_sample(TEXTS, sum(len(text.encode()) for text in TEXTS), 600, tmp_path, most)
    assert found.content == train_bpe(TEXTS[::stride], 600).content
    if 1 < stride < len(TEXTS):
        assert found.content != train_bpe(TEXTS[: len(TEXTS[::stride])], 600).content
    assert list(tmp_path.iterdir()) == []


def test_what_takes_memory_is_trained_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenised, "_WORTH_A_PROCESS", 0)
    expected = train_bpe(TEXTS, 300).content
    monkeypatch.setattr(tokenised, "train_bpe", None)
    assert train_on_sample(TEXTS, sum(len(t.encode()) for t in TEXTS), 300, tmp_path).content == expected
