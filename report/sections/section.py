"""Parts of a page: sections with their pictures and lists, and the numbers of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...findings.run_history import Start
from ...messages import printable
from ..charts.specs import Drawn
from ..csv_files import LabelledArray, to_csv
from ..table import Table


@dataclass(frozen=True)
class Picture:
    """A picture as it stands in a page."""

    drawn: Drawn
    id: str
    """Id of the picture within its page."""
    caption: str
    file: str
    """Name of the CSV that holds its numbers."""

    @property
    def numbers(self) -> Sequence[LabelledArray]:
        """Numbers of its CSV file."""
        return self.drawn.numbers

    @property
    def name(self) -> str:
        """Name of the picture within the page: its section and its content, since several runs or probes share
        a name.
        """
        return self.file.removesuffix(".csv")


@dataclass(frozen=True)
class Listing:
    """A table of a few rows below the pictures."""

    title: str
    table: Table
    file: str
    numbers: Sequence[LabelledArray]


@dataclass(frozen=True)
class Section:
    """A heading, a sentence about its pictures, and the pictures."""

    id: str
    title: str
    lede: str
    pictures: list[Picture] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks that the reader needs before the pictures, or the reason why there are none."""
    unpictured: list[tuple[str, Sequence[LabelledArray]]] = field(default_factory=list)
    """CSV file and numbers of quantities without pictures, because the page has too many runs."""

    def in_words_of(self, start: Start) -> Section:
        """Return a copy whose words for "birth" are those of another start."""
        if start.is_birth:
            return self
        return replace(
            self,
            title=start.says(self.title),
            lede=start.says(self.lede),
            notes=[start.says(note) for note in self.notes],
            pictures=[replace(picture, caption=start.says(picture.caption)) for picture in self.pictures],
        )

    def add(self, drawn: Drawn, key: str, caption: str, index: int | None = None) -> None:
        """Add a picture. Those of one ``key`` share a CSV; ``index`` makes their ids in the page differ."""
        name = f"{self.id}-{key}"
        id_ = name if index is None else f"{name}-{index}"
        self.pictures.append(Picture(drawn, id_, printable(caption), f"{name}.csv"))

    def add_numbers(self, key: str, numbers: Sequence[LabelledArray]) -> None:
        """Add the numbers of a picture that is not shown to the CSV of its ``key``."""
        self.unpictured.append((f"{self.id}-{key}.csv", numbers))


def csv_numbers(sections: Iterable[Section]) -> dict[str, list[LabelledArray]]:
    """Return the numbers of everything that the sections show, by the name of their CSV file."""
    found: dict[str, list[LabelledArray]] = {}
    for section in sections:
        shown: list[Picture | Listing] = [*section.pictures, *section.listings]
        for item in shown:
            found.setdefault(item.file, []).extend(item.numbers)
        for file, numbers in section.unpictured:
            found.setdefault(file, []).extend(numbers)
    return found


def csv_texts(sections: Iterable[Section]) -> dict[str, str]:
    """Return the CSV text of everything that the sections show, by file name."""
    return {name: to_csv(numbers) for name, numbers in csv_numbers(sections).items()}
