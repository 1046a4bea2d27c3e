"""`birthmark sample`: text that a run's model writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...data.tokenizer import TextTokenizer
from ...errors import UsageError
from ...measure.records import RunDir
from ...models.config import ModelConfig
from ...models.generate import generate
from ...trainer.checkpoints.find import find_checkpoint
from ...trainer.checkpoints.folder_io import load_model
from ...trainer.devices import device


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
