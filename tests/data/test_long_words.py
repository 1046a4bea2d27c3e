"""A word of megabytes is cut into pieces of a bounded length; ordinary text is not touched."""

import random
import string
from itertools import groupby, pairwise

import pytest

from birthmark.data.encode import LONGEST_WORD, stream_chunks, text_chunks


def test_pieces_of_a_long_word_are_bounded_and_make_up_the_text():
    rng = random.Random(0)
    word = "".join(rng.choices(string.ascii_letters, k=3 * LONGEST_WORD + 5))
    text = f"before {word} between {'7' * 2 * LONGEST_WORD} {'-_' * LONGEST_WORD} after\n"
    chunks = text_chunks(text)
    assert "".join(chunks) == text
    assert max(map(len, chunks)) == LONGEST_WORD
    assert [len(chunk) for chunk in chunks if set(chunk) <= set(string.ascii_letters)][:4] == [*[LONGEST_WORD] * 3, 5]
    kept = "".join(stream_chunks([text], shorten=True))
    assert kept == f"before {word[:LONGEST_WORD]} between {'7' * LONGEST_WORD} {'-_' * (LONGEST_WORD // 2)} after\n"


def test_text_whose_words_are_of_ordinary_length_is_one_chunk_as_before():
    # Long without a space, and yet no word: a tokenizer splits it where letters meet digits and signs.
    encoded = "abc123+/" * 4000
    for text in ("a b\n" * 5000, encoded, "x" * (LONGEST_WORD - 1), ""):
        assert text_chunks(text) == [text]
        assert "".join(stream_chunks([text], shorten=True)) == text


def kind(character):
    if character.isspace():
        return "space"
    if character.isalnum():
        return "digit" if character.isdecimal() else "letter"
    return "sign"


def slow_chunks(text, limit):
    """The same of a text that is held whole: words first, then lines between them."""
    out = []
    at = start = 0
    for what, run in groupby(text, kind):
        word = "".join(run)
        if what != "space" and len(word) >= LONGEST_WORD:
            out += between_words(text[at:start], limit)
            out += [word[i : i + LONGEST_WORD] for i in range(0, len(word), LONGEST_WORD)]
            at = start + len(word)
        start += len(word)
    return [chunk for chunk in [*out, *between_words(text[at:], limit)] if chunk]


def between_words(text, limit):
    out, start = [], 0
    while len(text) - start > limit:
        end = start + limit
        for reach in (4096, limit):
            near = [
                i
                for i in range(max(start + 1, end - reach), end)
                if i > 1 and text[i - 1] == "\n" and not text[i - 2].isspace() and not text[i].isspace()
            ]
            if near:
                end = near[-1]
                break
        out.append(text[start:end])
        start = end
    return [*out, text[start:]]


@pytest.mark.parametrize("seed", range(12))
def test_a_text_in_blocks_has_the_chunks_of_the_whole_text(seed):
    rng = random.Random(seed)
    pieces = ["word ", "line\n", "\n", "  indented\n", "äö数", "x" * 3000, "7" * 900, "-_" * 700]
    parts = rng.choices(pieces, weights=[30, 30, 5, 5, 5, 3, 2, 2], k=1500)
    for at in rng.choices(range(len(parts)), k=3):
        parts[at] = rng.choice("a9_") * rng.choice([LONGEST_WORD - 1, LONGEST_WORD, 3 * LONGEST_WORD, 50_000])
    text, limit = "".join(parts), rng.choice([1, 7, 5000, 20_000])
    borders = sorted({0, len(text), *rng.choices(range(len(text)), k=rng.choice([0, 3, 400]))})
    blocks = [text[a:b] for a, b in pairwise(borders)]
    if limit < 10:
        text, blocks = text[:3000], [text[:11], text[11:3000]]
    assert list(stream_chunks(blocks, limit)) == slow_chunks(text, limit)
