"""The next tokens of a probe: those that a model predicts, the passes in which it does, and standard errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from .hf import HFModel
from .hf.hf_model import HFConfig
from .passes import documents_apart


def standard_error(values_N: np.ndarray) -> np.ndarray:
    """Compute the standard error of the mean over the first axis ``[N, …]``, from the spread of its entries; NaN for a
    single one.
    """
    n = len(values_N)
    return values_N.std(0, ddof=1) / n**0.5 if n > 1 else np.full(values_N.shape[1:], np.nan)


def mean_and_error(values_N: np.ndarray) -> tuple[float, float]:
    """Compute the mean of ``[N]`` and its standard error."""
    return float(values_N.mean()), float(standard_error(values_N))


def share_interval(k: int, n: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share, seen as ``k`` of ``n`` (Clopper & Pearson 1934); NaN if n is 0."""
    from scipy import stats

    if not n:
        return float("nan"), float("nan")
    found = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


# ---------------------------------------------------------------- the next tokens of a probe
# The predicted ones among them, and the passes that predict them.

#: Logits of one forward pass, at most.
_LOGITS = 1 << 25


def first_prediction(config: ModelConfig | HFConfig, n_tokens: int) -> int:
    """Return the first position whose next token counts in a loss, for sequences of ``n_tokens``.

    Raises:
        UsageError: there is none: all belong to a prefix that sees itself.
    """
    first = config.attention.first_prediction
    if first > n_tokens - 2:
        raise UsageError(
            f"sequences of {n_tokens} tokens: of a prefix of {first + 1} (model.attention.prefix) none is predicted; "
            f"give a seq_len of {first + 2} or more"
        )
    return first


def passes(
    model: Decoder | HFModel, tokens_NT: np.ndarray, documents_NT: np.ndarray | None, batch_size: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the batches of a probe ``[B, T]`` on the model's device, each with further arguments of its pass: the
    numbers of their documents, if the model sees each document alone.
    """
    device, apart = model.device, documents_apart(model)
    for start in range(0, len(tokens_NT), batch_size):
        part = slice(start, start + batch_size)
        more: dict[str, Tensor] = {}
        if apart and documents_NT is not None:
            more["documents_BT"] = torch.from_numpy(np.ascontiguousarray(documents_NT[part])).to(device)
        yield torch.from_numpy(np.ascontiguousarray(tokens_NT[part])).to(device), more


def sequences_at_once(model: Decoder | HFModel, batch_size: int, n_positions: int) -> int:
    """Return the number of sequences for a pass with logits at so many positions: ``batch_size``, or as many as memory
    holds.
    """
    return max(min(batch_size, _LOGITS // (n_positions * model.config.vocab_size)), 1)


def losses_of(logits_BTV: Tensor, tokens_BT: Tensor, first: int) -> Tensor:
    """Compute losses of the next tokens from position ``first`` on, from logits of all positions: nats, float64 ``[B,
    S]``.
    """
    logits_BVS, targets_BS = logits_BTV[:, first:-1].transpose(1, 2), tokens_BT[:, first + 1 :]
    return F.cross_entropy(logits_BVS.float(), targets_BS, reduction="none").double()


def sequence_means(losses: list[Tensor], documents_NT: np.ndarray | None, first: int) -> np.ndarray:
    """Compute the mean loss of every sequence, float64 ``[N]``, from the batches of :func:`losses_of`.

    Args:
        losses: losses of each batch, ``[B, S]``.
        documents_NT: numbers of the tokens' documents, −1 for padding, whose prediction does not count.
        first: the first position whose next token counts.
    """
    loss_NS = torch.cat([loss_BS.cpu() for loss_BS in losses]).numpy()
    counts_NS = np.ones_like(loss_NS) if documents_NT is None else documents_NT[:, first + 1 :] >= 0
    found: np.ndarray = (loss_NS * counts_NS).sum(1) / counts_NS.sum(1)
    return found
