"""One self-contained HTML page of one run over training, or of several side by side; and the same rows as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import strict
from ..measure.records import RunDir
from .history import Story, number, printable, ranks, read_stories, when
from .html import chain_links, write_page
from .pictures.style import short
from .sections.of_runs import FAVOURITES, one_line, sections
from .snapshot_page import build_snapshot_page, snapshot_page
from .tables import format_value, shown_columns


def build_report(runs: Sequence[RunDir], out: Path) -> None:
    """Write the report of ``runs`` to ``out``: one HTML page that fetches nothing; the same input gives the same bytes.

    Beside it stands a folder with the numbers of its pictures. Where ``out`` is the one run's own report, the page of
    its newest snapshot is written too.

    Raises:
        RunError: a file of a run is damaged; the message names it.
        UsageError: no run was given, matplotlib is missing, or something stands where the numbers go.
    """
    stories = read_stories(runs)
    told = sections(stories)
    if len(runs) == 1 and out == runs[0].report and stories[0].snapshots:
        newest = stories[0].last or stories[0].first
        assert newest is not None
        build_snapshot_page(runs[0].snapshot(newest.step))
    moments = [snapshot.bias for _, snapshot in stories[0].moments] if len(stories) == 1 else []
    write_page(
        "report.html.j2",
        out,
        told,
        stories=stories,
        strips=[_key_figures(story) for story in stories],
        columns=shown_columns([row for story in stories for row in story.rows]),
        favourites=[favourites(story) for story in stories],
        certificates=[_certificate(story) for story in stories],
        chain=chain_links(told, moments),
        pages=[
            (name if len(stories) == 1 else f"{story.name}, {name}", link)
            for story in stories
            for name, link in _pages(story, out)
        ],
    )


def _pages(story: Story, out: Path) -> list[tuple[str, str]]:
    """(name, link) of the pages of single snapshots that stand below the folder of ``out``."""
    links = []
    for snapshot in story.snapshots:
        page = snapshot_page(story.run.snapshot(snapshot.step)).resolve()
        if page.is_file() and page.is_relative_to(out.resolve().parent):
            links.append((when(snapshot), page.relative_to(out.resolve().parent).as_posix()))
    return links


def summarise(runs: Sequence[RunDir]) -> dict[str, Any]:
    """What the report says, as JSON: per run its identity and its rows; a value that is not finite becomes None."""
    return {
        "runs": [
            {
                "path": str(story.run.path),
                "name": story.name,
                "digest": story.birth.get("digest"),
                "init_seed": story.birth.get("init_seed"),
                "data_seed": story.birth.get("data_seed"),
                "probe_seed": story.birth.get("probe_seed"),
                "n_params": story.birth.get("n_params"),
                "corpus": story.birth.get("data"),
                "final_step": max([*story.metrics, *(s.step for s in story.snapshots)], default=0),
                "rows": strict(story.rows),
            }
            for story in read_stories(runs)
        ]
    }


def _key_figures(story: Story) -> list[tuple[str, str, str]]:
    """(name, value, what to judge it by) of the strip below the title."""
    bias = [snapshot.bias for snapshot in story.snapshots]
    now: Mapping[str, float] = bias[-1] if bias else {}

    def show(key: str, spec: str = ".3f") -> str:
        return format_value(now.get(key), spec)

    steps, losses = story.series("val/loss")
    unigram = (story.birth.get("data") or {}).get("unigram_entropy")
    ratio = show("preference_ratio", "ratio")
    if len(bias) > 1:
        ratio = f"{format_value(bias[0].get('preference_ratio'), 'ratio')} → {ratio}"
    text = story.snapshots[-1].summary.get("bias_text", {}) if story.snapshots else {}
    on_text = f"; text probe {format_value(text['sink_mass'], '.3f')}" if "sink_mass" in text else ""
    loss = (
        "Validation loss",
        format_value(losses[-1] if losses else None, ".3f"),
        f"unigram entropy {format_value(unigram, '.3f')}, nats per token" + (f"; step {steps[-1]:,}" if steps else ""),
    )
    return [
        *([loss] if story.birth or losses else []),
        ("Alignment", show("alignment"), f"with the seed direction; stranger {show('alignment_stranger')}"),
        ("Rank persistence", show("rank_persistence"), f"ρ to birth; stranger {show('rank_persistence_stranger')}"),
        ("Preference ratio", ratio, "V · max p̄, birth → now; 1 is none"),
        ("Sink mass", show("sink_mass"), f"on position 0; uniform {show('sink_uniform')}{on_text}"),
    ]


def _certificate(story: Story) -> list[tuple[str, str]]:
    """(name, value) of the birth certificate, flat; what it does not hold is left out. Where there is none, of what was
    measured."""
    birth = story.birth
    if not birth:
        told = story.snapshots[-1].summary
        return [(name, printable(_flat(told[name]))) for name in ("source", "model", "probe") if name in told]
    lines = {key: birth.get(key) for key in ("digest", "init_seed", "data_seed", "probe_seed", "created")}
    lines["parameters"] = birth.get("n_params")
    lines |= {group: birth.get(group) for group in ("model", "data", "versions", "code")}
    return [(name, printable(_flat(value))) for name, value in lines.items() if value is not None]


def _flat(value: Any) -> str:
    """A value of a certificate in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_flat, value))
    large = isinstance(value, int) and abs(value) >= 100_000
    return f"{value:,}" if large else str(value)


def favourites(story: Story) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(title, heading of the last column, rows) of the ranked lists: birth's favourites and today's."""
    lists = []
    by_time = dict(story.moments)
    for now, snapshot in story.moments:
        size = snapshot.summary.get("vocab_size", math.nan)
        other = by_time.get(not now)
        prob = other.arrays.get("mean_prob") if other else None
        elsewhere = None if prob is None else ranks(prob)
        rows = [
            {
                "rank": token["rank"],
                "text": short(one_line(token["text"]), 32),
                "id": token["id"],
                "ratio": number(token.get("p")) * size,
                "share": number(token.get("argmax_share")),
                "other": math.nan if elsewhere is None else float(elsewhere[token["id"]]),
            }
            for token in snapshot.summary.get("top_tokens", [])[:FAVOURITES]
        ]
        title = f"Now, {when(snapshot)}" if now else "At birth"
        lists.append((title, "" if elsewhere is None else "rank at birth" if now else "rank now", rows))
    return lists
