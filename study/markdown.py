"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import DataRow, TableFormat, tabulate


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], n_text: int) -> str:
    """A table whose first ``n_text`` columns are text, to the left, and whose others are numbers, to the right.

    Cells are not padded, so that a changed number changes its own row alone.
    """
    rule = "|" + "|".join(["---"] * n_text + ["---:"] * (len(titles) - n_text)) + "|"
    row = DataRow("| ", " | ", " |")
    # tabulate's own "pipe" format pads cells to align them.
    layout = TableFormat(None, lambda widths, alignments: rule, None, None, row, row, 0, None)
    return tabulate(rows, titles, layout, disable_numparse=True, stralign=None, numalign=None)
