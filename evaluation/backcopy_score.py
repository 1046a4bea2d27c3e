"""Scores of a model on the bigram-backcopy task (definitions §11): copying, and distance from a perfect model."""

from __future__ import annotations

import numpy as np
import torch

from ..data.backcopy import BackCopy, trigger_mask
from ..models.decoder import Decoder
from .windows import Window, score


def backcopy_scores(model: Decoder, task: BackCopy, n_samples: int, batch_size: int) -> dict[str, float]:
    """Score a model: ``copy_accuracy``, the share of triggers after which the copy is the likeliest token (NaN without
    triggers), and ``excess_loss``, the loss above that of a perfect model on the same samples, in nats per token.

    Args:
        model: the decoder.
        task: the split to score on.
        n_samples: the first ones are taken.
        batch_size: samples in one pass.
    """
    samples_NT = task.batch(0, n_samples)
    windows = [Window(sample_T[:-1].tolist(), sample_T[1:].tolist()) for sample_T in samples_NT]
    scores = score(model, windows, batch_size, likeliest=True)
    inputs_NT = samples_NT[:, :-1]
    copies = torch.stack([one.is_likeliest for one in scores])[trigger_mask(torch.from_numpy(inputs_NT))]
    loss = -float(torch.stack([one.log_probs for one in scores]).mean())
    least = float(np.mean(task.next_token_entropy()[inputs_NT]))
    return {"copy_accuracy": float(copies.double().mean()), "excess_loss": loss - least}
