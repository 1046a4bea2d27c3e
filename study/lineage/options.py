"""Options of a command for comparisons of models.

Light on purpose: the command line reads it before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...metrics.config import LineageTestConfig, Null
from ...trainer.config_parser import Parser


@dataclass(frozen=True)
class ProbeOptions:
    """Options of the models' inputs."""

    probe: Literal["token", "embedding"] = "token"
    """Inputs of the models: random tokens, or Gaussian vectors in place of embeddings."""

    n_inputs: int = 2000
    """Sequences that they are shown."""

    seq_len: int | None = None
    """Tokens in each sequence; by default 64, or as many as all models can read."""

    probe_seed: int = 0
    """Seed of the sequences, and of nothing else."""


def add_comparison_options(command: Parser, n_inputs: int | None) -> None:
    """Let a command take a comparison, of ``n_inputs`` sequences by default; None: the models decide."""
    command.add_argument(
        "--null",
        type=Null | None,
        help="What a test is held against (docs/lineage.md); by default dimensions, and all under --calibrate.",
    )
    command.add_class_arguments(ProbeOptions, None, as_group=False)
    command.set_defaults({"n_inputs": n_inputs})
    command.add_class_arguments(LineageTestConfig, None, as_group=False, skip={"null"})
    command.add_argument(
        "--cache_dir", type=str, default="~/.cache/birthmark", metavar="DIR", help="Where hidden states are kept."
    )
