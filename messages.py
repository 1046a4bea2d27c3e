"""Text of unknown origin in messages: on one line, of characters that print, without credentials."""

from __future__ import annotations

import re

from .urls import hide_credentials


def one_line(text: object, limit: int = 200) -> str:
    """Return a text of unknown origin as one line for a message: its first characters, without the credentials of
    URLs, and with unprintable ones escaped.
    """
    # Before the cut, which could leave half of a password without the @ behind it.
    bare = hide_credentials(str(text))
    return printable(" ".join(bare.split())[:limit])


def printable(text: object, kept: str = "\n") -> str:
    """Escape all characters that do not print, but for those ``kept``, so that two names that look alike are alike."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else _escaped(c) for c in text)


def for_terminal(text: object, kept: str = "\n") -> str:
    """Escape all characters that a terminal obeys, but for those ``kept``: whatever holds a stranger's text goes
    through this on its way to one. Spaces, joiners and soft hyphens belong to the orthography of languages.
    """
    return _OBEYED.sub(lambda found: found[0] if found[0] in kept else _escaped(found[0]), str(text))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


#: Control characters, but for the return of a line that ends; breaks of lines, changes of direction, half characters.
_OBEYED = re.compile("\r(?!\n)|[\x00-\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


#: Prefixes that libraries put before their sentence, however deep: "Couldn't deserialize thrift: TProtocolException:
#: …".
_CLASS_NAMES = re.compile(r"\b[A-Za-z_.]{1,100}(?:Error|Exception|Warning|Interrupt)\b(?::\s*)?")

#: Characters of a library's message in which names of classes are looked for.
_LONGEST_REASON = 4096


def reason_of(error: BaseException, otherwise: str = "its library says no more") -> str:
    """Return the message of a library's error in one line, without names of classes; ``otherwise`` if it is empty."""
    said = hide_credentials(str(error))[:_LONGEST_REASON]
    return one_line(_CLASS_NAMES.sub("", said)) or otherwise


def system_words(error: OSError) -> str:
    """Return the reason of a refusal by the system in one line, with the file that it names, if any."""
    said = error.strerror or one_line(error)
    return said if error.filename is None else f"{one_line(error.filename)}: {said}"
