"""Closures that torch's optimizers may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, which computes gradients, and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
