"""Text generation a token at a time, with a cache of earlier keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import UsageError
from .attention.kv_cache import KeyValueCache
from .decoder import Decoder


def choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Choose one token id per row, ``[B]``: the likeliest at temperature 0, else drawn from the ``top_k`` likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    model: Decoder,
    tokens_BT: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Go on from ``tokens_BT``: yields the next token ids ``[B]``, ``n_tokens`` times.

    Args:
        model: a model in evaluation mode.
        tokens_BT: int64 ``[B, T]``, T at least 1.
        n_tokens: number of tokens to write.
        temperature: that logits are divided by; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest only.
        seed: decides the draws, and nothing else.

    Raises:
        UsageError: more positions than a learned table holds.
    """
    n_positions, config = tokens_BT.shape[1] + n_tokens, model.config
    if config.positions == "learned" and n_positions - 1 > config.max_seq_len:
        raise UsageError(
            f"{tokens_BT.shape[1]} tokens of prompt and {n_tokens} more: this model's learned positions end at "
            f"{config.max_seq_len}; ask for at most {max(config.max_seq_len - tokens_BT.shape[1] + 1, 0)} tokens"
        )
    cache = KeyValueCache(config, n_positions)
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    for _ in range(n_tokens):
        tokens_B = choose(model(tokens_BT, last_only=True, cache=cache), temperature, top_k, generator)
        yield tokens_B
        tokens_BT = tokens_B[:, None]
