"""From a template and its values to one HTML page that fetches nothing, with the numbers of its pictures beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..files import write_text
from .csv_files import check_data_folder, data_folder, write_csv_files
from .pictures.style import RUN_COLOURS, THEME
from .sections.chain import LINKS
from .sections.section import Section, csv_texts
from .text import format_value, printable, shorten


def write_page(template: str, out: Path, sections: Iterable[Section], **values: Any) -> None:
    """Write a page and the folder of its pictures' numbers; the same values give the same bytes.

    Raises:
        UsageError: something else stands where the numbers go.
    """
    sections, folder = list(sections), data_folder(out)
    check_data_folder(folder)
    page = render(template, sections=sections, data=folder.name, theme=THEME, **values)
    write_csv_files(folder, csv_texts(sections))
    write_text(out, page)


def render(template: str, **values: Any) -> str:
    """HTML of a template of this room."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "printable": printable,
        "value": format_value,
        "colour": colour_variable,
        "shorten": lambda text: shorten(text, 32),
    }
    return environment.get_template(template).render(**values)


def navigation(sections: Iterable[Section], moments: Sequence[Mapping[str, float]]) -> tuple[list[Any], list[Any]]:
    """What leads to the sections: (id, title, its scalar at those moments) of the chain, and of the mark below it."""
    ids = {section.id for section in sections}

    def links(part: str) -> list[tuple[str, str, str]]:
        found = []
        for link in LINKS:
            if link.part == part and link.id in ids:
                key, word, spec = link.headline
                values = " → ".join(format_value(m.get(key), spec) for m in moments if m.get(key) is not None)
                found.append((link.id, link.title, f"{word} {values}".strip() if values else ""))
        return found

    return links("chain"), links("mark")


def colour_variable(run: int) -> str:
    """CSS variable of a run's colour."""
    return f"var(--run-{run % len(RUN_COLOURS)})"
