"""`birthmark export`: a run's weights in the form that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.records import RunDir
from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser
from ..options import add_run

SUMMARY = "Write a run's checkpoint as transformers reads it (docs/exchange.md)."


def add_options(parser: Parser) -> None:
    """The checkpoint, and where to."""
    add_run(parser)
    parser.add_argument("out", type=str, metavar="DIR", help="New folder.")
    parser.add_argument(
        "--dtype",
        type=Literal["float32", "bfloat16", "float16"] | None,
        help="Of the weights; by default as trained, float32.",
    )


def run(options: Namespace) -> int:
    """Write the folder, and print what its reader must know.

    Raises:
        UsageError: an architecture that transformers does not have, by field; ``out`` exists.
    """
    import torch

    from ...data.tokenizer import TextTokenizer
    from ...files import atomic_path
    from ...models.exchange.pretrained import write_pretrained
    from ...trainer.checkpoints.find import find_checkpoint
    from ...trainer.checkpoints.folder_io import CheckpointWeights

    source, out = RunDir.open(Path(options.run)), Path(options.out)
    config = read_config(source.config).model
    if out.exists():
        raise UsageError(f"{out}: exists already; give a new folder")
    tokenizer = source.tokenizer if source.tokenizer.is_file() else None
    end = TextTokenizer.load(tokenizer).end_of_text if tokenizer is not None else None
    weights = CheckpointWeights(find_checkpoint(source, options.step))
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with atomic_path(out) as new:
        notes = write_pretrained(config, weights, new, tokenizer_file=tokenizer, eos_token_id=end, dtype=dtype)
    print("\n".join([options.out, *notes]))
    return 0
