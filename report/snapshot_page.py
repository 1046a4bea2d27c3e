"""The page of one snapshot: every block, head and position of one measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import find_folder, finite_or_nan
from ..findings.chain_links import peaks_by_block
from ..findings.formatting import format_value, steps_near
from ..findings.run_history import RunHistory
from ..findings.verdict import Group
from ..measure.records import RunDir, Snapshot, step_of
from ..messages import printable
from ..models.exchange.gguf_header import kinds_in_words
from .charts.chart_page import page_styles
from .charts.stills import still
from .html_page import navigation, render, write_page
from .sections.chain import sections_in_snapshot
from .sections.snapshot_view import SnapshotView
from .verdicts import MARKS, legend_of_marks, snapshot_figures, snapshot_verdicts


def build_snapshot_page(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the snapshot in ``folder``, by default into it, and return where it is.

    Raises:
        RunError: a file of the snapshot is damaged; the message names it.
        UsageError: something stands where the page's numbers go, or a run's snapshot lies elsewhere and no ``out`` is
            given.
    """
    if out is None and not lies_in_its_run(folder):
        raise UsageError(f"{folder}: leads out of its run, to {folder.resolve()}, where nothing is written; give --out")
    snapshot = Snapshot.read(folder)
    out = snapshot_page(folder) if out is None else out
    whole = folder.resolve()
    owner = whole.parent.parent if whole.parent.name == "snapshots" else None
    name = printable(_model_name(snapshot) or whole.name if owner is None else owner.name)
    history = _history(snapshot, RunDir(owner) if owner is not None and RunDir.is_run(owner) else None)
    view = SnapshotView(name, snapshot, history.start)
    sections = sections_in_snapshot(view)
    inside = owner is not None and RunDir.is_run(owner) and out == snapshot_page(folder)
    found = snapshot_verdicts(history)
    values: dict[str, Any] = {
        "name": name,
        "when": history.start.step_in_words(snapshot.step),
        "verdicts": found,
        "marks": {tone: mark for tone, (mark, _) in MARKS.items()},
        "legend": legend_of_marks(found),
        "strip": snapshot_figures(snapshot),
        "linked": {section.id for section in sections},
        "chain": navigation(sections, [snapshot]),
        "about": _about(snapshot),
        "unseen": [printable(str(place)) for place in snapshot.summary.get("unseen") or []],
        "not_measured": [printable(str(reason)) for reason in snapshot.summary.get("not_measured") or []],
        "report": "../../report.html" if inside else "",
        "scalars": _scalars(snapshot),
        "panels": {picture.id: view.panel(picture) for section in sections for picture in section.pictures},
        "still": still,
        "styles": page_styles(),
    }
    write_page(out, sections, lambda data: render("snapshot.html.j2", sections=sections, data=data, **values))
    return out


def _model_name(snapshot: Snapshot) -> str:
    """Return the model's name for titles: the last part of its source, or "" if that is unknown."""
    source = str(snapshot.summary.get("source", ""))
    return source.rstrip("/").rpartition("/")[2]


def _history(snapshot: Snapshot, run: RunDir | None) -> RunHistory:
    """Return the history of one snapshot, together with the start of its run if it belongs to one."""
    alone = RunHistory.of_snapshot(snapshot)
    if run is None or not run.birth.exists():
        return alone
    first = [Snapshot.read(run.snapshot(0))] if snapshot.step > 0 and run.snapshot(0).is_dir() else []
    return replace(alone, birth=run.read_birth(), snapshots=[*first, snapshot])


def snapshot_page(folder: Path) -> Path:
    """Return the path of the page of the snapshot in ``folder``."""
    return find_folder(folder) / "report.html"


def lies_in_its_run(folder: Path) -> bool:
    """Return False if a link leads from a run to this snapshot elsewhere: a run of others is followed, not written
    through.
    """
    snapshots = folder.absolute().parent
    return snapshots.name != "snapshots" or folder.resolve().is_relative_to(snapshots.parent.resolve())


def find_snapshot(run: RunDir, step: int, asked: str) -> Path:
    """Return the folder of a run's snapshot of ``step``; a UsageError, which begins with ``asked``, names the existing
    steps.
    """
    folder = run.snapshot(step)
    if folder not in (folders := run.snapshot_folders()):
        there = steps_near(map(step_of, folders), step)
        raise UsageError(f"{asked}: {run.path} has no snapshot of that step; there are: {there}")
    return folder


def _scalars(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Write every scalar, beside those that hide blocks the block where they stand out."""
    groups: tuple[Group, ...] = ("bias", "bias_text")
    peaks = {f"{group}/{name}": peak for group in groups for name, peak in peaks_by_block(snapshot, group).items()}
    found = []
    for key, value in snapshot.scalars().items():
        text = format_value(finite_or_nan(value), ".6g")
        if key in peaks:
            most, block = peaks[key]
            text += f" ({format_value(most, '.6g')} {'in the embeddings' if block == 0 else f'in block {block}'})"
        found.append((key, text))
    return found


def _about(snapshot: Snapshot) -> str:
    """Describe in one line the model, the types that its weights are stored in, and the probes."""
    summary: dict[str, Any] = snapshot.summary
    probe, texts = summary.get("probe") or {}, summary.get("probe_text") or {}
    stored = summary.get("stored_kinds") or {}
    parts = [
        str(summary["source"]) if "source" in summary else "",
        f"blocks {summary.get('n_layers', '?')}, heads {summary.get('n_heads', '?')}",
        f"vocabulary {finite_or_nan(summary.get('vocab_size')):,.0f}",
        f"stored as {kinds_in_words(stored)}" if stored else "",
        f"{probe.get('n_sequences', '?')} sequences of {probe.get('seq_len', '?')} random tokens"
        + (f" from the {probe['n_tokens']:,} of its tokenizer" if "n_tokens" in probe else ""),
        f"{texts['n_sequences']} sequences of {texts['seq_len']} tokens of text" if texts else "",
        f"measured in {probe['dtype']}" if "dtype" in probe else "",
    ]
    return printable("; ".join(part for part in parts if part))
