"""Texts of models by name: the data of a model's run once more, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...data.config import DataConfig, is_remote
from ...data.prepare import PreparedData, prepare
from ...data.probes import passage_probe
from ...data.tokenizer import TextTokenizer
from ...errors import UsageError
from ...measure.hf import HFModel
from ...measure.records import RunDir
from ...messages import one_line
from ..config_file import read_config
from .model_names import ModelSource, SourceWithBirth


def data_of_run(name: str, run: Path, seq_len: int | None = None, *, trained_here: bool = False) -> PreparedData:
    """Prepare the data that a run was trained on.

    The run may be of others: what is prepared is kept in the reader's cache, and nothing is fetched.

    Args:
        name: name of the model, as given.
        run: the model's run.
        seq_len: positions of a sequence; by default those of its training.
        trained_here: read them as the training did, since this command trained the run.

    Raises:
        UsageError: the text has changed since then, or is not on this machine.
    """
    config, born = read_config(RunDir(run).config), RunDir(run).read_birth()
    settings = config.data
    if not trained_here:
        if is_remote(settings.tokenizer) and (kept := RunDir(run).tokenizer).is_file():
            settings = replace(settings, tokenizer=str(kept))
        if remote := settings.remote_entries:
            raise UsageError(
                f"{name}: its text is {one_line(remote[0], 80)}, and for a run that is only read nothing is "
                "fetched; give text, --data PATH"
            )
        settings = replace(settings, cache_dir=DataConfig.cache_dir, stage_to=DataConfig.stage_to)
    data = prepare(
        settings,
        vocab_size=config.model.vocab_size,
        seq_len=seq_len or config.model.max_seq_len,
        batch_sizes=config.trainer.batch_sizes,
    )
    for field in ("content_hash", "tokenizer_hash"):
        if data.record.get(field) != (born.get("data") or {}).get(field):
            raise UsageError(f"{name}: the text of data.path has changed since this run; give text, --data PATH")
    return data


def held_out_tokens(source: ModelSource, n_sequences: int, n_tokens: int, path: Sequence[str] | None) -> np.ndarray:
    """Return sequences that the model was not trained on, int64 ``[N, n_tokens]``.

    Args:
        source: the model.
        n_sequences: N.
        n_tokens: tokens in each.
        path: files or folders of text, read by its own tokenizer; None: the validation data of its own run.

    Raises:
        UsageError: there is too little text, it has no tokenizer, or it belongs to no run and no text is given.
    """
    if path is not None:
        if source.tokenizer is None:
            raise UsageError(f"{source.name}: has no tokenizer to read text with")
        given = path[0] if len(path) == 1 else path
        tokenizer = TextTokenizer.load(source.tokenizer)
        return passage_probe(given, tokenizer, n_sequences, n_tokens, source.config.vocab_size)
    run = source.run if isinstance(source, SourceWithBirth) else None
    if run is None:
        raise UsageError(f"{source.name}: is no run with validation text of its own; give text, --data PATH")
    return data_of_run(source.name, run, n_tokens).text_probe(n_sequences, n_tokens)


def end_tokens(model: HFModel) -> frozenset[int]:
    """Return the ids that end a text, from the model's configs; there may be several."""
    configs = (model.model.config, getattr(model.model, "generation_config", None))
    found: set[int] = set()
    for config in configs:
        ends = getattr(config, "eos_token_id", None)
        found |= set(ends) if isinstance(ends, list) else set() if ends is None else {ends}
    return frozenset(found)
