"""All measurements on a GPU, in parts of at most nine minutes, on a machine without a network.

    make gpu [PART=profile|tests|arms|train|snapshots|big|study] [PYTHON=python3]
    make gpu DEVICE=cpu SCALE=tiny                   # a rehearsal, a minute or two

Results go to ``benchmarks/results/gpu-CARD.md`` and ``.json``, row by row: a part that is killed leaves the rows it had
measured, and a part that runs again replaces its rows alone. Each part runs in a process of its own. An error of a
case is a row; where it leaves the device unusable, another process goes on with the cases that are left. The exit
status is 1 if anything failed. A limit that is missed is told in the table, and is no failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_run.environment import ROOT, provide
from gpu_run.processes import BUDGET, run_watched

RESULTS, REHEARSAL = ROOT / "benchmarks" / "results", ROOT / "build" / "gpu-rehearsal"
PARTS = ("profile", "tests", "arms", "train", "snapshots", "big", "study")


def say(text: str) -> None:
    print(text, flush=True)


def in_this_process(args: argparse.Namespace) -> int:
    """Run the one part that was asked for."""
    import torch
    from gpu_run.case import Setting
    from gpu_run.part_run import record_of, run_part

    if args.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no GPU here: rehearse with make gpu DEVICE=cpu SCALE=tiny")
        return 2
    setting = Setting(args.device, args.scale == "tiny", args.deadline, tuple(args.arms.split(",")))
    return run_part(args.part[0], setting, record_of(args.device, args.out), say, args.go_on)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="by default all, one by one")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=BUDGET / 60, help="of a part")
    parser.add_argument("--arms", default="plain,headnorm", help="of the study, with commas between them")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--go-on", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.device, args.scale) == ("cpu", "full"):
        parser.error("on a CPU there is the rehearsal alone: --device cpu --scale tiny")
    args.out = (args.out or (RESULTS if args.scale == "full" else REHEARSAL)).resolve()
    if args.scale == "tiny" and args.out == RESULTS:
        parser.error("a rehearsal measures nothing: give another folder than benchmarks/results")
    if args.deadline is not None:
        return in_this_process(args)
    environment, found = provide(), {}
    for part in args.part:
        say(f"── {part}")
        start = time.monotonic()
        command = [sys.executable, "-u", __file__, "--part", part, "--device", args.device, "--scale", args.scale]
        found[part] = run_watched(
            [*command, "--out", str(args.out), "--arms", args.arms], environment, say, 60 * args.minutes
        )
        say(f"── {part}: {time.monotonic() - start:.0f} s, status {found[part]}")
    return max(found.values())


if __name__ == "__main__":
    sys.exit(main())
