"""A user's own metrics, as ``snapshot.metrics`` names them: found, checked, and shown the pass under guard."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from typing_extensions import override

from ..errors import RunError, UsageError
from ..metrics.quantities import MEASURED
from ..metrics.quantity import Quantity, Sizes
from ..models.observe import Attended
from ..models.tensor_shards import reshard
from ..models.user_classes import import_user_class, in_words
from .observed_metrics import PLACES, Arrays, MetricSource, Place, Scalars, SelfObserving, Setting
from .ranks import max_over_ranks


def version(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views."""
    return -1 if tensor.is_inference() else tensor._version


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelState:
    """State of a model and of random generators that a metric must not change. Checked around each call, without
    copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.parameters = list(model.named_parameters())
        self.tensors = [*self.parameters, *model.named_buffers()]
        device = next(model.parameters()).device
        self.cuda = device if device.type == "cuda" else None

    def now(self) -> dict[str, Any]:
        """Return the current values to compare, by a phrase for each with its name in the model, if any."""
        found: dict[str, Any] = {}
        for name, x in self.tensors:
            found[f"changed {name}"] = version(x)
        for name, x in self.parameters:
            grad = x.grad
            found[f"changed the gradient of {name}"] = None if grad is None else (id(grad), version(grad))
            found[f"changed requires_grad of {name}"] = x.requires_grad
        for name, module in self.modules:
            found[f"changed the training mode of {name or 'the model'}"] = module.training
            found[f"changed the hooks of {name or 'the model'}"] = [len(getattr(module, kind)) for kind in _HOOKS]
        drew = "drew random numbers, which training would miss: {}; give it a generator of its own"
        found[drew.format("torch's")] = torch.get_rng_state().numpy().tobytes()
        if self.cuda is not None:
            found[drew.format("torch's on the GPU")] = torch.cuda.get_rng_state(self.cuda).numpy().tobytes()
        numpys: Any = np.random.get_state(legacy=True)
        found[drew.format("numpy's")] = (np.asarray(numpys[1]).tobytes(), numpys[2:])
        found[drew.format("Python's")] = random.getstate()
        found["changed whether gradients are on"] = torch.is_grad_enabled()
        return found

    def difference(self, before: Mapping[str, Any]) -> str | None:
        """Name the first difference in words; None if there is none."""
        now = self.now()
        return next((words for words, value in before.items() if now[words] != value), None)


class ModelDigest:
    """Sums over all bits of a model's parameters and gradients: they show changes that torch's count misses."""

    def __init__(self, model: nn.Module) -> None:
        # Weights that a strategy has gathered are freed before and after, so that the same tensors are compared.
        reshard(model)
        self.parameters = list(model.named_parameters())
        self.before = self._sums()

    def _sums(self) -> Tensor:
        sums = [_bits(x) for _, p in self.parameters for x in (p, p.grad)]
        device = next((total.device for total in sums if total.device.type != "cpu"), torch.device("cpu"))
        return torch.stack([total.to(device) for total in sums]) if sums else torch.zeros(0)

    def difference(self) -> str | None:
        """Name the first changed parameter in words; None if there is none."""
        changed = (self._sums() != self.before).nonzero().flatten().tolist()
        if not changed:
            return None
        name = self.parameters[changed[0] // 2][0]
        return f"changed {'the gradient of ' if changed[0] % 2 else ''}{name}"


def _bits(tensor: Any) -> Tensor:
    """Sum a tensor's bits as whole numbers; for a sharded one, those of this rank's shard."""
    if tensor is None or tensor.is_meta:  # accelerate keeps the weights elsewhere
        return torch.zeros((), dtype=torch.int64)
    held = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return held.detach().view(whole_numbers[held.element_size()]).sum(dtype=torch.int64)


# ---------------------------------------------------------------- users' metrics, as ``snapshot.metrics`` names them
# Found, checked, and run under guard.
#
# Such a metric is a ``torchmetrics.Metric`` with a declaration of its results (class attribute ``quantities``), made
# with the :class:`~birthmark.metrics.quantity.Sizes` of a measurement. It has a method for each place that it reads
# (``measure/observed_metrics.py``), and ``compute`` gives its arrays and scalars by name. One that raises, or changes
# the model, its gradients or a random state, ends the measurement with a line that names it.

#: A metric as a user names it: ``module:Class``, the class, or one of its instances.
MetricLike = str | type[Metric] | Metric


# ---------------------------------------------------------------- finding and checking


def find_metric(metric: MetricLike) -> MetricSource:
    """Import and check a user's metric.

    Raises:
        UsageError: the metric cannot be imported, is not a metric, or declares nothing or something impossible.
    """
    found = import_user_class(metric, "snapshot.metrics") if isinstance(metric, str) else metric
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
            self.metric.to(setting.device)
        except Exception as error:
            raise UsageError(f"snapshot.metrics {source.name}: cannot be made ({in_words(error)})") from error
        self.name = f"snapshot.metrics {source.name}"
        self.problem = self._state.difference(before)

    @override
    def hook(self, place: Place) -> Callable[..., None] | None:
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

    @override
    def result(self) -> tuple[Scalars, Arrays]:
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
