"""Birth whose parameters are drawn on request (models/birth.py) and not kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..attention.correlation import estimated_correlations, first_moment_tokens
from ..birth import draw
from ..config import ModelConfig
from ..decoder import Decoder
from ..init import birth_plan
from .decoder_by_block import DecoderByBlock


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
