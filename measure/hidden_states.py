"""Last-position final hidden states of a model over a probe, and a cache of them (definitions §2, §10).

*Final* means after the decoder's last norm: the input of the output head, which ``transformers`` returns as
``output_hidden_states[-1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from ..data.batches import stream_key
from ..data.cache import build_once, fingerprint
from ..data.probes import random_probe
from ..errors import UsageError
from ..files import file_sha256, save_tensors, tensor_file, user_path
from ..models.birth import digest_of
from ..models.by_block import DecoderByBlock
from ..models.config import ModelConfig, dotted
from ..models.decoder import Decoder
from ..models.normals import standard_normals
from .hf import HFConfig, HFModel
from .measurement import evaluation_mode
from .passes import batches_of, kept_states
from .ranks import batches_of_rank, gather_rows

_FORMAT = 2
_FILE = "hidden.safetensors"


@dataclass(frozen=True)
class FingerprintProbe:
    """Inputs on which models are compared; the same values for all of them."""

    kind: Literal["token", "embedding"] = "token"
    """``token``: uniform over the vocabulary; ``embedding``: Gaussian vectors in place of embeddings [SP]."""
    n_inputs: int = 2000
    """Sequences."""
    seq_len: int = 64
    """Tokens in a sequence."""
    probe_seed: int = 0
    """Seed of the inputs, and of nothing else."""
    mean: float = 0.0
    """Mean of the Gaussian vectors' channels."""
    sd: float = 1.0
    """Standard deviation of the Gaussian vectors' channels."""

    def like(self, reference: Decoder | HFModel) -> FingerprintProbe:
        """Return an embedding probe with the mean and sd of the reference's embedding table; a token probe
        unchanged.
        """
        if self.kind == "token":
            return self
        if isinstance(reference, DecoderByBlock):
            mean, sd = reference.table_moments()
            return replace(self, mean=mean, sd=sd)
        table = _table(reference).weight.detach().double()
        return replace(self, mean=table.mean().item(), sd=table.std(correction=0).item())

    def vectors(self, first: int, last: int, width: int) -> np.ndarray:
        """Draw sequences ``first`` … ``last`` − 1 of the embedding probe: float32 ``[last − first, T, D]``.

        Each sequence has its own key, so that values do not depend on the split of the probe.
        """

        def draw(row: int) -> np.ndarray:
            key = int.from_bytes(stream_key("probe", "embedding", self.probe_seed, row)[:16], "little")
            generator = np.random.Generator(np.random.Philox(key=key))
            return standard_normals(generator, self.seq_len * width).reshape(self.seq_len, width)

        return np.float32(self.mean) + np.float32(self.sd) * np.stack([draw(row) for row in range(first, last)])


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _table(model: Decoder | HFModel) -> nn.Embedding:
    """Return the embeddings of tokens."""
    table: nn.Embedding = model.embeddings if isinstance(model, HFModel) else model.embed
    return table


def _last(model: Decoder | HFModel) -> nn.Module:
    """Return the module whose output is the final hidden states; for a model of ``transformers``, its decoder."""
    return model.decoder if isinstance(model, HFModel) else model.norm


def _tokens(config: ModelConfig | HFConfig, probe: FingerprintProbe) -> np.ndarray:
    """Return int64 ids ``[N, T]``; zeros if vectors replace their embeddings."""
    if probe.kind == "token":
        return random_probe(config.vocab_size, probe.n_inputs, probe.seq_len, probe.probe_seed)
    return np.zeros((probe.n_inputs, probe.seq_len), dtype=np.int64)


def _inputs(
    model: Decoder | HFModel, probe: FingerprintProbe, batch_size: int
) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """Yield this rank's inputs: token ids of a batch, vectors that replace their embeddings (or None), and a flag that
    says if the batch counts.
    """
    weight, config, device = _table(model).weight, model.config, model.device
    tokens_NT = _tokens(config, probe)
    for rows_B, counts in batches_of_rank(torch.arange(probe.n_inputs), batch_size):
        first, last = int(rows_B[0]), int(rows_B[-1]) + 1
        tokens_BT = torch.from_numpy(tokens_NT[first:last]).to(device)
        if probe.kind == "token":
            yield tokens_BT, None, counts
        else:
            vectors_BTD = torch.from_numpy(probe.vectors(first, last, weight.shape[1]))
            yield tokens_BT, vectors_BTD.to(device, weight.dtype), counts


