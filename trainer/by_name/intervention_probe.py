"""Intervention on a model by any of its names: the probe that it reads, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ...errors import RunError, UsageError
from ...measure.config import SnapshotConfig
from ...measure.intervention_kinds import Intervention
from ...measure.interventions import Intervened, intervene
from .loaded_model import LoadedModel, TextProbe, random_tokens, text_for

#: Random tokens, or the same behind BOS; text as the tokenizer gives it, or without BOS.
ProbeName = Literal["random", "bos", "text", "text_without_bos"]


def is_text(probe: ProbeName) -> bool:
    """Return True if a probe is text, so that its loss is meaningful."""
    return probe.startswith("text")


def check_probe_name(
    name: str, probe: ProbeName, text: Sequence[str] | None, tokenizer: Path | None, run: Path | None
) -> None:
    """Check that a model can be shown a probe, before it is loaded.

    Args:
        name: name of the model.
        probe: name of the probe.
        text: files or folders of text.
        tokenizer: the model's ``tokenizers`` JSON, if it has one.
        run: the model's run, if it belongs to one.

    Raises:
        UsageError: the model cannot read this probe.
    """
    if probe not in get_args(ProbeName):
        raise UsageError(f"probe {probe}: give one of {', '.join(get_args(ProbeName))}")
    if not is_text(probe) and text is not None:
        raise UsageError(f"text: probe {probe} does not read it; give probe text or text_without_bos, or leave it out")
    if is_text(probe) and text is None and run is None:
        raise UsageError(f"probe {probe}: {name} is no run with validation text of its own; give text, --data PATH")
    if tokenizer is None and (probe == "bos" or text is not None):
        raise UsageError(f"probe {probe}: {name} has no tokenizer, which it needs; give probe random")


def intervene_on(
    loaded: LoadedModel,
    what: Intervention,
    settings: SnapshotConfig,
    probe: ProbeName = "random",
    *,
    text: Sequence[str] | None = None,
    probe_seed: int = 0,
    advance: Callable[[int], object] = lambda n_passes: None,
) -> Intervened:
    """Read a probe with a model unchanged, and changed.

    Args:
        loaded: the model, on the device where it is to run.
        what: the intervention.
        settings: the probe's size, and how it is read.
        probe: name of the probe.
        text: files or folders of text; by default the validation text of its own run.
        probe_seed: decides random tokens.
        advance: called with the number of finished passes.

    Raises:
        UsageError: the intervention is impossible, or there is no such probe for this model.
        RunError: the model gives NaN or inf, or a dose makes states that have no norm.
    """
    check_probe_name(loaded.name, probe, text, loaded.tokenizer_file, loaded.run)
    random_NT = random_tokens(loaded, settings, probe_seed)
    given = _probe(loaded, settings, probe, text, random_NT)
    try:
        return intervene(
            loaded.model,
            given.tokens_NT,
            what,
            random_NT=random_NT,
            documents_NT=given.documents_NT,
            is_text=is_text(probe),
            batch_size=settings.on_any_device,
            advance=advance,
        )
    except RunError as error:
        raise RunError(f"{loaded.name}: {error}") from None


def _probe(
    loaded: LoadedModel, settings: SnapshotConfig, probe: ProbeName, text: Sequence[str] | None, random_NT: np.ndarray
) -> TextProbe:
    if probe == "text":
        return text_for(loaded, settings, text)
    if probe == "random":
        return TextProbe(random_NT)
    tokenizer = loaded.tokenizer
    if tokenizer is None or tokenizer.bos is None:
        raise UsageError(f"probe {probe}: the tokenizer of {loaded.name} has no BOS; give another probe")
    if probe == "bos":
        first = tokenizer.before_text or [tokenizer.bos]
        if settings.seq_len <= len(first):
            raise UsageError(
                f"probe bos: sequences of {settings.seq_len} tokens have no room behind {len(first)}; give a larger "
                "seq_len"
            )
        begun_NT = np.tile(np.array(first, dtype=np.int64), (len(random_NT), 1))
        return TextProbe(np.concatenate([begun_NT, random_NT[:, : -len(first)]], axis=1))
    # As many tokens more as the tokenizer puts before a text.
    n_before = len(tokenizer.before_text)
    longer = text_for(loaded, replace(settings, seq_len=settings.seq_len + n_before), text)
    documents_NT = None if longer.documents_NT is None else longer.documents_NT[:, n_before:]
    return TextProbe(longer.tokens_NT[:, n_before:], documents_NT)
