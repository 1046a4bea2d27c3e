"""Birthmark: pretrain transformers and see the mark that their random initialisation left on them.

``import birthmark as bm`` is quick; what is used is loaded then (docs/python.md).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.comparing import Comparison, compare, fingerprint
    from .api.intervening import InterventionResult, intervene
    from .api.model import Model, load, measure
    from .api.named_array import NamedArray
    from .api.run import Run, pretrain
    from .api.snapshots import Snapshot
    from .callbacks.snapshot import BiasSnapshot
    from .callbacks.transformers_trainer import TrainerSnapshot
    from .errors import RunError, UsageError
    from .measure.config import SnapshotConfig
    from .measure.recorder import SnapshotRecorder
    from .trainer.config import RunConfig

__version__ = "0.1.0"

__all__ = [
    "BiasSnapshot",
    "Comparison",
    "InterventionResult",
    "Model",
    "NamedArray",
    "Run",
    "RunConfig",
    "RunError",
    "Snapshot",
    "SnapshotConfig",
    "SnapshotRecorder",
    "TrainerSnapshot",
    "UsageError",
    "compare",
    "fingerprint",
    "intervene",
    "load",
    "measure",
    "pretrain",
]

#: Module of each name, imported when the name is first used.
_MODULES = {
    "BiasSnapshot": ".callbacks.snapshot",
    "Comparison": ".api.comparing",
    "InterventionResult": ".api.intervening",
    "Model": ".api.model",
    "NamedArray": ".api.named_array",
    "Run": ".api.run",
    "RunConfig": ".trainer.config",
    "RunError": ".errors",
    "Snapshot": ".api.snapshots",
    "SnapshotConfig": ".measure.config",
    "SnapshotRecorder": ".measure.recorder",
    "TrainerSnapshot": ".callbacks.transformers_trainer",
    "UsageError": ".errors",
    "compare": ".api.comparing",
    "fingerprint": ".api.comparing",
    "intervene": ".api.intervening",
    "load": ".api.model",
    "pretrain": ".api.run",
}


class _Measure(ModuleType):
    """The sub-package ``measure``, which can be called: ``bm.measure(model)`` is `birthmark.api.model.measure`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module(".api.model", __name__).measure(*args, **kwargs)


class _FrontDoor(ModuleType):
    """Type of this package. A sub-package and a function share the name ``measure``: whichever is loaded first, the
    name works as both.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "measure" and isinstance(value, ModuleType):
            value.__class__ = _Measure
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor


def __getattr__(name: str) -> Any:
    if name == "measure":
        return import_module(".measure", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
