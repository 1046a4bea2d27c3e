"""Commands on a run's weights: text from them, and the form that transformers reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from ..callbacks.records import RunDir, atomic_path
from ..data.tokenizer import TextTokenizer
from ..errors import UsageError
from ..models.config import ModelConfig
from ..models.exchange import write_pretrained
from ..models.generate import generate
from ..trainer.allocator import keep_freed_memory
from ..trainer.checkpoint import CheckpointWeights, load_model


def device() -> str:
    """Where commands run models; on the CPU, what one pass frees is kept for the next."""
    if torch.cuda.is_available():
        return "cuda"
    keep_freed_memory()
    return "cpu"


def find_checkpoint(run: RunDir, step: int | None) -> Path:
    """The checkpoint after ``step`` steps, by default the last; UsageError names those that there are."""
    there = run.checkpoints_by_step()
    if not there:
        raise UsageError(f"{run.path}: has no checkpoint yet")
    if step is None:
        return there[max(there)]
    if step not in there:
        raise UsageError(f"--step {step}: {run.path} has checkpoints of steps {', '.join(map(str, there))}")
    return there[step]


def sample(
    run: RunDir,
    config: ModelConfig,
    prompt: str,
    *,
    n_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    step: int | None,
) -> Iterator[str]:
    """What a run's model writes after ``prompt``, in pieces as it comes; ends early at the end of text.

    Raises:
        UsageError: the run has no tokenizer; an empty prompt, where no token begins a text.
    """
    if not run.tokenizer.is_file():
        raise UsageError(f"{run.path}: has no tokenizer.json (its data is no text), so that no prompt can be read")
    tokenizer = TextTokenizer.load(run.tokenizer)
    # A text begins where another ended.
    ids = tokenizer.encode([prompt])[0].tolist() or [t for t in [tokenizer.end_of_text] if t is not None]
    if not ids:
        raise UsageError("--prompt is empty, and this tokenizer has no token that begins a text: give some text")
    if max(ids) >= config.vocab_size:
        raise UsageError(f"--prompt has token {max(ids)}: the model has {config.vocab_size}")
    model = load_model(config, find_checkpoint(run, step), device())
    written: list[int] = []
    told = ""
    tokens = generate(
        model, torch.tensor([ids], device=device()), n_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    for token in tokens:
        if int(token) == tokenizer.end_of_text:
            break
        written.append(int(token))
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # bytes of a character that is not whole yet
            yield text[len(told) :]
            told = text
    yield tokenizer.decode(written)[len(told) :]


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
