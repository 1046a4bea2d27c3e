"""Options that several commands have."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from jsonargparse import Namespace

from ..errors import UsageError
from ..measure.config import MOST_STRANGERS, SnapshotConfig
from ..schema import SEEDS, shown
from ..trainer.config_parser import Parser

#: Exit status of commands that check something, where it is not what it says.
WRONG = 3

#: What a model may be given as, for help texts.
MODEL_NAMES = (
    "a run (its last checkpoint), RUN@STEP, a checkpoint, CONFIG@SEED (a birth), transformers folder, GGUF file or "
    "hub id"
)


def add_model(parser: Parser) -> None:
    """One model, by any of its names."""
    parser.add_argument("model", type=str, metavar="MODEL", help=MODEL_NAMES[0].upper() + MODEL_NAMES[1:] + ".")


def add_trust(parser: Parser) -> None:
    """Whether a model's own code may run."""
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="Run the code that a model of transformers brings, if it brings any; the files are named before they run.",
    )


def tell(line: str) -> None:
    """Say something beside a command's result."""
    print(line, file=sys.stderr)


def add_config(parser: Parser) -> None:
    """A config of a run or of a model."""
    parser.add_argument(
        "config", type=str, metavar="CONFIG", help="YAML file of a run or of a model, or a run's folder."
    )


def add_run(parser: Parser) -> None:
    """A run and one of its checkpoints."""
    parser.add_argument("run", type=str, metavar="RUN", help="Folder that `pretrain` wrote.")
    parser.add_argument("--step", type=int | None, metavar="N", help="Checkpoint after N steps; by default the last.")


def read_numbers(option: str, text: str, example: str, check: Callable[[int, int], object]) -> list[int]:
    """Read whole numbers, each once: ``0..9999`` (both ends included), ``7``, and commas between such.

    Args:
        option: its name.
        text: as it was given.
        example: of such numbers, for the message.
        check: is called with the last number of each part and how many there are then, and raises where either is too
            large.

    Raises:
        UsageError: a part that is neither.
    """
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,99})(?:\s*\.\.\s*([0-9]{1,99}))?\s*", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise UsageError(f"--{option} {text}: give whole numbers, such as {example}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        check(last, len(found) + last - first + 1)
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def check_seed(option: str, seed: int) -> None:
    """UsageError if no run can be born from the seed that ``option`` names: the range of ``init_seed``."""
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise UsageError(f"--{option} {shown(seed)}: no seed; give a whole number from {SEEDS[0]} to {SEEDS[1]}")


def add_json(parser: Parser) -> None:
    """JSON in place of text."""
    parser.add_argument("--json", action="store_true", help="Print it as JSON.")


def add_probe(parser: Parser, n_sequences: int, seq_len: int | None) -> None:
    """A random probe and how it is read; ``seq_len`` None: it depends on the model."""
    length = "by default 64, or as many as the model reads" if seq_len is None else f"by default {seq_len}"
    parser.add_argument(
        "--n_sequences", type=int, default=n_sequences, metavar="N", help="Sequences in the random probe."
    )
    parser.add_argument(
        "--seq_len",
        type=int | None if seq_len is None else int,
        default=seq_len,
        metavar="T",
        help=f"Tokens in each; {length}.",
    )
    parser.add_argument("--probe_seed", type=int, default=0, help="Decides the sequences, and nothing else.")
    parser.add_argument("--batch_size", type=int, default=64, metavar="B", help="Sequences in one forward pass.")


def check_probe(settings: SnapshotConfig, n_positions: int | None) -> None:
    """Check a probe that options ask for.

    Raises:
        UsageError: the settings are impossible, or a sequence is longer than ``n_positions`` (None: any length can be
            read); the message names the options.
    """
    if problems := settings.problems(n_positions):
        raise UsageError("; ".join(problem.replace("snapshot.", "--") for problem in problems))


def add_data(parser: Parser, by_default: str, text: str = "Text to read") -> None:
    """Text of the user's choice; ``by_default`` says what is read without it."""
    parser.add_argument(
        "--data",
        type=str,
        nargs="+",
        metavar="PATH",
        help=f"{text}, as data.path of a run takes it; by default {by_default}.",
    )


@contextmanager
def data_named(options: Namespace) -> Iterator[None]:
    """Around what reads ``--data``: what the text is called in a message depends on who named it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("data.path", "--data") if options.data else str(error)) from None


def add_probe_kind(parser: Parser, meaning: str) -> None:
    """Random tokens or text."""
    parser.add_argument("--probe", type=Literal["random", "text"] | None, help=meaning)


def check_probe_kind(options: Namespace) -> None:
    """Refuse text for a probe that is random."""
    if options.data is not None and options.probe == "random":
        raise UsageError(f"--data {' '.join(options.data)}: only --probe text reads it; leave one of them out")


def add_strangers(parser: Parser, default: int) -> None:
    """How many births of other seeds are the control."""
    parser.add_argument(
        "--strangers",
        type=int,
        default=default,
        metavar="N",
        help="Births of other seeds to compare with too, as the control; each costs one more pass.",
    )


def check_strangers(options: Namespace) -> None:
    """Raises UsageError for a number of births that no control needs."""
    if not 0 <= options.strangers <= MOST_STRANGERS:
        raise UsageError(f"--strangers {options.strangers}: give 0 to {MOST_STRANGERS}")


def add_stream(parser: Parser) -> None:
    """Models larger than memory."""
    parser.add_argument(
        "--stream", action="store_true", help="Hold one block of the model in memory at a time (docs/measuring.md)."
    )
    parser.add_argument(
        "--scratch",
        type=str | None,
        metavar="DIR",
        help="With --stream, where hidden states lie that take more than 1 GiB; deleted at the end.",
    )


def check_stream(options: Namespace) -> None:
    """UsageError where --scratch is given without --stream."""
    if options.scratch is not None and not options.stream:
        raise UsageError(f"--scratch {options.scratch}: only --stream keeps anything there; give both, or none")