def _by_block(model: DecoderByBlock, probe: FingerprintProbe, batch_size: int) -> np.ndarray:
    """Compute :func:`hidden_states` of a decoder with one block at a time in memory."""
    width = model.config.d_model

    def vectors(inputs: slice) -> Tensor:
        return torch.from_numpy(probe.vectors(inputs.start, inputs.stop, width))

    shape = (probe.n_inputs, probe.seq_len, width)
    with evaluation_mode(model), kept_states(shape, model.dtype, model.streaming.scratch) as states_NTD:
        model.pass_blocks(
            torch.from_numpy(_tokens(model.config, probe)),
            states_NTD,
            batches_of(probe.n_inputs, batch_size),
            vectors=None if probe.kind == "token" else vectors,
        )
        final_ND: Tensor = model.norm(states_NTD[:, -1].to(model.device))
    return final_ND.float().cpu().numpy()


def hidden_states(
    model: Decoder | HFModel,
    probe: FingerprintProbe,
    batch_size: int = 64,
    advance: Callable[[int], object] = lambda n_inputs: None,
) -> np.ndarray:
    """Compute final hidden states at the last position: float32 ``[N, D]``. The model is left unchanged.

    Collective: call on every rank. Each passes its part of the inputs and returns the states of all.

    Args:
        model: the decoder, or a wrapped one of ``transformers``; the pass runs in its parameters' own precision.
        probe: inputs of the model.
        batch_size: sequences in one pass.
        advance: called after each pass with its number of inputs.

    Raises:
        UsageError: the probe's sequences are longer than the model's.
    """
    longest = model.config.max_seq_len
    if longest is not None and probe.seq_len > longest:
        raise UsageError(f"seq_len {probe.seq_len}: the model reads at most {longest} (model.max_seq_len)")
    if isinstance(model, DecoderByBlock):
        whole = _by_block(model, probe, batch_size)
        advance(probe.n_inputs)
        return whole
    found: list[np.ndarray] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        # A decoder gives [B, D]; a decoder of transformers gives all positions, in an object or a tuple.
        x: Any = getattr(output, "last_hidden_state", None)
        x = output[0] if isinstance(output, tuple) else output if x is None else x
        found.append((x if x.ndim == 2 else x[:, -1]).float().cpu().numpy())

    # Only the norm's output is needed: an observer would make the attention keep more than that.
    with evaluation_mode(model), _hooked(_last(model).register_forward_hook(keep)):
        for tokens_BT, vectors_BTD, counts in _inputs(model, probe, batch_size):
            if vectors_BTD is None:
                model(tokens_BT, last_only=True)
            else:
                with _hooked(_table(model).register_forward_hook(lambda *_, given=vectors_BTD: given)):
                    model(tokens_BT, last_only=True)
            if not counts:
                found.pop()
            advance(len(tokens_BT))
    mine_ND = np.concatenate(found) if found else np.empty((0, _width(model)), dtype=np.float32)
    return gather_rows(torch.from_numpy(mine_ND), probe.n_inputs).numpy()


def _width(model: Decoder | HFModel) -> int:
    """Return the width of final hidden states, which in few models of transformers differs from the residual
    stream's.
    """
    return model.final_width if isinstance(model, HFModel) else model.config.d_model


def weights_digest(model: nn.Module) -> str:
    """Compute the SHA-256 over parameters and buffers in name order, in the form of a birth digest
    (models/birth.py).
    """
    return digest_of(sorted([*model.named_parameters(), *model.named_buffers()]))


def definition(model: Decoder | HFModel) -> dict[str, Any]:
    """Return all that decides the results of a pass beside weights and buffers, by dotted names."""
    return model.definition if isinstance(model, HFModel) else dotted(asdict(model.config))


def cached_hidden_states(
    model: Decoder | HFModel,
    probe: FingerprintProbe,
    cache_dir: Path,
    advance: Callable[[int], object] = lambda n_inputs: None,
) -> np.ndarray:
    """Compute :func:`hidden_states` once for a model and a probe, and read them from ``cache_dir`` afterwards.

    States of a decoder by block are not cached: to recognise the model, all of its weights would have to be read again.
    """
    if isinstance(model, DecoderByBlock):
        return hidden_states(model, probe, advance=advance)
    key = fingerprint(
        format=_FORMAT,
        weights=weights_digest(model),
        model=definition(model),
        dtype=str(_table(model).weight.dtype),
        probe=asdict(probe),
    )

    def build(folder: Path) -> dict[str, Any]:
        file = folder / _FILE
        save_tensors(save_file, {"hidden": hidden_states(model, probe, advance=advance)}, file)
        facts = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        return {"probe": asdict(probe), "files": {_FILE: facts}}

    folder = user_path(cache_dir) / f"hidden-{key[:16]}"
    build_once(folder, build)
    with tensor_file(folder / _FILE, "np") as tensors:
        return tensors.get_tensor("hidden")
