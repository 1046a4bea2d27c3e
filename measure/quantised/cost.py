"""Loss and token preference of a model under each setting of bits, beside those in its own precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import RunError
from ...metrics.preference import kl_to_uniform, preference_ratio
from ...metrics.rankings import spearman
from ...models.decoder import Decoder
from ..hf import HFModel
from ..measurement import evaluation_mode
from ..next_tokens import first_prediction, losses_of, mean_and_error, passes, sequence_means, sequences_at_once
from .linear_maps import quantised
from .rounding import WHOLE, Bits

AS_IT_IS = Bits(WHOLE, WHOLE)


@dataclass(frozen=True)
class QuantisedCost:
    """Losses of a model under one setting of bits, in nats per token."""

    bits: str
    loss: float
    """Mean over sequences of the mean loss of a sequence."""
    loss_se: float
    """Standard error over sequences; NaN for a single one."""
    increase: float
    """Increase of the loss over that of the unchanged model."""
    increase_se: float
    """Standard error of that difference, sequence by sequence."""
    preference_ratio: float
    """``V · max p̄`` on the random probe (definitions §4)."""
    kl_uniform: float
    """``KL(p̄ ‖ uniform)``, nats."""
    rank_correlation: float
    """Spearman's ρ of p̄ with that of the model as it is."""


@dataclass(frozen=True)
class _Found:
    loss_N: np.ndarray
    p_V: np.ndarray


def quantisation_costs(
    model: Decoder | HFModel,
    settings: Sequence[Bits],
    tokens_NT: np.ndarray,
    random_NT: np.ndarray,
    *,
    documents_NT: np.ndarray | None = None,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda n: None,
) -> list[QuantisedCost]:
    """Evaluate a model unchanged, then under each of ``settings``; it is left unchanged.

    Args:
        model: a decoder or a model of ``transformers``.
        settings: settings of bits.
        tokens_NT: int64 ids whose next tokens are predicted ``[N, T]``.
        random_NT: the random probe, for token preference.
        documents_NT: numbers of the tokens' documents, −1 of padding, whose prediction does not count.
        batch_size: sequences in one pass, at most; the result does not depend on it.
        advance: called after each setting.

    Raises:
        UsageError: see :func:`linear_maps` and :func:`first_prediction`.
        RunError: a loss is not finite.
    """
    found: dict[str, _Found] = {}
    with evaluation_mode(model):
        for bits in (AS_IT_IS, *(bits for bits in settings if bits != AS_IT_IS)):
            with quantised(model, bits):
                losses = _losses(model, tokens_NT, documents_NT, batch_size)
                found[str(bits)] = _Found(losses, _mean_prob(model, random_NT, batch_size))
            if not np.isfinite(losses).all():
                raise RunError(f"the loss of {bits} is not finite")
            advance(1)
    before = found[str(AS_IT_IS)]
    return [
        QuantisedCost(
            name,
            *mean_and_error(here.loss_N),
            *mean_and_error(here.loss_N - before.loss_N),
            preference_ratio(here.p_V),
            kl_to_uniform(here.p_V),
            spearman(here.p_V, before.p_V),
        )
        for name, here in found.items()
    ]


def _losses(
    model: Decoder | HFModel, tokens_NT: np.ndarray, documents_NT: np.ndarray | None, batch_size: int
) -> np.ndarray:
    """Compute the mean loss of every sequence, float64 ``[N]``."""
    length = tokens_NT.shape[1]
    first = first_prediction(model.config, length)
    step = sequences_at_once(model, batch_size, length)
    losses = [
        losses_of(model(tokens_BT, **more), tokens_BT, first)
        for tokens_BT, more in passes(model, tokens_NT, documents_NT, step)
    ]
    return sequence_means(losses, documents_NT, first)


def _mean_prob(model: Decoder | HFModel, random_NT: np.ndarray, batch_size: int) -> np.ndarray:
    """Compute p̄, float64 ``[V]``."""
    device = model.device
    total_V = torch.zeros(model.config.vocab_size, dtype=torch.float64, device=device)
    for tokens_BT in torch.from_numpy(np.ascontiguousarray(random_NT)).split(batch_size):
        total_V += model(tokens_BT.to(device), last_only=True).double().softmax(-1).sum(0)
    return (total_V / len(random_NT)).cpu().numpy()
