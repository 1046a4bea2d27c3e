"""What a model is shown when it is measured (definitions §2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from .streams import uniforms

if TYPE_CHECKING:
    from .batches import BatchSource


def random_probe(vocab_size: int, n_sequences: int, seq_len: int, probe_seed: int) -> np.ndarray:
    """``n_sequences`` rows of ``seq_len`` tokens, uniform over the whole vocabulary; int64 ``[N, T]``.

    The stream's name holds the word ``probe``, so no data or init seed shares numbers with it. All models of one
    vocabulary get the same rows, and the first rows of a larger probe are the rows of a smaller one.
    """
    u_NT = uniforms("probe", probe_seed, first=0, shape=(n_sequences, seq_len))
    return (u_NT * vocab_size).astype(np.int64)


def text_probe(val: BatchSource, n_sequences: int, seq_len: int) -> np.ndarray:
    """The first ``seq_len`` tokens of the first ``n_sequences`` validation samples; int64 ``[N, T]``.

    Raises:
        UsageError: the validation text has fewer samples, or shorter ones. A sample shown twice would count as
            agreement between sequences.
    """
    if seq_len > val.seq_len:
        raise UsageError(
            f"text probe: sequences of {seq_len} tokens, but validation samples have {val.seq_len} "
            "(model.max_seq_len); ask for shorter sequences"
        )
    if val.n_samples is not None and n_sequences > val.n_samples:
        raise UsageError(
            f"text probe: {n_sequences} sequences, but the validation text of data.path holds {val.n_samples}; "
            "raise data.val_fraction or ask for fewer"
        )
    return val.batch(0, n_sequences)[:, :seq_len]
