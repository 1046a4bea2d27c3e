"""Torture of inputs and of kills for so many minutes, the time divided over both: ``make torture MINUTES=n SEED=s``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from random import randrange

#: Modules of this folder, each with ``main(minutes, seed)``, which prints failures and returns their number.
KINDS = ("inputs", "kills")


def main() -> int:
    """Run them; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="By default another each time; it is printed.")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    seed = randrange(1 << 32) if options.seed is None else options.seed
    kinds = KINDS if options.only is None else (options.only,)
    print(f"seed {seed}, {options.minutes:g} minutes of {' and '.join(kinds)}", flush=True)
    failures = sum(import_module(kind).main(options.minutes / len(kinds), seed) for kind in kinds)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
