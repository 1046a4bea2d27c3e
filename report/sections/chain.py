"""Sections of both pages, in causal order.

Aggregation makes the first token's variance stand out, super neurons amplify it, one channel of its state dominates,
its keys lock onto the queries' direction, and a sink forms. The seed's mark runs below: the direction that the newborn
model gave all states, how far they contract onto it, the tokens that it favours, and how long that lasts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...metrics.quantities import LOGGED
from ...metrics.quantity import Quantity
from .declared import Link
from .dominance import DOMINANCE, OUTLIERS
from .neurons import NEURONS
from .preference import PERSISTENCE, PREFERENCE
from .section import Section
from .seed_mark import CONTRACTION, DIRECTION, LINEAGE
from .sink import LOCK, SINK
from .snapshot_view import SnapshotView
from .training import LOSS, SPEED, TASK_CURVES
from .training_view import TrainingView
from .value_aggregation import AGGREGATION

GRADIENT = Link(
    "gradient",
    "Gradient sink",
    "What every query attends to gets a gradient from every query: where there is a sink, the loss gradient gathers "
    "there on its way back. Early positions feed more later ones than late positions do, so a newborn model is above "
    "1 too: what counts is the change since birth.",
    optional=True,
)
"""Section that is drawn wholly from its declarations, if snapshots have them."""

LINKS: tuple[Link, ...] = (
    LOSS,
    TASK_CURVES,
    AGGREGATION,
    NEURONS,
    DOMINANCE,
    LOCK,
    SINK,
    OUTLIERS,
    GRADIENT,
    DIRECTION,
    CONTRACTION,
    PREFERENCE,
    PERSISTENCE,
    LINEAGE,
    SPEED,
)
"""Links, from which both pages, the links between their sections and the names of CSV files are made."""

_OWN = "What the run's own metrics measured."


def sections_over_training(view: TrainingView) -> list[Section]:
    """Return the sections of the page of runs, in its order."""
    logged = (quantity for quantity in LOGGED.values() if quantity.section)
    links = _with_declared([*logged, *view.quantities.values()])
    found = (link.section_over_training(view, declared) for link, declared in links)
    return [section.in_words_of(view.start) for section in found if section is not None]


def sections_in_snapshot(view: SnapshotView) -> list[Section]:
    """Return the sections of the page of a snapshot, in its order."""
    links = _with_declared(view.quantities.values())
    found = (link.section_in_snapshot(view, declared) for link, declared in links)
    return [section.in_words_of(view.start) for section in found if section is not None]


def _with_declared(quantities: Iterable[Quantity]) -> list[tuple[Link, list[Quantity]]]:
    """Return every link with the quantities of its section that it does not draw itself; then users' own sections."""
    drawn = {name for link in LINKS for name in link.quantities}
    found: dict[str, list[Quantity]] = {link.id: [] for link in LINKS}
    for quantity in quantities:
        if quantity.name not in drawn:
            found.setdefault(quantity.section, []).append(quantity)
    known = {link.id: link for link in LINKS}
    return [(known.get(name) or _link_of_sections(name, found), declared) for name, declared in found.items()]


def _link_of_sections(name: str, sections: Mapping[str, object]) -> Link:
    """Make the link of a user's section, with an id that no other section has."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", other.lower()).strip("-") for other in sections]
    place = list(sections).index(name)
    number = slugs[:place].count(slugs[place])
    id_ = "-".join(filter(None, ["own", slugs[place], str(number + 1) if number else ""]))
    return Link(id_, name or "Other quantities", _OWN, optional=True)
