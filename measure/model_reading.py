"""One model's pass over a probe for later comparisons: its hidden states, its output head, and its files on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import RunError, UsageError
from ..files import write_failure
from ..metrics.two_models import gram_vector, minibatches
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.linear_cross_entropy import soft_capped
from ..models.observe import Attended, Site
from .hf import HFModel
from .hf.hf_model import HFConfig
from .measurement import evaluation_mode
from .next_tokens import passes

# ---------------------------------------------------------------- output head
# A model's final hidden states at all positions, and their map to logits, some rows at a time.
#
# Logits of all positions are a model's largest tensor. So comparisons of predictions compute those of a few rows at a
# time and free them after use.

#: Largest distance of logits from final states to the model's logits, over their standard deviation.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.1


@dataclass(frozen=True)
class OutputHead:
    """Map of final hidden states ``[R, D]`` to logits ``[R, V]``."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    factor: float = 1.0
    """Logits are multiplied by it (Cohere, Granite)."""
    cap: float | None = None
    """Logits are soft-capped at it (Gemma 2)."""

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Compute the logits, in the dtype of the table."""
        logits_RV = F.linear(x_RD.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        if self.factor != 1.0:
            logits_RV = logits_RV * self.factor
        return soft_capped(logits_RV, self.cap)


def output_head(model: Decoder | HFModel) -> OutputHead:
    """Return the head of a model; its tensors are shared with the model."""
    if isinstance(model, Decoder):
        table = model.embed if model.head is None else model.head
        return OutputHead(table.weight.detach(), cap=model.config.logit_softcap)
    hf_model: Any = model.model
    linear, config = hf_model.get_output_embeddings(), hf_model.config.get_text_config()
    bias = getattr(linear, "bias", None)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(linear.weight.detach(), None if bias is None else bias.detach(), factor, cap)


def check_head(model: Decoder | HFModel, head: OutputHead, x_BTD: Tensor, last_BV: Tensor) -> None:
    """Compare the head's logits of the last position with those that the model itself gave.

    Raises:
        UsageError: the logits differ: the model has a further step between final states and logits.
    """
    own = last_BV.float()
    fits = x_BTD.shape[-1] == head.weight_VD.shape[-1]
    worst, scale = (head(x_BTD[:, -1]).float() - own).abs().max() if fits else math.inf, own.std()
    if worst > _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_HALF) * scale + 1e-5:
        what = getattr(model.config, "model_type", "model")
        raise UsageError(f"this {what}'s logits are no linear map of its final states, so they cannot be compared")


@contextmanager
def final_states(model: Decoder | HFModel) -> Iterator[list[Tensor]]:
    """Keep the final hidden states ``[B, T, D]`` that the head reads: within the context, each forward pass replaces
    the content of the list.
    """
    kept: list[Tensor] = []

    def keep_decoder(module: nn.Module, args: Any, x_BTD: Tensor) -> None:
        # The decoder may norm the last position alone.
        kept[:] = [model.norm(x_BTD)]  # type: ignore[operator]

    def keep_hf(module: nn.Module, args: Any, output: Any) -> None:
        kept[:] = [output[0]]

    if isinstance(model, Decoder):
        handle = model.blocks[-1].register_forward_hook(keep_decoder)
    else:
        handle = model.decoder.register_forward_hook(keep_hf)
    try:
        yield kept
    finally:
        handle.remove()


# ---------------------------------------------------------------- model reading
# One model's pass over a probe, and its results on disk for every later comparison.
#
# n models take n passes, with one model at a time in memory. Each pass stores, in float32, the output head ``[V,
# D]``, the final hidden states ``[N, T, D]`` and, for each of the L + 1 places, the centred Gram matrices of the last
# position's states, about ``N·n/2`` numbers for minibatches of n sequences, for any width.


class _LastPositions:
    """Observer of the residual stream before the first block and after each, at the last position."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.found.append(h_BTD[:, -1].float())

    def attention(self, layer: int, attended: Attended) -> None:
        """Read nothing."""

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Read nothing."""


@dataclass(frozen=True)
class ModelReading:
    """Results of a pass, in a folder."""

    name: str
    config: ModelConfig | HFConfig
    folder: Path
    n_batches: int
    """Number of batches of sequences in the pass."""
    n_minibatches: int
    """Number of minibatches of Gram matrices."""
    head_factor: float
    head_cap: float | None

    def head(self) -> OutputHead:
        """Map the output head from its file."""
        table, bias = self.folder / "head.npy", self.folder / "bias.npy"
        # Mapped copy-on-write: torch warns of memory that it must not write to.
        weight = torch.from_numpy(np.load(table, mmap_mode="c"))
        return OutputHead(
            weight, torch.from_numpy(np.load(bias)) if bias.exists() else None, self.head_factor, self.head_cap
        )

    def states(self, batch: int) -> Tensor:
        """Read the final hidden states of a batch, float32 ``[B, T, D]``."""
        return torch.from_numpy(np.load(self.folder / f"states-{batch}.npy"))

    def grams(self) -> Iterator[np.ndarray]:
        """Yield the vectors of all places for each minibatch, float32 ``[L + 1, E]``."""
        for i in range(self.n_minibatches):
            yield np.load(self.folder / f"grams-{i}.npy")


def read_model(
    name: str,
    model: Decoder | HFModel,
    tokens_NT: np.ndarray,
    folder: Path,
    *,
    documents_NT: np.ndarray | None = None,
    batch_size: int,
    minibatch: int,
    advance: Callable[[int], object] = lambda n_sequences: None,
) -> ModelReading:
    """Pass a probe through a model once, and store the results for comparisons in ``folder``. The model is left as it
    was.

    Args:
        name: name of the model, for messages.
        model: the model, on the device for the pass.
        tokens_NT: int64 ids ``[N, T]``, the same for all models.
        folder: an empty one.
        documents_NT: numbers of the tokens' documents, which a model with ``attention.documents`` keeps separate.
        batch_size: sequences in one forward pass; the same for all models.
        minibatch: largest number of sequences in a Gram matrix.
        advance: called with the number of sequences after each batch.

    Raises:
        UsageError: a model that cannot be observed.
        RunError: the model gives NaN or inf, or the disk is full.
    """
    sizes = minibatches(len(tokens_NT), minibatch)
    waiting: list[Tensor] = []
    n_batches = n_grams = 0
    try:
        head = output_head(model)
        _save(folder / "head.npy", head.weight_VD)
        if head.bias_V is not None:
            _save(folder / "bias.npy", head.bias_V)
        with evaluation_mode(model), final_states(model) as kept:
            for tokens_BT, more in passes(model, tokens_NT, documents_NT, batch_size):
                observer = _LastPositions()
                last_BV = model(tokens_BT, last_only=True, observer=observer, **more)
                (x_BTD,) = kept
                if not (x_BTD.isfinite().all() and last_BV.isfinite().all()):
                    raise RunError("the model gives NaN or inf")
                check_head(model, head, x_BTD, last_BV)
                _save(folder / f"states-{n_batches}.npy", x_BTD)
                n_batches += 1
                waiting.append(torch.stack(observer.found))
                while n_grams < len(sizes) and sum(x_PBD.shape[1] for x_PBD in waiting) >= sizes[n_grams]:
                    x_PBD = torch.cat(waiting, 1)
                    own_PND, waiting = x_PBD[:, : sizes[n_grams]], [x_PBD[:, sizes[n_grams] :]]
                    _save(folder / f"grams-{n_grams}.npy", torch.stack([gram_vector(x_ND) for x_ND in own_PND]))
                    n_grams += 1
                advance(len(tokens_BT))
    except RunError as error:
        raise RunError(f"{name}: {error}") from None
    except OSError as error:
        raise write_failure(folder, error) from None
    return ModelReading(name, model.config, folder, n_batches, n_grams, head.factor, head.cap)


def _save(file: Path, x: Tensor) -> None:
    np.save(file, x.detach().to("cpu", torch.float32).numpy())
