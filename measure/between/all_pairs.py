"""Comparison of every pair of models, from the stored results of one pass of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...metrics.two_models import cka, hsic, token_kl, token_loss
from ..next_tokens import first_prediction
from ..standard_error import standard_error
from .model_reading import ModelReading
from .weight_line import Line

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
