"""Tasks of lm-eval: found and read before a run begins, and scored by lm-eval at every evaluation."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import UsageError
from ..files import user_path
from ..messages import one_line
from .config import EvalConfig
from .harness import Writing, language_model

if TYPE_CHECKING:
    from ..data.tokenizer import TextTokenizer
    from ..models.decoder import Decoder

#: Default seeds of lm-eval: the first for Python's generator, the second for numpy, torch and the few-shot examples.
_SEED, _OTHER_SEED = 0, 1234
_YAML = (".yaml", ".yml")


def check_library() -> None:
    """Raise UsageError, with the install line, if lm-eval is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("eval.tasks needs lm-eval, which is missing: pip install lm-eval")


@dataclass(frozen=True)
class Tasks:
    """Tasks whose documents have been read."""

    loaded: Mapping[str, Mapping[str, Any]]
    """Requested name → lm-eval's tasks and groups, by name."""
    n_docs: int

    @classmethod
    def load(cls, config: EvalConfig) -> Tasks:
        """Find the tasks of a config and read their documents, from the hub's cache, or the hub if needed.

        Raises:
            UsageError: there is no such task; its documents cannot be had; it asks for what is not done here; or two
                have one name.
        """
        with _apart():
            from lm_eval.tasks import TaskManager

            names = config.library_tasks
            # The index of its own tasks takes a while: files do without.
            manager = TaskManager(include_defaults=not all(map(_is_file, names)))
            loaded: dict[str, Mapping[str, Any]] = {}
            for name in names:
                loaded[name] = _load(manager, name)
                for task_name, task in loaded[name]["tasks"].items():
                    _check(name, task_name, task, config.n_shot)
        seen: dict[str, str] = {}
        for name, found in loaded.items():
            for task_name in found["tasks"]:
                if task_name in seen or task_name in config.text_names:
                    other = seen.get(task_name, "eval.texts")
                    raise UsageError(f"eval.tasks has {name!r}: {other} has a {task_name} too; give one of them")
                seen[task_name] = name
        return cls(loaded, config.n_docs)

    @property
    def titles(self) -> list[str]:
        """Names of its tasks, in a few words each."""
        return [
            f"{name} ({sum(min(self.n_docs, len(task.eval_docs)) for task in found['tasks'].values()):,} documents)"
            for name, found in zip(self._shown(), self.loaded.values(), strict=True)
        ]

    def check_lengths(self, max_seq_len: int) -> None:
        """Raise UsageError if a task generates more tokens than the model reads."""
        for name, task in self._by_name().items():
            writing = _writing(task)
            if writing is not None and writing.n_new >= max_seq_len:
                raise UsageError(
                    f"eval.tasks: {name} lets a model write {writing.n_new} tokens, and model.max_seq_len is "
                    f"{max_seq_len}: give its generation_kwargs a smaller max_gen_toks"
                )

    def _by_name(self) -> dict[str, Any]:
        """Return all tasks, those of groups included; names are unique."""
        return {name: task for found in self.loaded.values() for name, task in found["tasks"].items()}

    def _shown(self) -> list[str]:
        return [Path(name).stem if _is_file(name) else name for name in self.loaded]

    def results(self, model: Decoder, tokenizer: TextTokenizer, max_seq_len: int, batch_size: int) -> Mapping[str, Any]:
        """Return the result of lm-eval's ``evaluate`` on the first ``n_docs`` documents of each task, with its samples.

        Collective: call on every rank; all get the same. Random states are not changed.
        """
        with _apart():
            from lm_eval.evaluator import evaluate

            tasks = self._by_name()
            groups = {name: group for found in self.loaded.values() for name, group in found["groups"].items()}
            for task in tasks.values():
                # The same examples every time.
                task.set_fewshot_seed(seed=_OTHER_SEED)
            adapter = language_model(model, tokenizer, max_seq_len, batch_size)
            # Without the standard errors: those that it draws samples for start processes.
            results: Mapping[str, Any] = evaluate(
                adapter, {"tasks": tasks, "groups": groups}, limit=self.n_docs, bootstrap_iters=0, log_samples=True
            )
            return results

    def scores(self, model: Decoder, tokenizer: TextTokenizer, max_seq_len: int, batch_size: int) -> dict[str, float]:
        """Return ``eval/TASK/SCORE`` of every task, and a group's own scores if it has any."""
        results, found = self.results(model, tokenizer, max_seq_len, batch_size), dict[str, float]()
        for asked in self.loaded.values():
            inner = {child for group in asked["groups"].values() for child in group.child_names}
            groups = {name: _numbers(results["results"].get(name, {})) for name in asked["groups"] if name not in inner}
            if any(groups.values()):
                for name, numbers in groups.items():
                    found |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
                continue
            for name, task in asked["tasks"].items():
                numbers = _numbers(results["results"][name])
                numbers |= _beside(task, results["samples"][name], numbers)
                found |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
        return found


