"""Options of a lineage test, for the commands that make one and for study files."""

from __future__ import annotations

from typing import Literal

from ...metrics.config import LineageTestConfig, Null
from ...trainer.config_parser import Parser


def add_test_options(command: Parser, n_inputs: int) -> None:
    """Options of a lineage test."""
    command.add_argument(
        "--null",
        type=Null | None,
        help="What a test is held against (docs/seedprint.md); by default dimensions, and all under --calibrate.",
    )
    command.add_argument(
        "--probe",
        type=Literal["token", "embedding"],
        default="token",
        help="What the models are shown: random tokens, or Gaussian vectors in place of embeddings.",
    )
    command.add_argument("--n_inputs", type=int, default=n_inputs, metavar="N", help="Sequences that they are shown.")
    command.add_argument(
        "--seq_len",
        type=int | None,
        metavar="T",
        help="Tokens in each; by default 64, or as many as all of them can read.",
    )
    command.add_argument("--probe_seed", type=int, default=0, help="Decides the sequences, and nothing else.")
    command.add_class_arguments(LineageTestConfig, None, as_group=False, skip={"null"})
    command.add_argument(
        "--cache_dir", type=str, default="~/.cache/birthmark", metavar="DIR", help="Where hidden states are kept."
    )
    command.add_argument("--json", action="store_true", help="Print it as JSON.")
