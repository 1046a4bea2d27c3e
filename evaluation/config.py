"""Config of a run's evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import PurePath

from ..schema import outside

BACKCOPY = "backcopy"
"""Our own task: the copying of a run on ``data.path backcopy``."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings of evaluation during training: at birth, every so many steps and at the end. Without tasks and texts:
    none.
    """

    tasks: list[str] = field(default_factory=list)
    """Tasks, groups and tags of lm-eval by name, or YAML files of its form (``pip install lm-eval``); or
    ``backcopy``, the score of a run on ``data.path backcopy``. Tasks that need the Hugging Face hub: docs/evaluate.md.
    """

    texts: list[str] = field(default_factory=list)
    """Text files whose bits per byte are measured; each goes by its file's name without the ending."""

    every: int | None = None
    """Optimizer steps between evaluations, a multiple of trainer.checkpoint_every; by default at every checkpoint."""

    share: float = 0.01
    """Largest share of training time for evaluation. If it would take more, it is done more rarely, and a line says so;
    birth and the end are evaluated in any case. 1: as often as asked for.
    """

    n_docs: int = 100
    """Documents of each task, or samples of ``backcopy``: the first ones, the same all through the run."""

    n_shot: int | None = None
    """Examples before each question; by default as many as the task says."""

    text_bytes: int = 65536
    """Bytes that are read of each text, from its beginning."""

    stride: int | None = None
    """Tokens by which the window moves on over a text, at most model.max_seq_len; that, the default, is quickest, less
    gives every token more context."""

    @property
    def is_on(self) -> bool:
        """True if anything is evaluated."""
        return bool(self.tasks or self.texts)

    @property
    def library_tasks(self) -> list[str]:
        """Tasks that lm-eval scores."""
        return [task for task in self.tasks if task != BACKCOPY]

    @property
    def text_names(self) -> dict[str, str]:
        """Names of the texts → their files."""
        return {PurePath(text).stem: text for text in self.texts}

    def problems(self, checkpoint_every: int, max_seq_len: int, data_path: str | list[str]) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy.

        Args:
            checkpoint_every: optimizer steps between checkpoints, with which evaluations come.
            max_seq_len: tokens of the model's longest sequence.
            data_path: training data of the run.
        """
        bounds = {
            "every": (1, 10**10),
            "n_docs": (1, 1 << 32),
            "n_shot": (0, 1000),
            "text_bytes": (1, 1 << 32),
            "stride": (1, max_seq_len),
        }
        found = outside("eval", self, bounds)
        if not 0 < self.share <= 1:
            found.append(f"eval.share is {self.share}: give a number above 0 and at most 1")
        lists = {"tasks": self.tasks, "texts": [PurePath(text).stem for text in self.texts]}
        found += [
            f"eval.{name} has {value!r} twice: give it once, each under a name of its own"
            for name, values in lists.items()
            for value in dict.fromkeys(values)
            if values.count(value) > 1
        ]
        found += [f"eval.tasks and eval.texts both have {name!r}: rename the text" for name in _both(lists)]
        found += [
            f"eval.{name} is given, but {reads} is empty: name what to evaluate, or leave it out"
            for name, (reads, is_read) in self._readers().items()
            if getattr(self, name) != _DEFAULTS[name] and not is_read
        ]
        if self.is_on and self.every is not None and self.every > 0 and self.every % checkpoint_every:
            found.append(
                f"eval.every is {self.every}: evaluations come with checkpoints, so give a multiple of "
                f"trainer.checkpoint_every ({checkpoint_every})"
            )
        if (BACKCOPY in self.tasks) and data_path != "backcopy":
            found.append(f"eval.tasks has backcopy, but data.path is {data_path!r}: leave it out, or train on backcopy")
        if data_path == "backcopy" and (other := [*self.library_tasks, *self.texts]):
            found.append(f"eval has {other[0]!r}, but data.path backcopy is no text: give eval.tasks backcopy alone")
        return found

    def _readers(self) -> dict[str, tuple[str, bool]]:
        """Return, for each field, its reader, and if the reader is in use."""
        return {
            "every": ("eval.tasks and eval.texts", self.is_on),
            "share": ("eval.tasks and eval.texts", self.is_on),
            "n_docs": ("eval.tasks", bool(self.tasks)),
            "n_shot": ("eval.tasks, but for backcopy,", bool(self.library_tasks)),
            "text_bytes": ("eval.texts", bool(self.texts)),
            "stride": ("eval.texts", bool(self.texts)),
        }


def _both(lists: dict[str, list[str]]) -> list[str]:
    return [name for name in dict.fromkeys(lists["texts"]) if name in lists["tasks"]]


_DEFAULTS = {f.name: f.default for f in fields(EvalConfig)}
