"""A link of the causal chain: one section in both pages, over training and in one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .section import Section
from .snapshot_view import SnapshotView
from .training_view import TrainingView


@dataclass(frozen=True)
class Link:
    """A link of the causal chain, or a trace of the seed: one section in both pages (`chain.LINKS` lists them)."""

    id: str
    """Of the section; begins the names of its CSV files."""
    title: str
    part: Literal["training", "chain", "mark"]
    """Where it stands: before the chain of the attention sink, in it, or in the seed's mark that runs below it."""
    lede: str
    """What one sees over training."""
    over_training: Callable[[TrainingView, Section], None] = lambda view, section: None
    """Fills its section of the page of runs."""
    snapshot_lede: str = ""
    """What one sees in one snapshot; by default the same."""
    in_snapshot: Callable[[SnapshotView, Section], None] = lambda view, section: None
    """Fills its section of the page of a snapshot."""
    headline: tuple[str, str, str] = ("", "", "")
    """The scalar that says most of it: its name, what it is in a word, and how it is printed."""
    optional: bool = False
    """Whether the page of runs leaves it out where nothing is drawn, instead of saying why."""

    def section_over_training(self, view: TrainingView) -> Section | None:
        """Its section of the page of runs, if it has one."""
        section = Section(self.id, self.title, self.lede)
        self.over_training(view, section)
        return None if self.optional and not (section.pictures or section.notes) else section

    def section_in_snapshot(self, view: SnapshotView) -> Section | None:
        """Its section of the page of a snapshot, if there is something to show."""
        section = Section(self.id, self.title, self.snapshot_lede or self.lede)
        self.in_snapshot(view, section)
        return section if section.pictures or section.listings else None
