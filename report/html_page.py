"""Rendering of a template and its values to one HTML page that fetches nothing, with the numbers of its pictures beside
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import jinja2

from ..files import remove_leftovers, write_text
from ..findings.attention_sink import ON_PROBE, SinkReading, chain_group
from ..findings.chain_links import LINKS_BY_BLOCK, peak_of
from ..findings.formatting import format_value
from ..findings.glossary import explained
from ..findings.verdict import Group, scalar
from ..locks import hold_lock
from ..measure.records import RunDir, Snapshot
from ..messages import printable
from ..metrics.quantities import MEASURED, SECTIONS, shown_name
from .csv_files import check_data_folder, data_folder, write_csv_files
from .pictures.style import RUN_COLOURS, THEME
from .sections.chain import LINKS
from .sections.section import Section, csv_texts


def write_page(out: Path, sections: Iterable[Section], make: Callable[[str], str]) -> None:
    """Write a page and the folder of its pictures' numbers; the same values give the same bytes.

    Args:
        out: the page.
        sections: sections with the numbers.
        make: the page's HTML from the name of that folder.

    Raises:
        UsageError: something else stands where the numbers go.
    """
    sections, folder = list(sections), data_folder(out)
    check_data_folder(folder)
    page = make(folder.name)
    with _only_writer(out, folder):
        write_csv_files(folder, csv_texts(sections))
        write_text(out, page)


@contextmanager
def _only_writer(*paths: Path) -> Iterator[None]:
    """Exclude other writers of the page within the context, and remove the leftovers of one that died: pages of a run
    are written at its training's end and by people, maybe at once. Outside of a run's folder no lock is possible.
    """
    run = next((folder for folder in paths[0].resolve().parents[:3] if RunDir.is_run(folder)), None)
    if run is None:
        yield
        return
    with hold_lock(run / ".report.lock"):
        for path in paths:
            remove_leftovers(path.parent, path.name)
        yield


@cache
def _environment() -> jinja2.Environment:
    """Return the templates of this room; each is compiled once, which takes as long as filling it."""
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
        "explained": explained,
    }
    return environment


def render(template: str, **values: Any) -> str:
    """Render a template of this room, in the report's colours."""
    return _environment().get_template(template).render(theme=THEME, **values)


NavigationLink = tuple[str, str, str]
"""Id and title of a section, and its headline."""


def navigation(
    sections: Iterable[Section], moments: Sequence[Snapshot]
) -> tuple[list[NavigationLink], list[NavigationLink]]:
    """Build the links to the sections: the chain of the sink, and the seed's mark with sections of users' own below it.

    Args:
        sections: sections of the page.
        moments: snapshots whose scalars the links show.
    """
    by_id = {section.id: section for section in sections}
    parts: dict[str, list[NavigationLink]] = {"chain": [], "mark": []}
    for name, link in SECTIONS.items():
        if name in by_id:
            parts[link.part].append((name, by_id[name].title, _headline(link.headline, moments)))
    known = {link.id for link in LINKS}
    own = [(section.id, section.title, "") for section in by_id.values() if section.id not in known]
    return parts["chain"], parts["mark"] + own


def _headline(name: str, moments: Sequence[Snapshot]) -> str:
    """Write a scalar at those moments, after its name: for sinks the one on text, if measured; for a link that is
    judged by block the value of the block where it stands out most.
    """
    if not name:
        return ""
    quantity, now = MEASURED[name], moments[-1] if moments else None
    group: Group = "bias"
    if now and quantity.section in ("sink", "gradient"):
        reading = SinkReading.leading(now)
        if quantity.section == "sink":
            group = reading.group
            name = shown_name(reading.mass, now.summary.get(group) or {})
            quantity = MEASURED[name]
        elif reading.group == "bias_text":
            group = reading.group
    elif now and quantity.section in ("neurons", "dominance", "lock"):
        group = chain_group(now)
    found = [
        peak_of(moment, name, group) if name in LINKS_BY_BLOCK else (scalar(moment, name, group), "")
        for moment in moments
    ]
    found = [(value, block) for value, block in found if not isnan(value)]
    moved = len({block for _, block in found}) > 1
    values = " → ".join(
        format_value(value, quantity.format) + (f" in {block}" if block and (moved or i == len(found)) else "")
        for i, (value, block) in enumerate(found, start=1)
    )
    on = "" if group == "bias" else f" {ON_PROBE[group]}"
    return f"{quantity.symbol} {values}{on}".strip() if values else ""


def colour_variable(colour: int | None) -> str:
    """Return the CSS variable of a place among the colours of runs; grey for None."""
    return "var(--muted)" if colour is None else f"var(--run-{colour % len(RUN_COLOURS)})"
