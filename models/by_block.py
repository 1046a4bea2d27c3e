"""Models larger than memory: a decoder on the meta device whose blocks get their values one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import RunError
from .attention.correlation import estimated_correlations, first_moment_tokens
from .attention.document_mask import Documents
from .birth import draw
from .config import ModelConfig
from .decoder import Block, Decoder
from .init import birth_plan
from .observe import Observer

# ---------------------------------------------------------------- sources of weights: files, or the keys of a birth

#: Elements of a table that are read together: 64 MiB of float32.
CHUNK = 1 << 24
#: Distance in elements below which rows of a table are read together with everything between them.
_NEAR = 1 << 16


class BlockWeights(Protocol):
    """Parameters and buffers of a decoder by name, read or drawn on request and not kept."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the CPU, in any order and in their own dtype.

        Raises:
            RunError: a file is missing or damaged, or lacks a tensor; the message names it.
        """

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start … stop`` of a table, ``[stop − start, D]``, on the CPU in its own dtype."""


class HeldWeights:
    """Weights of a decoder that is in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.held = model.state_dict()

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See :class:`BlockWeights`."""
        return ((name, self.held[name].cpu()) for name in names)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See :class:`BlockWeights`."""
        return self.held[name][start:stop].cpu()


def table_chunks(n_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield first row and one past the last of the parts in which a table ``[n_rows, width]`` is read."""
    at_once = max(CHUNK // width, 1)
    return ((start, min(start + at_once, n_rows)) for start in range(0, n_rows, at_once))


def chosen_rows(weights: BlockWeights, name: str, rows_U: Tensor, width: int) -> Tensor:
    """Read the given rows of a table, ``[U, D]``; rows far from all of them are skipped.

    Args:
        weights: source of the table.
        name: name of the table.
        rows_U: row numbers, int64, rising.
        width: D.
    """
    wanted = rows_U.tolist()
    found: list[Tensor] = []
    first = 0
    for i, row in enumerate(wanted):
        last = i + 1 == len(wanted)
        if last or (wanted[i + 1] - row) * width > _NEAR or (wanted[i + 1] - wanted[first]) * width > CHUNK:
            start = wanted[first]
            # A copy: rows between those that were chosen are let go of.
            found.append(weights.rows(name, start, row + 1)[rows_U[first : i + 1] - start])
            first = i + 1
    return torch.cat(found)


def table_moments(weights: BlockWeights, name: str, n_rows: int, width: int) -> tuple[float, float]:
    """Compute mean and standard deviation of all elements of a table, in float64, reading one part at a time."""
    n, mean, scatter = 0, 0.0, 0.0
    for start, stop in table_chunks(n_rows, width):
        part = weights.rows(name, start, stop).double()
        own, away = part.mean().item(), part.var(correction=0).item() * part.numel()
        total = n + part.numel()
        scatter += away + (own - mean) ** 2 * n * part.numel() / total
        mean += (own - mean) * part.numel() / total
        n = total
    return mean, math.sqrt(scatter / n)


# ---------------------------------------------------------------- the decoder by block

#: Context that observes the pass of some sequences through one block; yields None for no observer.
Watch = Callable[[slice], AbstractContextManager[Observer | None]]

#: Bytes of logits held at once; for more sequences the head is read again.
_LOGIT_BYTES = 1 << 29


@dataclass
class Streaming:
    """Scratch space and progress callback for passes through a decoder by block."""

    scratch: str | Path | None = None
    """Folder for hidden states that do not stay in memory."""
    advance: Callable[[int], object] = lambda n_blocks: None
    """Function called with 1 when all batches have passed a block."""


class DecoderByBlock(Decoder):
    """Decoder in which one block at a time has values, beside its norm and its positions.

    It has no forward pass of one batch; ``measure`` and ``hidden_states`` pass probes through it.

    Args:
        config: the model.
        weights: source of its parameters and buffers.
        dtype: type of the parameters.
        device: device of blocks and batches while they are computed.
        streaming: scratch space and progress callback.

    Raises:
        RunError: a tensor is missing, or has another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: BlockWeights,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        streaming: Streaming | None = None,
    ) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.to(dtype).requires_grad_(False).eval()
        self.weights, self.dtype = weights, dtype
        self.streaming = streaming or Streaming()
        # No row of it is needed yet; it decides the model's device.
        none = torch.empty(0, config.d_model, dtype=dtype, device=device)
        self.embed.weight = nn.Parameter(none, requires_grad=False)
        for name in ("positions", "norm"):
            self._fill(self.get_submodule(name), name)

    def _fill(self, module: nn.Module, name: str) -> None:
        """Give a module its values."""
        empty = {f"{name}.{inside}": tensor for inside, tensor in module.state_dict().items()}
        found = {}
        for full, tensor in self.weights.read(list(empty)):
            if tensor.shape != empty[full].shape:
                raise RunError(f"{full} has shape {list(tensor.shape)}, the model's {list(empty[full].shape)}")
            found[full.removeprefix(f"{name}.")] = tensor.to(self.device, empty[full].dtype).contiguous()
        module.load_state_dict(found, assign=True)

    @contextmanager
    def block(self, i: int) -> Iterator[Block]:
        """Load block ``i``, from 0, within the context, and return it to the meta device afterwards."""
        block = self.blocks[i]
        assert isinstance(block, Block)
        empty = block.state_dict(keep_vars=True)
        self._fill(block, f"blocks.{i}")
        try:
            yield block
        finally:
            block.load_state_dict(empty, assign=True)

    @contextmanager
    def _table(self, module: nn.Module, rows: Tensor) -> Iterator[None]:
        """Set a module's ``weight`` to the given rows of its table within the context."""
        before = module.weight
        module.weight = nn.Parameter(rows.to(self.device, self.dtype), requires_grad=False)
        try:
            yield
        finally:
            module.weight = before

    @contextmanager
    def embedding(self, tokens_NT: Tensor) -> Iterator[Tensor]:
        """Load the embedding rows of these tokens only; yield the tokens as indices into those rows, ``[N, T]``."""
        ids_U, place_NT = tokens_NT.unique(return_inverse=True)
        rows_UD = chosen_rows(self.weights, "embed.weight", ids_U, self.config.d_model)
        with self._table(self.embed, rows_UD):
            yield place_NT

    def table_moments(self) -> tuple[float, float]:
        """Compute mean and standard deviation of the embedding table, reading one part at a time."""
        return table_moments(self.weights, "embed.weight", self.config.vocab_size, self.config.d_model)

    def logits(self, x_ND: Tensor) -> Iterator[Tensor]:
        """Yield logits ``[some, V]`` from the blocks' output at one position ``[N, D]``, some sequences at a time.

        One part of the head is in memory at a time. It is read once for as many sequences as 512 MiB of logits hold.
        """
        vocab_size = self.config.vocab_size
        at_once = max(_LOGIT_BYTES // (vocab_size * x_ND.element_size()), 1)
        name, table = ("embed.weight", self.embed) if self.head is None else ("head.weight", self.head)
        for first in range(0, len(x_ND), at_once):
            x = x_ND[first : first + at_once].to(self.device)
            logits = x.new_empty(len(x), vocab_size)
            for start, stop in table_chunks(vocab_size, self.config.d_model):
                with self._table(table, self.weights.rows(name, start, stop)):
                    part = self.leave(x)
                    assert isinstance(part, Tensor)
                    logits[:, start:stop] = part
            yield logits

    def pass_blocks(
        self,
        tokens_NT: Tensor,
        states_NTD: Tensor,
        batches: Sequence[slice],
        *,
        watch: Watch = lambda sequences: nullcontext(None),
        documents_NT: Tensor | None = None,
        passed: Callable[[int], object] = lambda layer: None,
        vectors: Callable[[slice], Tensor] | None = None,
    ) -> None:
        """Pass a probe through embedding and blocks, one block after the other.

        Args:
            tokens_NT: int64 token ids, on the CPU; ignored with ``vectors``.
            states_NTD: buffer for the hidden states, on any device; holds the last block's output in the end.
            batches: sequences that pass together, rising, all of them.
            watch: context opened around each batch's pass of each block, and of the embedding.
            documents_NT: the number of each token's document, for a model with ``attention.documents``.
            passed: called when all batches are through the embedding (0) and through block 1 … L, which still has its
                values then.
            vectors: function that returns a batch's ``[B, T, D]`` to replace its token embeddings; by default none.
        """
        places = []
        with self.embedding(tokens_NT) as ids_NT:
            for part in batches:
                documents = None if documents_NT is None else Documents.of(documents_NT[part].to(self.device))
                given = None if vectors is None else vectors(part).to(self.device, self.dtype)
                with watch(part) as observer, _instead(self.embed, given):
                    x_BTD, place = self.enter(ids_NT[part].to(self.device), observer, documents=documents)
                states_NTD[part] = x_BTD.to(states_NTD.device)
                places.append(place)
            passed(0)
        for i in range(self.config.n_layers):
            with self.block(i) as block:
                for part, place in zip(batches, places, strict=True):
                    with watch(part) as observer:
                        x_BTD = block(states_NTD[part].to(self.device), place, observer)
                    states_NTD[part] = x_BTD.to(states_NTD.device)
                passed(i + 1)
            self.streaming.advance(1)


@contextmanager
def _instead(embed: nn.Module, given_BTD: Tensor | None) -> Iterator[None]:
    """Replace the output of the embedding by the given vectors, if any."""
    if given_BTD is None:
        yield
        return
    handle = embed.register_forward_hook(lambda module, inputs, output: given_BTD)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------- drawn weights
# Birth whose parameters are drawn on request (models/birth.py) and not kept.


class DrawnWeights:
    """The weights of a newborn decoder, each drawn from its own key: bit for bit those of ``born``.

    Args:
        config: the model.
        init_seed: the seed of the birth.
    """

    def __init__(self, config: ModelConfig, init_seed: int) -> None:
        self.init_seed = init_seed
        with torch.device("meta"):
            model = Decoder(config)
        self._plan = birth_plan(model, config.init)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        #: State of a birth beside its parameters, set by a pass of random tokens; a few numbers for each head.
        self._moments: dict[str, Tensor] = {}
        if estimated_correlations(model):
            self._settle(config)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See :class:`BlockWeights`."""
        for name in names:
            yield name, self._moments[name] if name in self._moments else self._drawn(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See :class:`BlockWeights`."""
        return self._drawn(name, start, stop)

    def _drawn(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        n_rows, *row = self._shapes[name]
        stop, width = n_rows if stop is None else stop, torch.Size(row).numel()
        values = draw(self.init_seed, name, n_rows * width, self._plan[name], start * width, stop * width)
        return torch.from_numpy(values).view(stop - start, *row)

    @torch.no_grad()
    def _settle(self, config: ModelConfig) -> None:
        """Compute the first moments of estimated correlations, as ``initialize_moments`` does for a whole model."""
        with torch.device("meta"):
            buffers = dict(Decoder(config).named_buffers())
        self._moments = {name: torch.zeros(buffer.shape) for name, buffer in buffers.items()}
        decoder = DecoderByBlock(config, self)
        for part in estimated_correlations(decoder):
            part.train()
        tokens_NT = first_moment_tokens(config.vocab_size, config.max_seq_len, self.init_seed)
        states_NTD = torch.empty(*tokens_NT.shape, config.d_model)

        def keep(layer: int) -> None:
            if layer:
                block = decoder.blocks[layer - 1]
                self._moments |= {f"blocks.{layer - 1}.{name}": buffer for name, buffer in block.named_buffers()}

        decoder.pass_blocks(tokens_NT, states_NTD, [slice(0, len(tokens_NT))], passed=keep)
