"""A decoder on the meta device whose blocks get their values one at a time: models larger than memory.

The modules are those of :class:`Decoder`, and so is every line that computes. What differs is the order: all batches
pass one block before any of them passes the next, so that weights are read once. Between two blocks the hidden states
are kept. Of the embedding table only the rows of the tokens are read, and the head is read in parts.

Legend: N sequences of a probe, B of a batch, T positions, D width, V vocabulary, U tokens that occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import RunError
from ..attention.document_mask import Documents
from ..config import ModelConfig
from ..decoder import Block, Decoder
from ..observe import Observer
from .block_weights import BlockWeights, chosen_rows, table_chunks, table_moments

#: Who watches the pass of some sequences through one block; None: nobody does.
Watch = Callable[[slice], AbstractContextManager[Observer | None]]

#: Bytes of logits that are held at once; of more sequences the head is read again.
_LOGIT_BYTES = 1 << 29


@dataclass
class Streaming:
    """What passes through a decoder by block need beside it, and whom they tell how far they are."""

    scratch: str | Path | None = None
    """Folder for hidden states that do not stay in memory."""
    advance: Callable[[int], object] = lambda n_blocks: None
    """Is called with 1 when all batches have passed a block."""


class DecoderByBlock(Decoder):
    """A decoder of which one block at a time has values, beside its norm and its positions.

    It has no forward pass of one batch; ``measure`` and ``hidden_states`` know how a probe passes through it.

    Args:
        config: the model.
        weights: where its parameters and buffers come from.
        dtype: of the parameters.
        device: where blocks and batches are while they are computed.
        streaming: what passes need beside it.

    Raises:
        RunError: the weights lack one, or it has another shape.
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
        self.weights, self.dtype, self.device = weights, dtype, torch.device(device)
        self.streaming = streaming or Streaming()
        # No row of it is needed yet; it says where the model is.
        none = torch.empty(0, config.d_model, dtype=dtype, device=self.device)
        self.embed.weight = nn.Parameter(none, requires_grad=False)
        for name in ("positions", "norm"):
            self._fill(self.get_submodule(name), name)

    def _fill(self, module: nn.Module, name: str) -> None:
        """Give a module its values."""
        shapes = {f"{name}.{inside}": tensor.shape for inside, tensor in module.state_dict().items()}
        found = {}
        for full, tensor in self.weights.read(list(shapes)):
            if tensor.shape != shapes[full]:
                raise RunError(f"{full} has shape {list(tensor.shape)}, the model's {list(shapes[full])}")
            found[full.removeprefix(f"{name}.")] = tensor.to(self.device, self.dtype).contiguous()
        module.load_state_dict(found, assign=True)

    @contextmanager
    def block(self, i: int) -> Iterator[Block]:
        """Block ``i``, from 0, with its values inside the context, and on the meta device again after it."""
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
        """A module whose ``weight`` is some rows of its table."""
        before = module.weight
        module.weight = nn.Parameter(rows.to(self.device, self.dtype), requires_grad=False)
        try:
            yield
        finally:
            module.weight = before

    @contextmanager
    def embedding(self, tokens_NT: Tensor) -> Iterator[Tensor]:
        """The embedding with the rows of these tokens alone; gives the tokens as places among them, ``[N, T]``."""
        ids_U, place_NT = tokens_NT.unique(return_inverse=True)
        rows_UD = chosen_rows(self.weights, "embed.weight", ids_U, self.config.d_model)
        with self._table(self.embed, rows_UD):
            yield place_NT

    def table_moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the embedding table, of which one part at a time is read."""
        return table_moments(self.weights, "embed.weight", self.config.vocab_size, self.config.d_model)

    def logits(self, x_ND: Tensor) -> Iterator[Tensor]:
        """Of the blocks' output at one position ``[N, D]``: logits ``[some, V]``, some sequences at a time.

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
            tokens_NT: int64 token ids, on the CPU; any where there are ``vectors``.
            states_NTD: what the hidden states are kept in, anywhere; holds the last block's output in the end.
            batches: sequences that pass together, rising, all of them.
            watch: opened around each batch's pass of each block, and of the embedding.
            documents_NT: of a model with ``attention.documents``, the number of each token's document.
            passed: called when all batches are through the embedding (0) and through block 1 … L, which still has its
                values then.
            vectors: gives a batch's ``[B, T, D]`` in place of its token embeddings; by default there is none.
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
    """Vectors in place of what the embedding gives, if there are any."""
    if given_BTD is None:
        yield
        return
    handle = embed.register_forward_hook(lambda module, inputs, output: given_BTD)
    try:
        yield
    finally:
        handle.remove()
