"""Text generation by a model of ``transformers``, a token at a time, with the decoder's way of drawing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import UsageError
from ...measure.foreign import ForeignModel
from ...models.decoder import choose


def end_tokens(model: ForeignModel) -> frozenset[int]:
    """Return the ids that end a text, from the model's configs; there may be several."""
    configs = (model.model.config, getattr(model.model, "generation_config", None))
    found: set[int] = set()
    for config in configs:
        ends = getattr(config, "eos_token_id", None)
        found |= set(ends) if isinstance(ends, list) else set() if ends is None else {ends}
    return frozenset(found)


@torch.no_grad()
def generate_by_transformers(
    model: ForeignModel,
    tokens_BT: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Go on from ``tokens_BT`` with the library's own cache: yields the next token ids ``[B]``, ``n_tokens`` times.

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
    longest = model.config.max_seq_len
    if longest is not None and tokens_BT.shape[1] + n_tokens - 1 > longest:
        raise UsageError(
            f"{tokens_BT.shape[1]} tokens of prompt and {n_tokens} more: this model reads at most {longest}; ask for "
            f"at most {max(longest - tokens_BT.shape[1] + 1, 0)} tokens"
        )
    generator = torch.Generator(model.device).manual_seed(seed)
    cache = None
    for _ in range(n_tokens):
        passed = model.model(input_ids=tokens_BT, past_key_values=cache, use_cache=True)
        cache = passed.past_key_values
        tokens_B = choose(passed.logits[:, -1], temperature, top_k, generator)
        yield tokens_B
        tokens_BT = tokens_B[:, None]
