"""The backward snapshot: norms of the loss gradient by place and position, beside the results of the forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import RunError
from ...metrics.declarations.outliers_and_gradients import GRADIENTS
from ...metrics.gradient_norms import HEAD_PLACES, GradientNorms, GradientResult, first_over_others
from ...models.decoder import Decoder
from ..foreign import ForeignModel
from ..measurement import Batches, Measurement, evaluation_mode
from ..observed import device_of, sizes_of
from .block_gradients import BlockGradients
from .graph_gradients import GraphGradients


def measure_gradients(
    model: Decoder | ForeignModel,
    probe_NT: np.ndarray,
    *,
    batch_size: int = 64,
    documents_NT: np.ndarray | None = None,
) -> Measurement:
    """Measure the norms of the gradient of the next-token loss by a model's activations (definitions §16, [GS]).

    Collective: call on every rank. Each passes its part of the probe and returns the result of the whole probe.

    Args:
        model: the decoder, sharded or not, or a wrapped one of ``transformers``; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``, T at least 3.
        batch_size: sequences in one pass; the result does not depend on it.
        documents_NT: the number of each token's document, int64 ``[N, T]``; by default a sequence is one document.

    Raises:
        RunError: a gradient is NaN or inf; names the first place in the backward pass.
    """
    sizes = sizes_of(model.config, probe_NT.shape[1])
    norms = GradientNorms(sizes.n_layers, sizes.n_heads, sizes.seq_len).to(device_of(model))
    apart = documents_NT is not None and isinstance(model, Decoder) and model.config.attention.documents
    with evaluation_mode(model):
        way = BlockGradients(model, norms) if isinstance(model, Decoder) else GraphGradients(model, norms)
        if apart:
            assert documents_NT is not None
            for both_B2T, counts in Batches(model, np.stack([probe_NT, documents_NT], 1), batch_size):
                tokens_BT, documents_BT = both_B2T.unbind(1)
                way.add(tokens_BT, documents_BT, counts)
        else:
            for tokens_BT, counts in Batches(model, probe_NT, batch_size):
                way.add(tokens_BT, None, counts)
        # Every rank has the sums of all, and raises with the others.
        found = norms.compute()
    _check_finite(found)
    return _named(found)


def with_gradients(found: Measurement, gradients: Measurement) -> Measurement:
    """Merge the forward and the backward measurement of a probe."""
    return replace(found, scalars=found.scalars | gradients.scalars, arrays=found.arrays | gradients.arrays)


def _named(found: GradientResult) -> Measurement:
    """Return the results under their declared names."""
    sinks = {place: first_over_others(found.heads[place]) for place in ("key", "value")}
    arrays = {
        "gradient_sink": first_over_others(found.mlp),
        **{f"gradient_sink_{place}": ratio for place, ratio in sinks.items()},
        "gradient_mlp": found.mlp,
        "gradient_attention": found.attention,
        **{f"gradient_{place}": found.heads[place] for place in HEAD_PLACES},
    }
    # Places that a model of transformers does not show have no arrays.
    arrays = {name: array for name, array in arrays.items() if not np.isnan(array).all()}
    scalars = {"gradient_loss": found.loss}
    for quantity in GRADIENTS:
        if quantity.scalar and quantity.name in arrays:
            seen = arrays[quantity.name][~np.isnan(arrays[quantity.name])]
            scalars[quantity.name] = quantity.reduced(seen)
    return Measurement(scalars, arrays)


def _check_finite(found: GradientResult) -> None:
    """Raise RunError that names the first place, from the last block on, where a gradient is NaN or inf."""
    for state in reversed(range(len(found.mlp))):
        places = {f"the residual stream after block {state}" if state else "the embeddings": found.mlp[state]}
        if state:
            places[f"the residual stream after the attention of block {state}"] = found.attention[state - 1]
            for place, norms in found.heads.items():
                plural = {"query": "queries", "key": "keys", "value": "values"}[place]
                places[f"the {plural} of block {state}"] = norms[state - 1]
        for name, norms in places.items():
            if np.isinf(norms).any():
                raise RunError(f"the loss gradient is NaN or inf, first by {name}")
