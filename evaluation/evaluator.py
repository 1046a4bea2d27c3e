"""All that a run is evaluated on, read before it begins and scored as often as it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..data.backcopy import BackCopy, trigger_mask
from ..data.tokenizer import TextTokenizer
from ..errors import UsageError
from ..measure.ranks import from_rank_zero
from ..models.decoder import Decoder
from .config import BACKCOPY, EvalConfig
from .texts import Text, Window, prepare_text, read_text, score

if TYPE_CHECKING:
    from .tasks import Tasks


def backcopy_scores(model: Decoder, task: BackCopy, n_samples: int, batch_size: int) -> dict[str, float]:
    """Score a model: ``copy_accuracy``, the share of triggers after which the copy is the likeliest token (NaN without
    triggers), and ``excess_loss``, the loss above that of a perfect model on the same samples, in nats per token.

    Args:
        model: the decoder.
        task: the split to score on.
        n_samples: the first ones are taken.
        batch_size: samples in one pass.
    """
    samples_NT = task.batch(0, n_samples)
    windows = [Window(sample_T[:-1].tolist(), sample_T[1:].tolist()) for sample_T in samples_NT]
    scores = score(model, windows, batch_size, likeliest=True)
    inputs_NT = samples_NT[:, :-1]
    copies = torch.stack([one.is_likeliest for one in scores])[trigger_mask(torch.from_numpy(inputs_NT))]
    loss = -float(torch.stack([one.log_probs for one in scores]).mean())
    least = float(task.least_losses(samples_NT).mean())
    return {"copy_accuracy": float(copies.double().mean()), "excess_loss": loss - least}


# ---------------------------------------------------------------- evaluation of a run
# Everything is read before the run begins, and scored whenever asked.


@dataclass(frozen=True)
class Material:
    """Texts and tasks of an evaluation, before there is a model."""

    texts: Mapping[str, str]
    tasks: Tasks | None

    @classmethod
    def read(cls, config: EvalConfig) -> Material:
        """Read texts and tasks, before anything else. Collective: call on every rank.

        Raises:
            UsageError: a text or task does not exist, or needs a network that is missing, or lm-eval is missing.
        """
        texts = from_rank_zero(
            lambda: {name: read_text(file, config.text_bytes) for name, file in config.text_names.items()}
        )
        if not config.library_tasks:
            return cls(texts, None)
        # Loads datasets: only who asks for tasks waits for it.
        from .tasks import Tasks, check_library

        check_library()
        # One process fetches files that the cache lacks; the others then find them there.
        tasks: list[Tasks] = []
        from_rank_zero(lambda: tasks.append(Tasks.load(config)))
        return cls(texts, tasks[0] if tasks else Tasks.load(config))


class Evaluator:
    """Evaluator that scores a model on texts and tasks, the same documents every time.

    Args:
        config: settings of the evaluation.
        material: material of the same config.
        tokenizer_path: tokenizer of the run; None if its tokens are not text.
        validation: the run's held-out samples, which ``backcopy`` is scored on.
        max_seq_len: tokens that the model reads at once.
        batch_size: sequences in one pass.

    Raises:
        UsageError: texts or tasks, but no tokenizer to read them; or ``backcopy``, but other samples.
    """

    def __init__(
        self,
        config: EvalConfig,
        material: Material,
        *,
        tokenizer_path: Path | None,
        validation: object,
        max_seq_len: int,
        batch_size: int,
    ) -> None:
        self.config, self.max_seq_len, self.batch_size = config, max_seq_len, batch_size
        self._backcopy: BackCopy | None = None
        if BACKCOPY in config.tasks:
            if not isinstance(validation, BackCopy):
                raise UsageError(
                    "eval.tasks: backcopy is scored on samples of data.path backcopy alone; leave it out, or "
                    "data.tokens_at, which changes them"
                )
            self._backcopy = validation
        self._tasks, self._texts = material.tasks, dict[str, Text]()
        self.tokenizer: TextTokenizer | None = None
        if material.texts or material.tasks:
            if tokenizer_path is None:
                raise UsageError(
                    "eval: the run's tokens have no tokenizer, with which tasks and texts would be read; give "
                    "data.tokenizer, or leave eval.tasks and eval.texts out"
                )
            if material.tasks is not None:
                material.tasks.check_lengths(max_seq_len)
            self.tokenizer = TextTokenizer.load(tokenizer_path)
            prepare = partial(prepare_text, tokenizer=self.tokenizer, length=max_seq_len, stride=config.stride)
            self._texts = {name: prepare(text) for name, text in material.texts.items()}

    @property
    def title(self) -> str:
        """Description of the evaluation in a few words."""
        parts = [f"{name} ({text.n_bytes:,} bytes)" for name, text in self._texts.items()]
        parts += [f"{BACKCOPY} ({self.config.n_docs:,} samples)"] if self._backcopy else []
        parts += [] if self._tasks is None else self._tasks.titles
        return ", ".join(parts)

    def __call__(self, model: Decoder) -> dict[str, float]:
        """Return ``eval/NAME/SCORE`` of everything. Collective: call on every rank; all return the same."""
        found: dict[str, float] = {}
        for name, text in self._texts.items():
            found[f"eval/{name}/bits_per_byte"] = text.bits_per_byte(model, self.batch_size)
        if self._backcopy is not None:
            scores = backcopy_scores(model, self._backcopy, self.config.n_docs, self.batch_size)
            found |= {f"eval/{BACKCOPY}/{name}": value for name, value in scores.items()}
        if self._tasks is not None:
            assert self.tokenizer is not None
            found |= self._tasks.scores(model, self.tokenizer, self.max_seq_len, self.batch_size)
        return found
