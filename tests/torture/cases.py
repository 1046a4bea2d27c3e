"""Cases by kind and how often each is drawn. The n-th of a seed is always the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from case import Case
from command_cases import command_line
from config_cases import config_file, config_text, config_values
from file_cases import (
    run_file,
    snapshot_file,
    strange_folder,
    study,
    study_results,
    table,
    their_folder,
    their_trap,
    tokens,
)
from system_cases import clock, device, growing, hostile_folder, modes, read_only, web

Maker = Callable[[random.Random, Path], Case]
_OFTEN: dict[Maker, float] = {config_values: 4, config_text: 2, config_file: 1, run_file: 6, strange_folder: 0.6}
_OFTEN |= {snapshot_file: 2, their_folder: 2, their_trap: 0.7, study: 1.2, study_results: 1, tokens: 0.3, table: 0.3}
_OFTEN |= {command_line: 4, device: 1.5, hostile_folder: 0.5, web: 1, growing: 0.7, read_only: 0.5, modes: 0.7}
_OFTEN |= {clock: 0.5}
KINDS = {maker.__name__: (maker, often) for maker, often in _OFTEN.items()}


def make_case(seed: int, number: int, example: Path, only: str = "") -> tuple[str, Case]:
    """The ``number``-th case of ``seed``, done to an example that stands in ``example``, and its kind.

    With ``only``, all are of that kind.
    """
    rng = random.Random(f"{seed}:{number}")
    kinds = list(KINDS)
    kind = only or rng.choices(kinds, [KINDS[k][1] for k in kinds])[0]
    return kind, KINDS[kind][0](rng, example)
