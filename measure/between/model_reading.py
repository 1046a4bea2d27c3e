"""One model's pass over a probe, and its results on disk for every later comparison.

n models take n passes, with one model at a time in memory. Each pass stores, in float32, the output head ``[V, D]``,
the final hidden states ``[N, T, D]`` and, for each of the L + 1 places, the centred Gram matrices of the last
position's states, about ``N·n/2`` numbers for minibatches of n sequences, for any width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import RunError
from ...files import write_failure
from ...metrics.two_models import gram_vector, minibatches
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...models.observe import Attended, Site
from ..foreign import ForeignModel
from ..foreign.foreign_model import ForeignConfig
from ..measurement import evaluation_mode
from ..next_tokens import passes
from .output_head import OutputHead, check_head, final_states, output_head


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
    config: ModelConfig | ForeignConfig
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
    model: Decoder | ForeignModel,
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
