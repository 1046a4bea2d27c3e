"""Bits per byte of a text: the information that a model needs to predict it, over its UTF-8 bytes, for any
tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..data.tokenizer import TextTokenizer
from ..errors import UsageError
from ..files import user_path
from ..models.decoder import Decoder
from .windows import Window, score


@dataclass(frozen=True)
class Text:
    """A text in windows of tokens, each of which is predicted once."""

    windows: list[Window]
    n_bytes: int

    def bits_per_byte(self, model: Decoder, batch_size: int) -> float:
        """Compute the summed −log₂ p of its tokens over its bytes."""
        scores = score(model, self.windows, batch_size)
        return -sum(float(one.log_probs.sum()) for one in scores) / math.log(2) / self.n_bytes


def text_windows(tokens: list[int], first: int, length: int, stride: int) -> list[Window]:
    """Cut windows of at most ``length`` tokens that predict each of ``tokens`` once, the first from the token
    ``first``.

    The first window predicts as many tokens as it reads; each later one advances by ``stride``, predicts that many, and
    reads ``length − stride`` tokens before them.
    """
    read = [first, *tokens]
    windows, done = [], 0
    while done < len(tokens):
        end = min(len(tokens), done + (stride if done else length))
        # Token i of the text is read at i + 1 and predicted from i.
        windows.append(Window(read[max(0, end - length) : end], tokens[done:end]))
        done = end
    return windows


def first_token(tokenizer: TextTokenizer) -> int:
    """Return the token before a text: the end of a previous text, or the token that the tokenizer puts before a text.

    Raises:
        UsageError: the tokenizer has neither.
    """
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    if tokenizer.before_text:
        return tokenizer.before_text[0]
    raise UsageError(
        f"data.tokenizer {tokenizer.name}: it has no end-of-text token and puts none before a text, after which eval "
        "would read; give one that has, or leave eval.tasks and eval.texts out"
    )


def read_text(file: str, most_bytes: int) -> str:
    """Read the beginning of a text, whole characters of at most ``most_bytes`` bytes.

    Raises:
        UsageError: the file is missing, unreadable, not UTF-8, or empty.
    """
    path = user_path(file)
    try:
        with Path(path).open("rb") as opened:
            content = opened.read(most_bytes + 4)
    except OSError as error:
        raise UsageError(f"eval.texts has {file!r}: {error.strerror}; give a text file") from None
    cut = min(len(content), most_bytes)
    if cut < len(content):
        while cut and content[cut] & 0xC0 == 0x80:  # the middle of a character
            cut -= 1
    try:
        text = content[:cut].decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"eval.texts has {file!r}: byte {error.start} is no UTF-8; give a text file") from None
    if not text:
        raise UsageError(f"eval.texts has {file!r}: there is no text in it; give more, or leave it out")
    return text


def prepare_text(text: str, tokenizer: TextTokenizer, length: int, stride: int | None) -> Text:
    """Cut a text into windows of ``length`` tokens; ``stride`` as in :func:`text_windows`, by default ``length``."""
    tokens = tokenizer.encode([text])[0].tolist()
    windows = text_windows(tokens, first_token(tokenizer), length, stride or length)
    return Text(windows, len(text.encode("utf-8")))
