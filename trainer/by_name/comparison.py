"""Comparison of models by their names: which models, their common probe, and one pass of each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from ...errors import RunError, UsageError
from ...findings.formatting import steps_near
from ...measure.config import SnapshotConfig
from ...measure.model_pairs import AllPairs, Compared, Line, compare_readings, losses_on_line
from ...measure.model_reading import ModelReading, read_model
from ...metrics.two_models import FEWEST_EXAMPLES, minibatches
from ..devices import device
from .loaded_model import LoadedModel, TextProbe, default_seq_len, load_named, random_tokens, text_for
from .model_names import add_tokens
from .name_grammar import read_name


def names_at_steps(names: Sequence[str], steps: str) -> dict[int, list[str]]:
    """Return, for each step, every run's name at that step.

    Args:
        names: names of runs.
        steps: numbers with commas between, or ``all``: those that every run has, including birth.

    Raises:
        UsageError: a name is not a run, a step is not a number, or a run has no checkpoint of it.
    """
    runs = []
    for name in names:
        found = read_name(name)
        if found.kind != "run" or not found.is_whole:
            raise UsageError(f"--step {steps}: {name} is no run, and has no steps; leave one of them out")
        runs.append(found.run)
    there = [{0, *run.checkpoints_by_step()} for run in runs]
    if steps == "all":
        wanted = sorted(set.intersection(*there))
    elif all(part.isdecimal() for part in steps.split(",")):
        wanted = sorted({int(part) for part in steps.split(",")})
    else:
        raise UsageError(f"--step {steps}: give numbers with commas between, such as 0,100,200, or all")
    for name, has in zip(names, there, strict=True):
        if missing := [step for step in wanted if step not in has]:
            listed = steps_near(has, missing[0])
            raise UsageError(f"--step {steps}: {name} has no checkpoint of step {missing[0]}; there are: {listed}")
    return {step: [f"{name}@{step}" for name in names] for step in wanted}


def comparison_problems(n_sequences: int, minibatch: int, barrier: int | None) -> list[str]:
    """List settings that make a comparison impossible, one line each, with the remedy."""
    found = []
    if barrier is not None and not 2 < barrier <= 1001:
        found.append(f"barrier {barrier}: give 3 to 1001 points")
    if minibatch < FEWEST_EXAMPLES:
        return [*found, f"minibatch {minibatch}: give at least {FEWEST_EXAMPLES}"]
    try:
        minibatches(n_sequences, minibatch)
    except ValueError as error:
        found.append(f"minibatch {minibatch}: of {n_sequences} sequences {error}; give more or fewer")
    return found


class Comparer:
    """Comparer of models by name, all on the probe of the first.

    Args:
        settings: size of the probe and of its batches.
        seq_len: tokens of a sequence; None: 64, or as many as the first model reads.
        minibatch: sequences of a Gram matrix at most.
        text: if the models read text.
        data: files or folders of the text; None: the first model's own validation text.
        open_model: function that opens a model by its name.
    """

    def __init__(
        self,
        settings: SnapshotConfig,
        seq_len: int | None,
        minibatch: int,
        *,
        text: bool = False,
        data: Sequence[str] | None = None,
        open_model: Callable[[str], LoadedModel] = load_named,
    ) -> None:
        self._open_model = open_model
        self.settings, self.seq_len, self.minibatch, self.text, self.data = settings, seq_len, minibatch, text, data
        self._shown: tuple[str, int, TextProbe] | None = None
        self._tokens: dict[int, tuple[str, str]] = {}

    @property
    def tokens_NT(self) -> np.ndarray:  # noqa: N802, a shape suffix
        """Common probe of all models, int64 ids ``[N, T]``; known once the first model is loaded."""
        return self._probe.tokens_NT

    @property
    def _probe(self) -> TextProbe:
        assert self._shown is not None
        return self._shown[2]

    def load(self, name: str) -> LoadedModel:
        """Load a model that can read the common probe onto the device; the first model decides the probe.

        Raises:
            UsageError: the model cannot read the probe: another vocabulary or tokenizer, or fewer positions.
            RunError: a damaged file.
        """
        loaded = self._open_model(name)
        size = loaded.model.config.vocab_size
        if self._shown is None:
            self._shown = name, size, self._probe_for(loaded)
        first, of_first, (tokens_NT, _) = self._shown
        if size != of_first:
            raise UsageError(f"{first} has {of_first} tokens, {name} {size}: they cannot read the same ids")
        if loaded.tokenizer_file is not None:
            add_tokens(self._tokens, name, loaded.tokenizer_file, "compare models of one tokenizer")
        if loaded.n_positions is not None and tokens_NT.shape[1] > loaded.n_positions:
            raise UsageError(f"--seq_len {tokens_NT.shape[1]}: {name} reads at most {loaded.n_positions} tokens")
        loaded.model.to(device())
        return loaded

    def _probe_for(self, loaded: LoadedModel) -> TextProbe:
        length = default_seq_len(loaded) if self.seq_len is None else self.seq_len
        settings = replace(self.settings, seq_len=length)
        if problems := settings.problems(loaded.n_positions):
            raise UsageError("; ".join(problem.replace("snapshot.", "--") for problem in problems))
        if self.text:
            return text_for(loaded, settings, self.data)
        return TextProbe(random_tokens(loaded, settings, settings.probe_seed))

    def compare(self, names: Sequence[str], advance: Callable[[int], object] = lambda n_models: None) -> AllPairs:
        """Run one pass of each model, one at a time in memory, then compare every pair.

        ``advance`` is called with 1 after each model, and once more at the end.
        """
        with tempfile.TemporaryDirectory(prefix="birthmark-compare-") as folder:
            readings = []
            for i, name in enumerate(names):
                readings.append(self._read(name, Path(folder) / str(i)))
                advance(1)
            found = compare_readings(readings, self.tokens_NT, is_text=self.text)
            advance(1)
            return found

    def compared(
        self,
        names: Sequence[str],
        n_points: int | None = None,
        step: int | None = None,
        advance: Callable[[int], object] = lambda n_passes: None,
    ) -> Compared:
        """Run `compare`, and with ``n_points`` `lines` too; ``step`` is the common step of all models, if they share
        one.
        """
        pairs = self.compare(names, advance)
        return Compared(step, pairs, [] if n_points is None else self.lines(names, n_points, advance))

    def _read(self, name: str, folder: Path) -> ModelReading:
        loaded = self.load(name)
        folder.mkdir()
        try:
            return read_model(
                name,
                loaded.model,
                self.tokens_NT,
                folder,
                documents_NT=self._probe.documents_NT,
                batch_size=self.settings.on_any_device,
                minibatch=self.minibatch,
            )
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    def lines(
        self, names: Sequence[str], n_points: int, advance: Callable[[int], object] = lambda n_points: None
    ) -> list[Line]:
        """Compute losses at ``n_points`` points from one model to another, for every pair; two models and a third are
        in memory.
        """
        alphas = [i / (n_points - 1) for i in range(n_points)]
        found = []
        for i, j in combinations(range(len(names)), 2):
            a, b = self.load(names[i]).model, self.load(names[j]).model
            try:
                losses = losses_on_line(
                    a,
                    b,
                    alphas,
                    self.tokens_NT,
                    documents_NT=self._probe.documents_NT,
                    batch_size=self.settings.on_any_device,
                    advance=advance,
                )
            except (UsageError, RunError) as error:
                raise type(error)(f"{names[i]} and {names[j]}: {error}") from None
            found.append(Line(i, j, alphas, losses))
        return found
