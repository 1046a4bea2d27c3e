"""Options that several commands have, ``--set FIELD=VALUE`` among them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from jsonargparse import Namespace

from ..errors import UsageError
from ..measure.config import MOST_STRANGERS, SnapshotConfig
from ..messages import for_terminal
from ..schema import SEEDS, quoted
from ..trainer.config import RunConfig
from ..trainer.config_file import read_config
from ..trainer.config_parser import Parser, unknown_fields
from ..urls import keep_credentials_in
from .command_line import FORM

#: Exit status of commands that check something, if the check fails.
WRONG = 3

#: Accepted names of a model, for help texts.
MODEL_NAMES = (
    "a run (its last checkpoint), RUN@STEP, a checkpoint, CONFIG@SEED (a birth), transformers folder, GGUF file or "
    "hub id"
)


def add_model(parser: Parser) -> None:
    """Add the argument that takes one model, by any of its names."""
    parser.add_argument("model", type=str, metavar="MODEL", help=MODEL_NAMES[0].upper() + MODEL_NAMES[1:] + ".")


def add_trust(parser: Parser) -> None:
    """Add the option that lets a model's own code run."""
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="Run the code that a model of transformers brings, if it brings any; the files are named before they run.",
    )


def tell(line: str) -> None:
    """Print a remark on standard error, beside a command's result."""
    print(for_terminal(line), file=sys.stderr)


def add_config(parser: Parser, by_default: str | None = None, without: str = "") -> None:
    """Add the argument that takes a config of a run or of a model, and ``--set`` for fields of it.

    Args:
        parser: parser of the command.
        by_default: config that is taken without one.
        without: what the command does without one, if it can do without.
    """
    text = "YAML file of a run or of a model, the name of one of `birthmark configs`, or a run's folder"
    if without:
        text = f"{text}; without one, {without}."
        parser.add_argument("config", type=str | None, nargs="?", default=None, metavar="CONFIG", help=text)
    elif by_default is None:
        parser.add_argument("config", type=str, metavar="CONFIG", help=f"{text}.")
    else:
        text = f"{text}; by default {by_default}."
        parser.add_argument("config", type=str, nargs="?", default=by_default, metavar="CONFIG", help=text)
    add_overrides(parser, "Change fields of the config.")


def config_with_overrides(options: Namespace) -> RunConfig:
    """Read the config that `add_config` takes, with the fields of ``--set``."""
    return read_config(options.config, read_overrides(options["set"]))


def read_numbers(option: str, text: str, example: str, check: Callable[[int, int], object]) -> list[int]:
    """Read whole numbers, each once: ``0..9999`` (both ends included), ``7``, and commas between such.

    Args:
        option: name of the option.
        text: the user's text.
        example: valid numbers, for the message.
        check: called with the last number of each part and the count so far; raises if either is too
            large.

    Raises:
        UsageError: a part has neither form.
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
    """Raise UsageError if ``option`` names a seed that no run can be born from: one outside the range of
    ``init_seed``.
    """
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise UsageError(f"--{option} {quoted(seed)}: no seed; give a whole number from {SEEDS[0]} to {SEEDS[1]}")


def add_json(parser: Parser) -> None:
    """Add the option that prints JSON in place of text."""
    parser.add_argument("--json", action="store_true", help="Print it as JSON.")


def add_picture(parser: Parser) -> None:
    """Add the option that names a picture to draw."""
    parser.add_argument(
        "--out", type=str | None, metavar="PNG", help="Picture, with its numbers beside it; none by default."
    )


def add_probe(parser: Parser, n_sequences: int, seq_len: int | None) -> None:
    """Add the options of a random probe; with ``seq_len`` None its length depends on the model."""
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
    """Add the option that names the user's own text; ``by_default`` describes the text that is read without it."""
    parser.add_argument(
        "--data",
        type=str,
        nargs="+",
        metavar="PATH",
        help=f"{text}, as data.path of a run takes it; by default {by_default}.",
    )


@contextmanager
def data_named(options: Namespace) -> Iterator[None]:
    """Replace ``data.path`` in messages by the option's name, if the text was named by ``--data``.

    A context manager around code that reads the text.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("data.path", "--data") if options.data else str(error)) from None


def add_probe_kind(parser: Parser, meaning: str) -> None:
    """Add the option that chooses random tokens or text."""
    parser.add_argument("--probe", type=Literal["random", "text"] | None, help=meaning)


def check_probe_kind(options: Namespace) -> None:
    """Refuse text for a probe that is random."""
    if options.data is not None and options.probe == "random":
        raise UsageError(f"--data {' '.join(options.data)}: only --probe text reads it; leave one of them out")


def add_strangers(parser: Parser, default: int) -> None:
    """Add the option for the number of births of other seeds, the control."""
    parser.add_argument(
        "--strangers",
        type=int,
        default=default,
        metavar="N",
        help="Births of other seeds to compare with too, as the control; each costs one more pass.",
    )


def check_strangers(options: Namespace) -> None:
    """Raise UsageError if the number of control births is out of range."""
    if not 0 <= options.strangers <= MOST_STRANGERS:
        raise UsageError(f"--strangers {options.strangers}: give 0 to {MOST_STRANGERS}")


def add_stream(parser: Parser) -> None:
    """Add the options for models larger than memory."""
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
    """Raise UsageError if --scratch is given without --stream."""
    if options.scratch is not None and not options.stream:
        raise UsageError(f"--scratch {options.scratch}: only --stream keeps anything there; give both, or none")


# ---------------------------------------------------------------- overrides
# ``--set FIELD=VALUE``: fields of a config to replace on the command line.


def add_overrides(parser: Parser, what: str) -> None:
    """Let a command take ``--set``, and fields of a run as options; ``what`` is its help."""
    parser.add_argument("--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help=what)


def read_overrides(words: Sequence[str], refused: Sequence[str] = (), why: str = "") -> dict[str, str]:
    """Read values by dotted field, as text: reading the config gives each its field's type.

    Args:
        words: the words after ``--set``.
        refused: fields that this command rejects.
        why: reason for the message that rejects them.

    Raises:
        UsageError: a word is no ``FIELD=VALUE``, or names no field; the message repeats it.
    """
    found: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        field = field.replace("-", "_")
        if not equals or not field:
            raise UsageError(f"--set {word}: {FORM}")
        if field in refused:
            raise UsageError(f"--set {word}: {why}")
        if unknown := unknown_fields([field]):
            raise UsageError(f"--set {word}: {unknown[0]}")
        found[field] = keep_credentials_in(value)
    return found
