"""The numbers of a page, as the CSV files beside it hold them."""

import csv


def rows(folder, name, **where):
    """Rows of a page's CSV that have these values; the page lies in the folder."""
    with (folder / "report-data" / name).open(encoding="utf-8", newline="") as f:
        return [row for row in csv.DictReader(f) if all(row[key] == str(value) for key, value in where.items())]


def values(folder, name, **where):
    """Their values, in the order of the file; NaN where one is missing."""
    return [float(row["value"] or "nan") for row in rows(folder, name, **where)]
