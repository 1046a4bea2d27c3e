"""Tokens at fixed places of every sequence, as a config gives them."""

from __future__ import annotations

from collections.abc import Sequence

#: Word for a token that is drawn anew for each sample, uniform over the vocabulary.
RANDOM = "random"


def read_places(entries: Sequence[str]) -> dict[int, int | str]:
    """Read ``POSITION=TOKEN`` or ``POSITION=random``, by position from 0.

    Raises:
        ValueError: an entry is neither, or a position occurs twice; the message repeats it.
    """
    found: dict[int, int | str] = {}
    for entry in entries:
        position, _, token = str(entry).partition("=")
        if not position.isdecimal() or not (token.isdecimal() or token == RANDOM):
            raise ValueError(f"{entry!r} is neither POSITION=TOKEN nor POSITION={RANDOM}, as in 0=17")
        if int(position) in found:
            raise ValueError(f"position {position} stands twice")
        found[int(position)] = RANDOM if token == RANDOM else int(token)
    return found
