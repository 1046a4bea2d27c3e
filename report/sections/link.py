"""A link of the causal chain: a section in both pages, over training and in one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...metrics.quantity import Quantity
from .declared import draw_in_snapshot, draw_over_training
from .section import Section
from .snapshot_view import SnapshotView
from .training_view import TrainingView


@dataclass(frozen=True)
class Link:
    """A link of the causal chain, or a trace of the seed: a section in both pages (`chain.LINKS` lists them)."""

    id: str
    """Id of the section, with which the names of its CSV files begin."""
    title: str
    lede: str
    """Introduction to the pictures over training."""
    over_training: Callable[[TrainingView, Section], None] = lambda view, section: None
    """Function that draws the link's own pictures for the page of runs."""
    snapshot_lede: str = ""
    """Lede of the section on the page of one snapshot; by default ``lede``."""
    in_snapshot: Callable[[SnapshotView, Section], None] = lambda view, section: None
    """Function that draws the link's own pictures for the page of a snapshot."""
    quantities: Sequence[str] = ()
    """Quantities that the link draws itself or leaves to tables and lists; all other quantities of its section are
    drawn as declared.
    """
    optional: bool = False
    """True if the page of runs leaves the section out when nothing is drawn."""
    explains: bool = True
    """True if a section without a drawing says why."""

    def section_over_training(self, view: TrainingView, declared: Sequence[Quantity]) -> Section | None:
        """Build the link's section of the page of runs, with further ``declared`` quantities; None if it has none."""
        section = Section(self.id, self.title, self.lede)
        self.over_training(view, section)
        draw_over_training(view, section, declared)
        if self.optional:
            return section if section.pictures or section.notes else None
        if self.explains:
            view.explain_if_empty(section)
        return section

    def section_in_snapshot(self, view: SnapshotView, declared: Sequence[Quantity]) -> Section | None:
        """Build the link's section of the page of a snapshot; None if there is nothing to show."""
        section = Section(self.id, self.title, self.snapshot_lede or self.lede)
        self.in_snapshot(view, section)
        draw_in_snapshot(view, section, declared)
        return section if section.pictures or section.listings else None
