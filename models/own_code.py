"""A user's own classes, named in a config as ``module:Class``: found on Python's path or in the working directory."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UsageError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_own(name: str) -> bool:
    """Whether ``name`` has the form ``module:Class``; nothing is imported."""
    return _NAME.fullmatch(name) is not None


def import_own(name: str, field: str) -> Any:
    """What ``name`` stands for, with its module imported.

    Args:
        name: ``module:Class``, also ``package.module:Class`` and ``module:Outer.Inner``.
        field: the config's field that names it; messages begin with it.

    Raises:
        UsageError: no such form, the module lies in a run's folder, or it cannot be imported.
    """
    if not is_own(name):
        raise UsageError(f"{field} has {name!r}: give module:Class")
    module, _, attribute = name.partition(":")
    try:
        with _working_directory_on_path():
            if (run := _run_that_holds(module.partition(".")[0])) is not None:
                raise UsageError(
                    f"{field} {name}: the module lies in the run's folder {run}, and no code is taken from runs; "
                    "move it beside your own"
                )
            found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except UsageError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise UsageError(f"{field} {name}: cannot be imported ({in_words(error)})") from error
    return found


def in_words(error: BaseException) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Modules beside a user's script are found, however Python was started."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _run_that_holds(module: str) -> Path | None:
    """The run's folder that a top-level module would come from: a run may be someone else's, with a module in it."""
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    folders = (parent for place in places if place is not None for parent in Path(place).resolve().parents)
    return next((folder for folder in folders if (folder / "birth.json").is_file()), None)
