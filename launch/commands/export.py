"""`birthmark export`: a run's weights in the form that transformers reads."""

from __future__ import annotations

from pathlib import Path

import torch

from ...data.tokenizer import TextTokenizer
from ...errors import UsageError
from ...files import atomic_path
from ...measure.records import RunDir
from ...models.config import ModelConfig
from ...models.exchange.pretrained import write_pretrained
from ...trainer.checkpoints.find import find_checkpoint
from ...trainer.checkpoints.folder_io import CheckpointWeights


def export(run: RunDir, config: ModelConfig, out: Path, *, step: int | None, dtype: torch.dtype | None) -> list[str]:
    """Write a run's checkpoint as a folder of ``transformers``; what its reader must know is returned, line by line.

    Raises:
        UsageError: an architecture that transformers does not have, by field; ``out`` exists.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already; give a new folder")
    tokenizer = run.tokenizer if run.tokenizer.is_file() else None
    end = TextTokenizer.load(tokenizer).end_of_text if tokenizer is not None else None
    weights = CheckpointWeights(find_checkpoint(run, step))
    with atomic_path(out) as new:
        return write_pretrained(config, weights, new, tokenizer_file=tokenizer, eos_token_id=end, dtype=dtype)