def _is_file(name: str) -> bool:
    return name.endswith(_YAML) or "/" in name


def _load(manager: Any, name: str) -> Mapping[str, Any]:
    """Load a task, group or tag of lm-eval, with its documents."""
    where = f"eval.tasks has {name!r}"
    if _is_file(name) and not user_path(name).is_file():
        raise UsageError(f"{where}: there is no such file; give the name of a task, or a YAML file of lm-eval's form")
    if not _is_file(name) and name not in manager.all_tasks:
        raise UsageError(f"{where}: lm-eval has no such task; `lm-eval ls tasks` lists them, or give a YAML file")
    try:
        found: Mapping[str, Any] = manager.load([str(user_path(name)) if _is_file(name) else name])
    except ConnectionError as error:
        raise UsageError(
            f"{where}: its documents are on the Hugging Face hub, not in the cache here, and it cannot be reached "
            f"({one_line(error)}); fetch them once where it can, or give a YAML file with local files"
        ) from None
    except FileNotFoundError as error:
        raise UsageError(f"{where}: its documents are missing ({one_line(error)}); give its data_files") from None
    except Exception as error:  # a task is code and data of other people's: anything may be raised
        raise UsageError(f"{where}: lm-eval cannot read it ({type(error).__name__}: {one_line(error)})") from None
    if not found["tasks"]:
        raise UsageError(f"{where}: there is no task in it; give one")
    return found


def _check(asked: str, name: str, task: Any, n_shot: int | None) -> None:
    """Refuse tasks that a run cannot score, and set the number of examples before a question, like lm-eval."""
    where = f"eval.tasks has {asked!r}" + (f", and in it {name}" if name != asked and not _is_file(asked) else "")
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"{where}: it has pictures or sound, and a model here reads text; leave it out")
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"{where}: it runs code that a model wrote; evaluate the exported model")
    try:
        _writing(task)
    except ValueError as error:
        raise UsageError(f"{where}: {error}; evaluate the exported model") from None
    default = task.get_config("num_fewshot")
    # A task that says 0 means it.
    if n_shot is not None and default != 0:
        task.set_config(key="num_fewshot", value=n_shot)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)


def _writing(task: Any) -> Writing | None:
    """Return the rules of a task for generation, or None without; ValueError for unsupported ones."""
    if task.get_config("output_type") != "generate_until":
        return None
    return Writing.of(task.get_config("generation_kwargs") or {})


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Return scores by name: lm-eval's ``acc,none`` is ``acc``, and ``exact_match,strict`` is
    ``exact_match/strict``.
    """
    found = {}
    for key, value in results.items():
        score, comma, kind = key.partition(",")
        if comma and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[score if kind == "none" else f"{score}/{kind}"] = float(value)
    return found


def _beside(task: Any, samples: list[Mapping[str, Any]], scores: Mapping[str, float]) -> dict[str, float]:
    """Return standard errors of scores that are means over documents, and the accuracy of guessing."""
    from lm_eval.api.metrics import mean

    found = {}
    aggregations = task.aggregation()
    for name in scores:
        score, _, kind = name.partition("/")
        # One line per document and filter.
        values = [s[score] for s in samples if s["filter"] == (kind or "none") and score in s]
        if aggregations.get(score) is mean and len(values) > 1:
            found[f"{score}_stderr{'/' if kind else ''}{kind}"] = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if task.get_config("output_type") == "multiple_choice" and "acc_mutual_info" not in scores and samples:
        found["chance"] = float(np.mean([1 / len(sample["arguments"]) for sample in samples]))
    return found


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Isolate lm-eval from training within the context: it seeds generators in its default way and they are restored;
    its bars and notes are not printed.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Some libraries' handlers hold the stream that was there when they were imported.
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    random.seed(_SEED)
    np.random.seed(_OTHER_SEED)
    torch.default_generator.manual_seed(_OTHER_SEED)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
