"""The page of one snapshot: every block, head and position of one measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..measure.records import RunDir, Snapshot
from .html_page import navigation, write_page
from .rows import check_snapshot
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
    check_snapshot(snapshot, folder)
    out = snapshot_page(folder) if out is None else out
    whole = folder.resolve()
    owner = whole.parent.parent if whole.parent.name == "snapshots" else None
    name = printable(whole.name if owner is None else owner.name)
    sections = sections_in_snapshot(SnapshotView(name, snapshot))
    inside = owner is not None and RunDir.is_run(owner) and out == snapshot_page(folder)
    write_page(
        "snapshot.html.j2",
        out,
        sections,
        name=name,
        when=step_in_words(snapshot.step),
        strip=_key_figures(snapshot),
        chain=navigation(sections, [snapshot.bias]),
        about=_about(snapshot),
        report="../../report.html" if inside else "",
        scalars=[(key, format_value(finite_or_nan(value), ".6g")) for key, value in snapshot.scalars().items()],
    )
    return out


def snapshot_page(folder: Path) -> Path:
    """Where the page of the snapshot in ``folder`` stands."""
    return folder / "report.html"


def find_snapshot(run: RunDir, step: int) -> Path:
    """The folder of a run's snapshot of ``step``; UsageError names those that there are."""
    folder = run.snapshot(step)
    if not folder.is_dir():
        there = ", ".join(str(snapshot.step) for snapshot in run.snapshots()) or "none"
        raise UsageError(f"--step {step}: {run.path} has no snapshot of that step; there are: {there}")
    return folder


def _key_figures(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """(name, value, what to judge it by) of the strip below the title."""
    bias = snapshot.bias
    text = snapshot.summary.get("bias_text", {})

    def show(key: str, spec: str = ".3f") -> str:
        return format_value(bias.get(key), spec)

    on_text = f"; text probe {format_value(text['sink_mass'], '.3f')}" if "sink_mass" in text else ""
    figures = [
        ("Sink mass", show("sink_mass"), f"on position 0; uniform {show('sink_uniform')}{on_text}"),
        ("Dominance", show("dominance_first", "ratio"), f"of position 0; median {show('dominance_median', 'ratio')}"),
        ("Preference ratio", show("preference_ratio", "ratio"), "V · max p̄; 1 is none"),
    ]
    if "alignment" in bias:
        figures += [
            (title, show(key), f"{what}; stranger {show(f'{key}_stranger')}" if f"{key}_stranger" in bias else what)
            for title, key, what in (
                ("Alignment", "alignment", "with the seed direction"),
                ("Rank persistence", "rank_persistence", "ρ to birth"),
            )
        ]
    else:
        figures += [
            ("Contraction", show("inter"), f"across sequences; within them {show('intra')}"),
            ("Effective rank", show("effective_rank", "ratio"), "of the last block's states"),
        ]
    return figures


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
