"""Display of objects: their verdict first, then their figures; as text, and as HTML in a notebook."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..findings.verdict import Verdict
    from ..report.notebook import Captioned
    from ..report.table import Table

#: Characters of a line of text.
_WIDTH = 100


class Displayed(ABC):
    """Base of objects that people look at.

    A class says its title and, as far as it has them, its sentences, figures, table and pictures; text and HTML follow.
    """

    @abstractmethod
    def _title(self) -> str:
        """Name the object in a line."""

    def _sentences(self) -> Sequence[Verdict | str]:
        """Say what its numbers mean, the most important first."""
        return ()

    def _figures(self) -> Sequence[tuple[str, str, str]]:
        """Return few figures: name, number, and what it is to be judged against."""
        return ()

    def _table(self) -> Table | None:
        """Build the table of its numbers."""
        return None

    def _pictures(self) -> Sequence[Captioned]:
        """Return its pictures, which only HTML shows."""
        return ()

    def __repr__(self) -> str:
        from ..report.verdicts import MARKS

        lines = [self._title()]
        for said in self._sentences():
            mark, sentence = ("", said) if isinstance(said, str) else (f"{MARKS[said.tone][0]} ", said.sentence)
            lines += textwrap.wrap(f"{mark}{sentence}", _WIDTH, subsequent_indent="  " if mark else "")
        lines += [f"{name} {number}{f', {beside}' if beside else ''}" for name, number, beside in self._figures()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from ..report.notebook import object_html

        return object_html(self._title(), self._sentences(), self._figures(), self._table(), self._pictures())
