"""`birthmark figure`: one figure of a run, for a paper."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser

SUMMARY = "Write one figure of a run over training as PDF, SVG or PNG, at the size that a paper has room for."

_NAMES = (
    "loss, aggregation, neurons, dominance, lock, sink, direction, contraction, preference, persistence, lineage; "
    "or a figure by the name of its CSV file beside the report, such as sink-map."
)


def add_options(parser: Parser) -> None:
    """Add the options that name the run and the figure, and its size and file."""
    parser.add_argument("run", type=str, metavar="RUN", help="Folder that `pretrain` or a callback wrote.")
    parser.add_argument("figure", type=str, metavar="FIGURE", help=_NAMES)
    parser.add_argument("--beside", type=str, nargs="+", metavar="RUN", help="Further runs in the same figure.")
    parser.add_argument("--out", type=str, required=True, metavar="FILE", help="Ends in .pdf, .svg or .png.")
    parser.add_argument("--width", type=float, default=5.0, help="Inches.")
    parser.add_argument(
        "--height", type=float | None, help="Inches; by default in proportion to the width, and the legend on top."
    )
    parser.add_argument("--font_size", type=float | None, help="Points, of the axes' labels; by default 8.5.")


def run(options: Namespace) -> int:
    """Write the figure and print its path."""
    from ...report.figure import save_figure
    from ...trainer.by_name.name_grammar import whole_run

    sizes = {"width": (options.width, 60), "height": (options.height, 60), "font_size": (options.font_size, 100)}
    for name, (value, most) in sizes.items():
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"--{name} {value:g}: give 1 to {most} ({'points' if name == 'font_size' else 'inches'})")
    runs = [whole_run(name, "a figure shows a whole run") for name in (options.run, *(options.beside or ()))]
    out = Path(options.out)
    save_figure(runs, options.figure, out, width=options.width, height=options.height, font_size=options.font_size)
    print(out)
    return 0
