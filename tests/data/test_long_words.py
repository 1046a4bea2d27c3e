"""A word of megabytes is cut into pieces of a bounded length; ordinary text is not touched."""

from __future__ import annotations

import random
import string

from birthmark.data.encode import LONGEST_WORD, shortened, text_chunks


def test_pieces_of_a_long_word_are_bounded_and_make_up_the_text():
    rng = random.Random(0)
    word = "".join(rng.choices(string.ascii_letters, k=3 * LONGEST_WORD + 5))
    text = f"before {word} between {'7' * 2 * LONGEST_WORD} {'-_' * LONGEST_WORD} after\n"
    chunks = text_chunks(text)
    assert "".join(chunks) == text
    assert max(map(len, chunks)) == LONGEST_WORD
    assert [len(chunk) for chunk in chunks if set(chunk) <= set(string.ascii_letters)][:4] == [*[LONGEST_WORD] * 3, 5]
    kept = shortened(text)
    assert kept == f"before {word[:LONGEST_WORD]} between {'7' * LONGEST_WORD} {'-_' * (LONGEST_WORD // 2)} after\n"


def test_text_whose_words_are_of_ordinary_length_is_one_chunk_as_before():
    # Long without a space, and yet no word: a tokenizer splits it where letters meet digits and signs.
    encoded = "abc123+/" * 4000
    for text in ("a b\n" * 5000, encoded, "x" * (LONGEST_WORD - 1), ""):
        assert text_chunks(text) == [text]
        assert shortened(text) is text
