"""Users' classes, named in a config as ``module:Class``, and the places that their modules may come from.

A module comes from what is installed (any entry of Python's path but the working folder). If it is not there:

- and a person named it, on the command line or in a config outside of a run, from the working folder;
- and only the config of a run names it, from the folders of :data:`VARIABLE`: a run, and the file beside it, may come
  from somebody else.

So no file of the working folder takes the place of an installed module, and no run decides that one is executed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UsageError

#: Environment variable with folders, divided as in PATH, of modules that any config may name.
VARIABLE = "BIRTHMARK_CODE"

_PATTERN = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NAME = re.compile(_PATTERN, re.ASCII)
_IN_TEXT = re.compile(rf"(?<![\w.:/]){_PATTERN}(?![\w.:/])", re.ASCII)


def is_user_class(name: str) -> bool:
    """Return True if ``name`` has the form ``module:Class``; nothing is imported."""
    return _NAME.fullmatch(name) is not None


# ── who named it ─────────────────────────────────────────────────────────────────────────────────────────────────────

#: Names that a person gave to this process, and names that a run's config has.
_named: set[str] = set()
_of_runs: set[str] = set()
#: Module → class in it that was imported → its field and name.
_imported: dict[str, dict[str, str]] = {}


def name_user_code(source: Any) -> None:
    """Let the classes that a person names come from the working folder.

    Args:
        source: a config as nested fields, or words of a command line: every ``module:Class`` in it is meant.
    """
    _named.update(_names_in(source))


def note_code_of_run(config: Any) -> None:
    """Remember the names in the config of a run, nested fields, which by themselves let no module come from the working
    folder.
    """
    _of_runs.update(_names_in(config))


def _names_in(source: Any) -> Iterator[str]:
    if isinstance(source, str):
        yield from _IN_TEXT.findall(source)
    elif isinstance(source, Mapping):
        yield from _names_in(list(source.values()))
    elif isinstance(source, Iterable):
        for one in source:
            yield from _names_in(one)


def user_code_for_children() -> dict[str, str]:
    """Return the environment in which a child process may import the classes that a person named to this process."""
    folders = [*_code_folders(), *([str(Path.cwd())] if _named else [])]
    return {VARIABLE: os.pathsep.join(folders)} if folders else {}


# ── importing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def import_user_class(name: str, field: str) -> Any:
    """Import the module of ``name`` and return the object that it names.

    Args:
        name: ``module:Class``, also ``package.module:Class`` and ``module:Outer.Inner``.
        field: the config's field that names it; messages begin with it.

    Raises:
        UsageError: wrong form, the module lies in a run's folder, only a run names it, or it cannot be imported.
    """
    if not is_user_class(name):
        raise UsageError(f"{field} has {name!r}: give module:Class")
    module, _, attribute = name.partition(":")
    top = module.partition(".")[0]
    of_run_alone = name in _of_runs and name not in _named
    try:
        with _search_path([*_code_folders(), *([] if of_run_alone else [str(Path.cwd())])]):
            places = _places_of(top)
            if not places and of_run_alone and top not in sys.modules:
                raise UsageError(
                    f"{field} {name}: the run's config names it, and nothing installed has the module {top}; if you "
                    f"trust a {top}.py of yours, name its folder, as in {VARIABLE}=. for this one"
                )
            if (run := _run_that_holds(places)) is not None:
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
    _imported.setdefault(module, {})[attribute] = f"{field} {name}"
    return found


def raised_in_user_code(error: BaseException) -> str | None:
    """Return the field and the name of the user's class in whose module an error arose, or in a call from there; None
    for any other error.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if classes := _imported.get(frame.f_globals.get("__name__", "")):
            # A module may hold several, of which a function beside them does not say one.
            own = type(frame.f_locals.get("self")).__qualname__
            return classes.get(own) or " or ".join(classes.values())
    return None


def require_shape(made: object, method: str, given: object, wanted: Sequence[int]) -> None:
    """Require that a method of a user's class has given a tensor of one shape: another may broadcast, and train
    something else.

    Args:
        made: the instance; messages have the name of its class.
        method: name of the method.
        given: the value that it returned.
        wanted: the shape.

    Raises:
        UsageError: no tensor, or another shape.
    """
    shape = getattr(given, "shape", None)
    if shape != wanted:
        found = type(given).__name__ if shape is None else f"the shape {list(shape)}"
        raise UsageError(f"{name_in_config(made)}: {method} gives {found}; give a tensor of the shape {list(wanted)}")


def name_in_config(made: object) -> str:
    """Name the class of an instance as the config does that led to its import: its field and ``module:Class``."""
    module, name = type(made).__module__, type(made).__qualname__
    return _imported.get(module, {}).get(name, f"{module}:{name}")


def in_words(error: BaseException) -> str:
    """Put an exception on one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _code_folders() -> list[str]:
    return [str(Path(folder).absolute()) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


@contextmanager
def _search_path(folders: Sequence[str]) -> Iterator[None]:
    """Append ``folders`` to Python's path within the context, and remove the working folder that Python puts first.

    Additions that modules make to the path inside are kept.
    """
    here, before = str(Path.cwd()), list(sys.path)
    first = here if before[:1] == [here] and not sys.flags.safe_path else ""
    during = [*(entry for entry in before if entry not in ("", first)), *folders]
    sys.path[:] = during
    try:
        yield
    finally:
        sys.path[:] = [*(entry for entry in sys.path if entry not in during), *before]


def _places_of(module: str) -> list[str]:
    """Find the files and folders that a top-level module would come from; none if it is loaded or missing."""
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    return [
        place for place in ([] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]) if place
    ]


def _run_that_holds(places: Sequence[str]) -> Path | None:
    """Return the run's folder that a module would come from: a run may be someone else's, with a module in it."""
    folders = (parent for place in places for parent in Path(place).resolve().parents)
    return next((folder for folder in folders if (folder / "birth.json").is_file()), None)
