"""What the commands do that are not modules of their own yet."""

from __future__ import annotations

from collections.abc import Callable

from jsonargparse import Namespace


def _ablate(parsed: Namespace) -> int:
    from .ablate import ablate

    return ablate(parsed)


def _plan(parsed: Namespace) -> int:
    from .plan import plan_run

    return plan_run(parsed)


def _fingerprint(parsed: Namespace) -> int:
    from .fingerprint import fingerprint

    return fingerprint(parsed)


def _identify(parsed: Namespace) -> int:
    from .fingerprint import identification

    return identification(parsed)


RUN: dict[str, Callable[[Namespace], int]] = {
    "plan": _plan,
    "ablate": _ablate,
    "fingerprint": _fingerprint,
    "identify": _identify,
}
