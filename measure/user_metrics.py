"""Users' metrics, as ``snapshot.metrics`` names them: found, checked, and run under guard.

Such a metric is a ``torchmetrics.Metric`` with a declaration of its results (class attribute ``quantities``), made
with the :class:`~birthmark.metrics.quantity.Sizes` of a measurement. It has a method for each place that it reads
(``measure/observed.py``), and ``compute`` gives its arrays and scalars by name.
One that raises, or changes the model, its gradients or a random state, ends the measurement with a line that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from ..errors import RunError, UsageError
from ..metrics.quantities import MEASURED
from ..metrics.quantity import Quantity, Sizes
from ..models.observe import Attended
from ..models.own_code import import_own, in_words
from .model_state import ModelDigest, ModelState, version
from .observed import PLACES, Arrays, MetricSource, Place, Scalars, SelfObserving, Setting
from .ranks import max_over_ranks

#: A metric as a user names it: ``module:Class``, the class, or one of its instances.
MetricLike = str | type[Metric] | Metric


# ---------------------------------------------------------------- finding and checking


def find_metric(metric: MetricLike) -> MetricSource:
    """Import and check a user's metric.

    Raises:
        UsageError: the metric cannot be imported, is not a metric, or declares nothing or something impossible.
    """
    found = import_own(metric, "snapshot.metrics") if isinstance(metric, str) else metric
    own = found if isinstance(found, type) else type(found)
    name = metric if isinstance(metric, str) else f"{own.__module__}:{own.__qualname__}"

    def refuse(problem: str) -> UsageError:
        return UsageError(f"snapshot.metrics {name}: {problem}")

    if not issubclass(own, Metric):
        raise refuse("is no torchmetrics.Metric; give a class that derives from it")
    declared: Any = getattr(found, "quantities", None)
    quantities = tuple(declared) if isinstance(declared, (tuple, list)) else ()
    if not quantities or not all(isinstance(q, Quantity) for q in quantities):
        raise refuse("declares no quantities; give the class attribute quantities = (Quantity(…), …)")
    if problems := [problem for q in quantities for problem in q.problems()]:
        raise refuse(problems[0])
    if not any(callable(getattr(found, place, None)) for place in PLACES):
        raise refuse(f"reads no place of a pass; give a method {', '.join(PLACES[:-1])} or {PLACES[-1]}")

    def make(sizes: Sizes) -> Metric:
        if not isinstance(found, Metric):
            made: Any = found
            return made(sizes)
        found.reset()
        return found

    return MetricSource(name, quantities, make)


def find_metrics(metrics: Sequence[MetricLike | MetricSource]) -> list[MetricSource]:
    """Import and check all of a user's metrics, and check that their names are unique.

    Raises:
        UsageError: see :func:`find_metric`, or a name that is taken.
    """
    sources = [metric if isinstance(metric, MetricSource) else find_metric(metric) for metric in metrics]
    owners = {**dict.fromkeys(MEASURED, "birthmark itself")}
    for source in sources:
        for quantity in source.quantities:
            if (owner := owners.get(quantity.name)) is not None:
                raise UsageError(
                    f"snapshot.metrics {source.name}: the name {quantity.name!r} is that of a quantity of {owner}; "
                    "give another"
                )
            owners[quantity.name] = source.name
    return sources


# ---------------------------------------------------------------- observing


class Guarded(SelfObserving):
    """A user's metric under guard: a forbidden change or an exception ends the measurement after the pass, on all
    ranks.
    """

    def __init__(self, source: MetricSource, setting: Setting) -> None:
        self.problem: str | None = None
        self._cause: Exception | None = None
        self.source = source
        self._state = ModelState(setting.model)
        before = self._state.now()
        try:
            super().__init__(source, setting)
        except Exception as error:
            raise UsageError(f"snapshot.metrics {source.name}: cannot be made ({in_words(error)})") from error
        self.name = f"snapshot.metrics {source.name}"
        self.problem = self._state.difference(before)

    def hook(self, place: Place) -> Callable[..., None] | None:
        """See :class:`Observed`."""
        method = super().hook(place)
        return None if method is None else partial(self._guarded, place, method)

    def _show_maps(self, read: Callable[..., None], layer: int, maps: tuple[Tensor, Tensor, Tensor | None]) -> None:
        self._guarded("mlp_maps", read, layer, *maps)

    def _guarded(self, what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method, unless an earlier call failed, and check the state that it leaves behind."""
        if self.problem is not None:
            return None
        tensors = _tensors(arguments)
        versions = [version(x) for x in tensors]
        before, found = self._state.now(), None
        try:
            found = method(*arguments)
        except Exception as error:
            self.problem, self._cause = f"{what} raised {in_words(error)}", error
            return None
        self.problem = self._state.difference(before)
        if versions != [version(x) for x in tensors]:
            self.problem = f"{what} changed a tensor that it was shown; work on a copy"
        return found

    def check(self) -> None:
        """Raise RunError on all ranks if the metric failed on one of them. Collective: call on every rank."""
        if max_over_ranks(int(self.problem is not None)):
            raise RunError(f"{self.name}: {self.problem or 'failed on another rank'}") from self._cause

    def result(self) -> tuple[Scalars, Arrays]:
        """See :class:`Observed`."""
        found = self._guarded("compute", self._quiet_compute)
        self.check()
        return self._named(found)

    def _quiet_compute(self) -> Any:
        with warnings.catch_warnings():
            # A rank without a sequence of a small probe adds nothing.
            warnings.filterwarnings("ignore", r".*compute.* was called before the .*update.*")
            return self.metric.compute()


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    found = []
    for argument in arguments:
        fields = vars(argument).values() if isinstance(argument, Attended) else (argument,)
        found += [x for x in fields if isinstance(x, Tensor)]
    return found


@contextmanager
def left_alone(model: nn.Module, sources: Sequence[MetricSource]) -> Iterator[None]:
    """Raise RunError on all ranks if a user's metric changed parameters or gradients within the context."""
    if not sources:
        yield
        return
    digest = ModelDigest(model)
    yield
    problem = digest.difference()
    if max_over_ranks(int(problem is not None)):
        names = " or ".join(source.name for source in sources)
        raise RunError(f"snapshot.metrics {names}: {problem or 'changed the model on another rank'}")
