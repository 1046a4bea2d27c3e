"""From a template and its values to one HTML page that fetches nothing, with the numbers of its pictures beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from ..files import write_text
from .history import printable
from .pictures.style import RUN_COLOURS, THEME, short
from .sections.section import Section, check_data_folder, data_folder, tables, write_tables
from .tables import format_value

#: The chain of the attention sink, and the seed's mark that runs below it: section → the scalar that tells of it, what
#: it is in a word, and how it is printed.
_CHAIN = {
    "aggregation": ("variance_discrepancy", "σ²(0)/σ²", "ratio"),
    "neurons": ("super_neurons", "", ",d"),
    "dominance": ("dominance_first", "max/mean", "ratio"),
    "lock": ("qk_cosine", "cos", ".3f"),
    "sink": ("sink_mass", "mass", ".3f"),
}
_MARK = {
    "direction": ("alignment", "cos", ".3f"),
    "contraction": ("inter", "cos", ".3f"),
    "preference": ("preference_ratio", "V·max p̄", "ratio"),
    "persistence": ("rank_persistence", "ρ", ".3f"),
    "lineage": ("", "", ""),
}


def write_page(template: str, out: Path, sections: Iterable[Section], **values: Any) -> None:
    """Write a page and the folder of its pictures' numbers; the same values give the same bytes.

    Raises:
        UsageError: something else stands where the numbers go.
    """
    sections, folder = list(sections), data_folder(out)
    check_data_folder(folder)
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
        "cut": lambda text: short(text, 32),
    }
    page = environment.get_template(template).render(sections=sections, data=folder.name, theme=THEME, **values)
    write_tables(folder, tables(sections))
    write_text(out, page)


def chain_links(sections: Iterable[Section], moments: list[dict[str, float]]) -> tuple[list[Any], list[Any]]:
    """What leads to the sections: (id, title, its scalar at those moments) of the chain, and of the mark below it."""
    titles = {section.id: section.title for section in sections}

    def links(scalars: dict[str, tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        found = []
        for name, (key, word, spec) in scalars.items():
            if name in titles:
                told = " → ".join(format_value(m.get(key), spec) for m in moments if m.get(key) is not None)
                found.append((name, titles[name], f"{word} {told}".strip() if told else ""))
        return found

    return links(_CHAIN), links(_MARK)


def colour_variable(run: int) -> str:
    """CSS variable of a run's colour."""
    return f"var(--run-{run % len(RUN_COLOURS)})"
