"""Pairs of models: by what one pass of each has left, and on the straight line between their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError, UsageError
from ..messages import one_line
from ..metrics.two_models import Barrier, cka, hsic, loss_barrier, token_kl, token_loss
from ..models.decoder import Decoder
from .hf import HFModel
from .hidden_states import definition
from .measurement import evaluation_mode
from .model_reading import ModelReading, final_states, output_head
from .next_tokens import first_prediction, passes, standard_error


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
_MOST_LOGITS_OF_TWO = 1 << 22


def line_problem(a: Decoder | HFModel, b: Decoder | HFModel) -> str | None:
    """Return the reason why there is no line between two models; None if there is one."""
    tensors_a, tensors_b = a.state_dict(), b.state_dict()
    for name in [*tensors_a, *(name for name in tensors_b if name not in tensors_a)]:
        if name not in tensors_a or name not in tensors_b:
            return f"only one of them has {name}"
        if tensors_a[name].shape != tensors_b[name].shape:
            return f"{name} is {list(tensors_a[name].shape)} in one and {list(tensors_b[name].shape)} in the other"
    one, other = definition(a), definition(b)
    differ = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return f"their configs differ in {one_line(', '.join(differ))}" if differ else None


def losses_on_line(
    a: Decoder | HFModel,
    b: Decoder | HFModel,
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
    model: Decoder | HFModel, tokens_NT: np.ndarray, documents_NT: np.ndarray | None, batch_size: int
) -> float:
    total, n_tokens = 0.0, 0
    first = first_prediction(model.config, tokens_NT.shape[1])
    head = output_head(model)
    rows = max(1, _MOST_LOGITS_OF_TWO // len(head.weight_VD))
    with evaluation_mode(model), final_states(model) as kept:
        for tokens_BT, more in passes(model, tokens_NT, documents_NT, batch_size):
            model(tokens_BT, last_only=True, **more)
            x_RD, targets_R = kept[0][:, first:-1].flatten(0, 1), tokens_BT[:, first + 1 :].flatten()
            n_tokens += len(targets_R)
            for start in range(0, len(x_RD), rows):
                part = slice(start, start + rows)
                total += float(token_loss(head(x_RD[part]), targets_R[part]).sum())
    return total / n_tokens


# ---------------------------------------------------------------- all pairs
# Comparison of every pair of models, from the stored results of one pass of each.

#: Logits of all models together that are held at once: 32 MiB in float64.
_MOST_LOGITS = 1 << 22


@dataclass(frozen=True)
class AllPairs:
    """Results for every pair of A models; ``N`` sequences of ``T`` tokens."""

    names: list[str]
    cka_by_layer: dict[tuple[int, int], np.ndarray]
    """(a, b), a ≤ b → CKA ``[L_a + 1, L_b + 1]``: the embedding output, then the state after each block."""
    kl_AAT: np.ndarray
    """``KL(p_a ‖ p_b)`` in nats at each position, mean over sequences, ``[A, A, T]``."""
    kl_se_AA: np.ndarray
    """Standard error of the mean over positions, from the spread over sequences."""
    loss_AT: np.ndarray | None
    """Mean loss in nats on the token after each position but the last, ``[A, T − 1]``, NaN where a model does not
    predict it; None on random tokens."""

    def last_cka(self) -> np.ndarray:
        """Return CKA of the states after the last blocks, symmetric ``[A, A]``."""
        found = np.full((len(self.names),) * 2, np.nan)
        for (a, b), cka_PQ in self.cka_by_layer.items():
            found[a, b] = found[b, a] = cka_PQ[-1, -1]
        return found

    def mean_kl(self) -> np.ndarray:
        """Return ``KL(p_a ‖ p_b)``, mean over all positions, ``[A, A]``."""
        found: np.ndarray = self.kl_AAT.mean(-1)
        return found

    def mean_loss(self) -> np.ndarray | None:
        """Return the mean of `loss_AT` over the positions that a model predicts from, ``[A]``; None on random
        tokens.
        """
        return None if self.loss_AT is None else np.nanmean(self.loss_AT, 1)


@dataclass(frozen=True)
class Compared:
    """All comparisons between some models, for runs at one step of their training."""

    step: int | None
    """None: each model has its own."""
    pairs: AllPairs
    lines: list[Line]
    """Lines between every pair's weights; empty if none was requested."""


def compare_readings(
    readings: Sequence[ModelReading],
    tokens_NT: np.ndarray,
    *,
    is_text: bool,
    advance: Callable[[int], object] = lambda n_sequences: None,
) -> AllPairs:
    """Compute CKA of all layers, KL of all next-token predictions and, on text, the loss. No model is run.

    Logits are computed some rows at a time, once for each model: they take 32 MiB in all, for any N, T and V.

    Raises:
        UsageError: a model predicts none of the tokens, so it has no loss.
    """
    n = len(readings)
    pairs = [(a, b) for a in range(n) for b in range(a, n)]
    hsic_of = {(a, b): hsic(readings[a].grams(), readings[b].grams()) for a, b in pairs}
    own = [hsic_of[a, a].diagonal() for a in range(n)]
    by_layer = {(a, b): cka(hsic_of[a, b], own[a], own[b]) for a, b in pairs}
    heads = [reading.head() for reading in readings]
    n_sequences, seq_len = tokens_NT.shape
    rows = max(1, _MOST_LOGITS // (n * len(heads[0].weight_VD)))
    kl_TAA, kl_NAA = np.zeros((seq_len, n, n)), np.zeros((n_sequences, n, n))
    loss_AT = np.zeros((n, seq_len))
    first = 0
    for batch in range(readings[0].n_batches):
        states = [reading.states(batch) for reading in readings]
        size = len(states[0])
        following_R = torch.from_numpy(np.roll(tokens_NT[first : first + size], -1, axis=1)).flatten()
        flat = [x_BTD.flatten(0, 1) for x_BTD in states]
        kl, losses = [], []
        for start in range(0, size * seq_len, rows):
            part = slice(start, start + rows)
            logits = [head(x_RD[part]) for head, x_RD in zip(heads, flat, strict=True)]
            kl.append(token_kl(logits))
            if is_text:
                losses.append(torch.stack([token_loss(logits_RV, following_R[part]) for logits_RV in logits]))
        kl_BTAA = torch.cat(kl).view(size, seq_len, n, n).numpy()
        kl_TAA += kl_BTAA.sum(0)
        kl_NAA[first : first + size] = kl_BTAA.mean(1)
        if is_text:
            loss_AT += torch.cat(losses, 1).view(n, size, seq_len).sum(1).numpy()
        first += size
        advance(size)
    if is_text:
        for loss_T, reading in zip(loss_AT, readings, strict=True):
            loss_T[: first_prediction(reading.config, seq_len)] = np.nan
    return AllPairs(
        [reading.name for reading in readings],
        by_layer,
        np.moveaxis(kl_TAA / n_sequences, 0, -1),
        standard_error(kl_NAA),
        loss_AT[:, :-1] / n_sequences if is_text else None,
    )
