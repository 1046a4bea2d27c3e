"""The page of one snapshot: every block, head and position of one measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import find_folder
from ..measure.records import RunDir, Snapshot
from .html_page import navigation, render, write_page
from .key_figures import of_snapshot
from .pictures.style import our_style
from .sections.chain import sections_in_snapshot
from .sections.snapshot_view import SnapshotView
from .text import finite_or_nan, format_value, printable, step_in_words


def build_snapshot_page(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the snapshot in ``folder``, by default into it, and return where it is.

    Raises:
        RunError: a file of the snapshot is damaged; the message names it.
        UsageError: matplotlib is missing, or something stands where the page's numbers go.
    """
    snapshot = Snapshot.read(folder)
    out = snapshot_page(folder) if out is None else out
    whole = folder.resolve()
    owner = whole.parent.parent if whole.parent.name == "snapshots" else None
    name = printable(whole.name if owner is None else owner.name)
    sections = sections_in_snapshot(SnapshotView(name, snapshot))
    inside = owner is not None and RunDir.is_run(owner) and out == snapshot_page(folder)
    values: dict[str, Any] = {
        "name": name,
        "when": step_in_words(snapshot.step),
        "strip": of_snapshot(snapshot),
        "chain": navigation(sections, [snapshot]),
        "about": _about(snapshot),
        "unseen": [printable(str(place)) for place in snapshot.summary.get("unseen") or []],
        "report": "../../report.html" if inside else "",
        "scalars": [(key, format_value(finite_or_nan(value), ".6g")) for key, value in snapshot.scalars().items()],
    }
    with our_style():  # set once, not for each picture
        write_page(out, sections, lambda data: render("snapshot.html.j2", sections=sections, data=data, **values))
    return out


def snapshot_page(folder: Path) -> Path:
    """Where the page of the snapshot in ``folder`` stands."""
    return find_folder(folder) / "report.html"


def find_snapshot(run: RunDir, step: int) -> Path:
    """The folder of a run's snapshot of ``step``; UsageError names those that there are."""
    folder = run.snapshot(step)
    if folder not in run.snapshot_folders():
        there = ", ".join(str(snapshot.step) for snapshot in run.snapshots()) or "none"
        raise UsageError(f"--step {step}: {run.path} has no snapshot of that step; there are: {there}")
    return folder


def _about(snapshot: Snapshot) -> str:
    """What was measured and on what, in a line."""
    summary: dict[str, Any] = snapshot.summary
    probe = summary.get("probe") or {}
    parts = [
        str(summary["source"]) if "source" in summary else "",
        f"blocks {summary.get('n_layers', '?')}, heads {summary.get('n_heads', '?')}",
        f"vocabulary {finite_or_nan(summary.get('vocab_size')):,.0f}",
        f"{probe.get('n_sequences', '?')} sequences of {probe.get('seq_len', '?')} tokens, {probe.get('dtype', '?')}",
    ]
    return printable("; ".join(part for part in parts if part))
