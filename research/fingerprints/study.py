"""Fingerprints of models on one bench: how many kin each method finds, and how many strangers it calls kin.

    nice -n 10 python research/fingerprints/study.py [--scale tiny] [--out FOLDER] [--figure PNG]

Six families of small models are born, trained and changed as people change models; every pair is tested by every
method of ``methods.py``. Writes ``results.md`` and ``results.json``, by default beside it, and the picture. ``--only
GROUP`` measures the kin of one change anew, and keeps all other rows of the JSON. ``--pages`` writes page and picture
again from it. ``--scale tiny`` is a rehearsal that measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from birthmark.research.fingerprints.methods import METHODS
from birthmark.research.fingerprints.page import (
    LARGER,
    Cost,
    cost_table,
    costs,
    draw,
    group_table,
    main_table,
    method_table,
)
from birthmark.research.fingerprints.pairs import CHANGES, FULL, TINY, all_pairs
from birthmark.research.fingerprints.results import Row, as_json, rows_of, summaries
from birthmark.trainer.provenance import environment, versions

RESULTS = Path(__file__).parent
FIGURE = RESULTS.parents[1] / "docs" / "img" / "fingerprints-compared.png"


def say(text: str) -> None:
    print(text, flush=True)


def measure(tiny: bool, file: Path, only: Sequence[str]) -> None:
    """Measure everything; the file grows with every family, so that results outlive the process.

    With ``only`` the kin of these changes are measured, and all other rows of the file stay.
    """
    load, start, rows, found = os.getloadavg()[0], time.monotonic(), list[Row](), list[Cost]()
    if only:
        known = json.loads(file.read_text())
        rows = [row for values in known["rows"] if (row := Row(*values)).group not in only]
        found = [Cost(*cost) for cost in known["costs"]]

    def write(line: str) -> None:
        say(line)
        minutes = f"{(time.monotonic() - start) / 60:.1f} min"
        facts: dict[str, Any] = {"load before": f"{load:.1f}", "wall time": minutes}
        facts |= versions() | environment(torch.device("cpu"), None)
        measured = {"rows": as_json(rows), "costs": [list(cost) for cost in found]}
        text = json.dumps({"machine": facts, "row": list(Row._fields), **measured}, ensure_ascii=False)
        file.write_text(text.replace("], [", "],\n[") + "\n", encoding="utf-8")

    for row in rows_of(all_pairs(TINY if tiny else FULL, write, only), METHODS):
        rows.append(row)
    write("costs")
    for cost in () if tiny or only else costs(METHODS):
        found.append(cost)
    write("done")


def write_pages(content: dict[str, Any], out: Path, figure: Path) -> None:
    """Write the Markdown page and the picture of the measurements."""
    rows, found_costs = [Row(*row) for row in content["rows"]], [Cost(*cost) for cost in content["costs"]]
    found = summaries(rows)
    pairs = {relation: sum(row.relation == relation for row in rows) // len(found) for relation in ("kin", "strangers")}
    facts = "; ".join(f"{name} {value}" for name, value in content["machine"].items())
    lines = [
        "# Fingerprints on one bench",
        "",
        "    nice -n 10 python research/fingerprints/study.py",
        "",
        f"{pairs['kin']} pairs of kin, {pairs['strangers']} of strangers. Rates in per cent of the tested pairs, with "
        "95 % intervals (Clopper–Pearson).",
        "",
        f"{facts}.",
        *("", "## Methods", "", *method_table(METHODS)),
        *("", "## All pairs", "", *main_table(found)),
        *("", "## Kin found by group, %, at 1 % of held-out strangers", "", *group_table(found, "power_of")),
        *("", "## Kin found by group, %, by the method's own rule", "", *group_table(found, "own_power_of")),
        *("", "## Strangers called kin by group, %, by the method's own rule", "", *group_table(found, "own_false_of")),
        *("", "## Strangers above the threshold by group, %, of the half that did not decide it", ""),
        *group_table(found, "false_of"),
        *("", f"## Cost of one test ({LARGER.d_model} wide, {LARGER.n_layers} blocks, V {LARGER.vocab_size})", ""),
        *cost_table(found, found_costs),
    ]
    (out / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(found, figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--only", nargs="+", choices=list(CHANGES), default=[], help="measure the kin of these alone")
    parser.add_argument("--pages", action="store_true", help="measure nothing: page and picture from the JSON")
    args = parser.parse_args()
    if args.scale == "tiny" and (args.out == RESULTS or args.figure == FIGURE):
        parser.error("a rehearsal measures nothing: give --out and --figure elsewhere")
    torch.set_num_threads(1)
    file = args.out / "results.json"
    if not args.pages:
        measure(args.scale == "tiny", file, args.only)
    write_pages(json.loads(file.read_text()), args.out, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
