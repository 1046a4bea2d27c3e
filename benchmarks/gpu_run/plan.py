"""Order of the parts. Every module of ``parts`` has ``cases(setting)``, by importance: the last ones are left out
first.
"""

from __future__ import annotations

from importlib import import_module

from .case import Case, Setting


def cases_of(part: str, setting: Setting) -> list[Case]:
    """Return the cases of a part in this setting."""
    found: list[Case] = import_module(f".parts.{part}", __package__).cases(setting)
    return found
