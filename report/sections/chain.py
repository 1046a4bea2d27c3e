"""Every section of both pages, in causal order.

Aggregation makes the first token's variance stand out, super neurons amplify it, one channel of its state dominates,
its keys lock onto the queries' direction, and a sink forms. The seed's mark runs below: the direction that the newborn
model gave all states, how far they contract onto it, the tokens that it favours, and how long that lasts.
"""

from __future__ import annotations

from .contraction import CONTRACTION
from .direction import DIRECTION
from .dominance import DOMINANCE
from .lineage import LINEAGE
from .link import Link
from .lock import LOCK
from .loss import LOSS
from .neurons import NEURONS
from .persistence import PERSISTENCE
from .preference import PREFERENCE
from .section import Section
from .sink import SINK
from .snapshot_view import SnapshotView
from .training_view import TrainingView
from .value_aggregation import AGGREGATION

LINKS: tuple[Link, ...] = (
    LOSS,
    AGGREGATION,
    NEURONS,
    DOMINANCE,
    LOCK,
    SINK,
    DIRECTION,
    CONTRACTION,
    PREFERENCE,
    PERSISTENCE,
    LINEAGE,
)
"""Both pages, the links between their sections and the names of CSV files come from this table."""


def sections_over_training(view: TrainingView) -> list[Section]:
    """The sections of the page of runs, in its order."""
    return [section for link in LINKS if (section := link.section_over_training(view)) is not None]


def sections_in_snapshot(view: SnapshotView) -> list[Section]:
    """The sections of the page of a snapshot, in its order."""
    return [section for link in LINKS if (section := link.section_in_snapshot(view)) is not None]
