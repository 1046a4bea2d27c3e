"""Generation of the likeliest text after prompts of any length, a token at a time, by all ranks together.

Legend: B prompts of a batch, T tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..measure.measurement import evaluation_mode
from ..measure.observed import device_of
from ..measure.ranks import max_over_ranks, rank, sum_over_ranks, world_size
from ..models.attention.kv_cache import KeyValueCache
from ..models.decoder import Decoder


class Prompt(NamedTuple):
    """Tokens to continue, at least one, and the largest number of new ones; together no more than the model reads."""

    tokens: Sequence[int]
    n_new: int


#: Function from a prompt's number and its new tokens to True if they suffice.
IsOver = Callable[[int, Sequence[int]], bool]


def write(model: Decoder, prompts: Sequence[Prompt], batch_size: int, is_over: IsOver) -> list[list[int]]:
    """Generate the likeliest next token repeatedly until every prompt is finished; return the new tokens of each
    prompt.

    The passes run in the precision of the weights, without autocast, and change nothing. Collective: call on every rank
    with the same prompts. Each writes every n-th batch and returns all; all make the same number of passes, since
    weights may be sharded.

    Args:
        model: the decoder, in any state.
        prompts: prompts to continue.
        batch_size: prompts in one pass, at most.
        is_over: asked after each token; a prompt ends at its ``n_new`` in any case.
    """
    if not prompts:
        return []
    # The longest first: those of one batch are of about one length.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    longest = max(prompt.n_new for prompt in prompts)
    # Tokens plus 1 where this rank wrote them, else 0: their sum over ranks gives the written tokens.
    found_NS = torch.zeros(len(prompts), longest, dtype=torch.float64)
    with evaluation_mode(model):
        for first in range(0, len(batches), world_size()):
            mine = batches[first + rank()] if first + rank() < len(batches) else []
            batch = _Batch(model, mine, prompts, is_over)
            while max_over_ranks(int(not batch.is_over)):
                batch.step()
            for i, written in zip(mine, batch.written, strict=True):
                found_NS[i, : len(written)] = torch.tensor(written, dtype=torch.float64) + 1
    return [[int(token) - 1 for token in row_S if token] for row_S in sum_over_ranks(found_NS)]


class _Batch:
    """Prompts of several lengths, processed in step without padding: the first pass reads the length of the shortest.
    Every further pass adds one token to each: the next one of a longer prompt, else the likeliest one.
    """

    def __init__(self, model: Decoder, numbers: Sequence[int], prompts: Sequence[Prompt], is_over: IsOver) -> None:
        self.model, self.numbers, self.asked = model, numbers, is_over
        self.prompts = [prompts[i] for i in numbers]
        self.written: list[list[int]] = [[] for _ in numbers]
        self.open = {row for row, prompt in enumerate(self.prompts) if prompt.n_new}
        self.device = device_of(model)
        if not self.open:
            return
        self.length = min(len(prompt.tokens) for prompt in self.prompts)
        self.next_BT = self._on_device([prompt.tokens[: self.length] for prompt in self.prompts])
        longest = max(len(prompt.tokens) + prompt.n_new for prompt in self.prompts)
        self.cache = KeyValueCache(model.config, longest)

    def _on_device(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64).to(self.device)

    @property
    def is_over(self) -> bool:
        """True if nothing is left to write."""
        return not self.open

    def step(self) -> None:
        """Make one pass. A finished batch passes one token for the sake of the other ranks, and drops it."""
        if self.is_over:
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=self.device), last_only=True)
            return
        # The module's call, not its forward: strategies gather weights in its hooks.
        likeliest = self.model(self.next_BT, last_only=True, cache=self.cache).argmax(-1).tolist()
        for row, prompt in enumerate(self.prompts):
            if self.length < len(prompt.tokens):
                likeliest[row] = prompt.tokens[self.length]
            elif row in self.open:
                self.written[row].append(likeliest[row])
                if len(self.written[row]) == prompt.n_new or self.asked(self.numbers[row], self.written[row]):
                    self.open.remove(row)
        self.length += 1
        self.next_BT = self._on_device([[token] for token in likeliest])
