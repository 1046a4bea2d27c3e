"""Sets of the Hugging Face hub that people pretrain on, by short names: ``data.path: fineweb-edu``.

Facts are those of the sets' cards on huggingface.co. Every set has a split ``train``, which is read.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..files import user_path


@dataclass(frozen=True)
class NamedSet:
    """One set of the hub."""

    repository: str
    """Its name on the hub."""

    default: str
    """Config that is read if no variant is given; "" for the set's only one."""

    variants: tuple[str, ...]
    """Other configs, as in ``fineweb-edu:sample-10BT``."""

    licence: str
    """Licence of the collection; the texts in it keep the rights of their authors."""

    what: str
    """One line about it."""

    column: str = "text"
    """Column of the text, the default of ``data.text_field``."""


SETS: dict[str, NamedSet] = {
    "c4": NamedSet(
        "allenai/c4",
        "en",
        ("realnewslike", "en.noblocklist", "en.noclean"),
        "ODC-By 1.0",
        "web pages of Common Crawl, April 2019, 305 GB compressed (arXiv 1910.10683)",
    ),
    "fineweb-edu": NamedSet(
        "HuggingFaceFW/fineweb-edu",
        "",
        ("sample-10BT", "sample-100BT", "sample-350BT"),
        "ODC-By 1.0",
        "educational web pages of Common Crawl, 1.3T tokens of GPT-2 (arXiv 2406.17557)",
    ),
    "openwebtext": NamedSet(
        "Skylion007/openwebtext",
        "",
        (),
        "CC0 1.0",
        "web pages that Reddit links to, 8 million, as for GPT-2",
    ),
    "slimpajama": NamedSet(
        "cerebras/SlimPajama-627B",
        "",
        (),
        "those of its parts, which the card lists",
        "RedPajama without duplicates: web, code, books, papers, 627B tokens, 895 GB compressed",
    ),
    "tinystories": NamedSet(
        "roneneldan/TinyStories",
        "",
        (),
        "CDLA-Sharing 1.0",
        "short stories by GPT-3.5 and GPT-4 in the words of small children (arXiv 2305.07759)",
    ),
    "wikitext": NamedSet(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        ("wikitext-2-raw-v1", "wikitext-103-v1", "wikitext-2-v1"),
        "CC BY-SA 3.0 and GFDL",
        "good articles of Wikipedia, a row for each line, 103 or 2 million words (arXiv 1609.07843)",
    ),
}


def hub_path(path: str) -> str:
    """Return ``hf:REPOSITORY[:CONFIG]`` for the name of a set, ``NAME`` or ``NAME:VARIANT``; other paths as they are.

    So is a name that a file or a folder has too, which `name_problem` refuses.
    """
    name, colon, variant = path.partition(":")
    found = SETS.get(name)
    if found is None or user_path(path).exists() or (colon and variant not in (found.default, *found.variants)):
        return path
    config = variant or found.default
    return f"hf:{found.repository}" + (f":{config}" if config else "")


def name_problem(path: str) -> str | None:
    """Say why a path that is a set's name, or like one, names none, with the remedy; None if it is not like one."""
    name, _, variant = path.partition(":")
    found = SETS.get(name)
    if user_path(path).exists():
        if found is None:
            return None
        return f"{path!r} is a file or folder and the name of a set; write './{path}', or 'hf:{found.repository}'"
    if found is not None:
        close = difflib.get_close_matches(variant, found.variants, n=1)
        hint = f"did you mean '{name}:{close[0]}'?" if close else f"'hf:{found.repository}:CONFIG' names any other"
        return f"{variant!r} is no variant of {name}, which has {', '.join(found.variants) or 'none'}; {hint}"
    close = difflib.get_close_matches(name.lower(), SETS, n=1, cutoff=0.75)
    return f"{path!r} does not exist; did you mean {path.replace(name, close[0], 1)!r}?" if close else None
