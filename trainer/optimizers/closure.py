"""The closure that torch's optimizers may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step gives, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
