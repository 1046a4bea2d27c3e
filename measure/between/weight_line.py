"""Losses on the straight line between the weights of two models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import RunError, UsageError
from ...metrics.two_models import Barrier, loss_barrier, token_loss
from ...models.decoder import Decoder
from ..foreign import ForeignModel
from ..measurement import evaluation_mode
from ..next_tokens import first_prediction, passes
from .output_head import final_states, output_head


@dataclass(frozen=True)
class Line:
    """Losses on the straight line from one model to another."""

    a: int
    """Index of the first end among the models."""
    b: int
    alphas: list[float]
    """Rising from 0, the first model, to 1."""
    losses: list[float]
    """Nats per token."""

    @property
    def barrier(self) -> Barrier:
        """Highest rise above the line between the ends."""
        return loss_barrier(self.alphas, self.losses)


#: Logits that are held at once.
_MOST_LOGITS = 1 << 22


def line_problem(a: Decoder | ForeignModel, b: Decoder | ForeignModel) -> str | None:
    """Return the reason why there is no line between two models; None if there is one."""
    ours, theirs = a.state_dict(), b.state_dict()
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in ours or name not in theirs:
            return f"only one of them has {name}"
        if ours[name].shape != theirs[name].shape:
            return f"{name} is {list(ours[name].shape)} in one and {list(theirs[name].shape)} in the other"
    return None if a.config == b.config else "their configs differ"


def losses_on_line(
    a: Decoder | ForeignModel,
    b: Decoder | ForeignModel,
    alphas: Sequence[float],
    tokens_NT: np.ndarray,
    *,
    documents_NT: np.ndarray | None = None,
    batch_size: int,
    advance: Callable[[int], object] = lambda n_points: None,
) -> list[float]:
    """Compute the mean next-token loss in nats at ``(1 − α)·a + α·b``, for each α.

    Weights are interpolated in place in a third model; ``a`` and ``b`` stay unchanged. Hidden units are matched by
    number: no permutation is sought. Models with ``attention.documents`` see each document alone: ``documents_NT`` has
    the numbers of the tokens' documents.

    Raises:
        UsageError: the configs of the two differ, or they predict none of the tokens.
        RunError: a loss is NaN or inf.
    """
    if (problem := line_problem(a, b)) is not None:
        raise UsageError(f"no straight line between them: {problem}")
    moved = copy.deepcopy(a)
    found: list[float] = []
    for alpha in alphas:
        _move(moved.state_dict(), a.state_dict(), b.state_dict(), alpha)
        loss = _mean_loss(moved, tokens_NT, documents_NT, batch_size)
        if not np.isfinite(loss):
            raise RunError(f"the loss at α = {alpha:g} of the line is {loss}")
        found.append(loss)
        advance(1)
    return found


@torch.no_grad()
def _move(moved: dict[str, Tensor], a: dict[str, Tensor], b: dict[str, Tensor], alpha: float) -> None:
    for name, tensor in moved.items():
        if not tensor.is_floating_point():
            if not torch.equal(a[name], b[name]):
                raise UsageError(f"no straight line between them: {name} holds whole numbers, and they differ")
        elif alpha in (0, 1):
            # To the bit, which a sum with rounding is not.
            tensor.copy_((a, b)[int(alpha)][name])
        else:
            torch.lerp(a[name], b[name], alpha, out=tensor)


def _mean_loss(
    model: Decoder | ForeignModel, tokens_NT: np.ndarray, documents_NT: np.ndarray | None, batch_size: int
) -> float:
    total, n_tokens = 0.0, 0
    first = first_prediction(model.config, tokens_NT.shape[1])
    head = output_head(model)
    rows = max(1, _MOST_LOGITS // len(head.weight_VD))
    with evaluation_mode(model), final_states(model) as kept:
        for tokens_BT, more in passes(model, tokens_NT, documents_NT, batch_size):
            model(tokens_BT, last_only=True, **more)
            x_RD, targets_R = kept[0][:, first:-1].flatten(0, 1), tokens_BT[:, first + 1 :].flatten()
            n_tokens += len(targets_R)
            for start in range(0, len(x_RD), rows):
                part = slice(start, start + rows)
                total += float(token_loss(head(x_RD[part]), targets_R[part]).sum())
    return total / n_tokens
