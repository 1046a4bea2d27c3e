"""URLs without the credentials in them, and the credentials when a file is asked for.

A URL may hold a user's name and password, and a signature or a token in its query. The config of a run never does: what
a person gives is divided into the bare URL, which is stored, hashed, logged and shown, and the credentials, which this
process keeps and hands to the processes that it starts (:func:`credentials_for_children`). A process that is given the
bare URL alone finds the credentials in the environment (:data:`VARIABLE`).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

#: Environment variable with URLs that have credentials, divided by spaces. Each is for all URLs of its host whose path
#: begins with its own.
VARIABLE = "BIRTHMARK_URL_CREDENTIALS"

#: Parameters of a query that grant access: those of Amazon's and Google's signed URLs, and others by their names.
_SECRET = re.compile(
    r"x-(?:amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|expires|policy|key-pair-id|key|sig|jwt|auth|authorization"
    r"|.*(?:signature|token|secret|passw|pwd|credential|api[_-]?key|auth[_-]?key|session).*",
    re.IGNORECASE,
)
#: Parameters that mean something beside a signature of Azure alone.
_OF_AZURE = frozenset(
    ("sv", "se", "st", "sp", "sr", "spr", "sip", "si", "ss", "srt", "skoid", "sktid", "skt", "ske", "sks", "skv")
)
#: A URL within a text: up to a space, or behind its user up to a quotation mark or a bracket. Its scheme is bounded, as
#: a search from every letter of a long word would otherwise take the square of its length.
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:[^\s/@]*@)?(?:(?!,[A-Za-z][\w+.-]*://)[^\s\"'<>`])*")
#: The begin of a URL up to its host, where that cannot be one: its port, from the first colon on, is no number.
_NO_HOST = re.compile(r"[^\[/?#@][^:/?#@]*:(?!\d*(?:[/?#]|$))[^/?#@]*[/?#]")


class Credentials(NamedTuple):
    """User, password and secret parameters of one URL."""

    user: str
    """User with password, quoted as in the URL."""
    query: tuple[tuple[str, str], ...]
    """Names and values, unquoted."""

    def __bool__(self) -> bool:
        return bool(self.user or self.query)


def divide(url: str) -> tuple[str, Credentials]:
    """Divide a URL into the bare one and its credentials.

    The name of a user without a password is no secret, but for HTTP, where tokens are given that way. A URL without
    credentials is left as it is, to the letter.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, Credentials("", ())
    if _NO_HOST.match(rest) and "@" in rest:
        # A password with a slash in it, at which a host's name ends for every other reader.
        user, _, rest = rest.rpartition("@")
        rest = f"{quote(user, safe=':')}@{rest}"
    address, query_mark, query = rest.partition("?")
    query, hash_mark, fragment = query.partition("#")
    host, slash, path = address.partition("/")
    user, at, name = host.rpartition("@")
    if not at or not (":" in user or scheme.lower() in ("http", "https")):
        user, name = "", host
    pairs = parse_qsl(query, keep_blank_values=True)
    signed = any(field.lower() == "sig" for field, _ in pairs)
    secret = tuple(
        (field, value) for field, value in pairs if _SECRET.fullmatch(field) or (signed and field.lower() in _OF_AZURE)
    )
    if secret:
        hidden = set(secret)
        kept = [pair for pair in pairs if pair not in hidden]
        query, query_mark = urlencode(kept), "?" if kept else ""
    found = Credentials(user, secret)
    if not found:
        return url, found
    return f"{scheme}://{name}{slash}{path}{query_mark}{query}{hash_mark}{fragment}", found


def without_credentials(url: str) -> str:
    """Take the credentials out of a URL; a path is left as it is."""
    return divide(url)[0]


def hide_credentials(text: str) -> str:
    """Take the credentials out of every URL in a text of any kind: a message, a word of a command line."""
    return _URL_IN_TEXT.sub(lambda found: without_credentials(found[0]), text) if "://" in text else text


# ── who may know them ────────────────────────────────────────────────────────────────────────────────────────────────

#: Credentials of the URLs that this process was given, by the bare URL.
_given: dict[str, Credentials] = {}


def keep_credentials(url: str) -> str:
    """Keep a URL's credentials in this process, for :func:`credentials_of`; returns the bare URL."""
    bare, credentials = divide(url)
    if credentials:
        _given[bare] = credentials
    return bare


def keep_credentials_in(text: str) -> str:
    """Keep the credentials of every URL in a text; returns the text with bare URLs."""
    return _URL_IN_TEXT.sub(lambda found: keep_credentials(found[0]), text)


def credentials_of(bare: str) -> Credentials:
    """Find the credentials of a bare URL: those that this process was given, else those of the environment."""
    known = (*_given.items(), *(divide(url) for url in os.environ.get(VARIABLE, "").split()))
    fitting = [(len(start), credentials) for start, credentials in known if _covers(start, bare)]
    # The longest matching path wins; among equally long ones, the first.
    return max(fitting, key=lambda one: one[0], default=(0, Credentials("", ())))[1]


def credentials_for_children() -> dict[str, str]:
    """Make the environment that hands this process's credentials to those that it starts."""
    urls = [with_credentials(bare, credentials) for bare, credentials in _given.items()]
    known = os.environ.get(VARIABLE, "")
    return {VARIABLE: " ".join([*urls, *([known] if known else [])])} if urls or known else {}


def with_credentials(bare: str, credentials: Credentials) -> str:
    """Put credentials into a bare URL: the reverse of :func:`divide`, but for the order of a query.

    Without credentials the URL is left as it is, to the letter.
    """
    if not credentials:
        return bare
    parts = urlsplit(bare)
    query = [*parse_qsl(parts.query, keep_blank_values=True), *credentials.query]
    user = f"{credentials.user}@" if credentials.user else ""
    return urlunsplit((parts.scheme, f"{user}{parts.netloc}", parts.path, urlencode(query), parts.fragment))


def _covers(known: str, asked: str) -> bool:
    """Say if credentials of one bare URL are valid for another: one of the same scheme and host, with a path below."""
    first, second = urlsplit(known), urlsplit(asked)
    return (first.scheme.lower(), first.netloc) == (second.scheme.lower(), second.netloc) and (
        second.path == first.path or second.path.startswith(f"{first.path.rstrip('/')}/")
    )
