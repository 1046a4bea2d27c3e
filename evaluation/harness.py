"""Tasks of lm-eval: answers and texts of a decoder, as the harness asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..measure.measurement import evaluation_mode
from ..measure.ranks import max_over_ranks, rank, sum_over_ranks, world_size
from ..models.attention.kv_cache import KeyValueCache
from ..models.decoder import Decoder
from .texts import Window, first_token, score

if TYPE_CHECKING:
    from lm_eval.api.model import LM


# ---------------------------------------------------------------- writing
# Generation of the likeliest text after prompts of any length, a token at a time, by all ranks together.
#
# Legend: B prompts of a batch, T tokens of a prompt.


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
        self.device = model.device
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


# ---------------------------------------------------------------- harness
# Decoder as a model of lm-eval, with the tokens and windows that its ``hf`` makes for the exported model.
#
# So scores in a run equal those of lm-eval on the model that ``birthmark export`` writes from the same weights,
# document by document.

#: Number of tokens that lm-eval's ``hf`` generates if a task does not say it.
_N_NEW = 256


@dataclass(frozen=True)
class Writing:
    """Rules of a task for generation: the likeliest tokens, up to a number or a stop text."""

    n_new: int
    until: tuple[str, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Writing:
        """Read a task's ``generation_kwargs`` like lm-eval.

        Raises:
            ValueError: an unsupported setting.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        read: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), _N_NEW))
        until = read.pop("until", None) or []
        n_new = int(read.pop("max_gen_toks"))
        if read.pop("do_sample", False) or read.pop("temperature", 0):
            raise ValueError("it draws what it writes, which is not the same twice")
        if read:
            raise ValueError(f"generation_kwargs has {', '.join(read)}")
        return cls(n_new, tuple([until] if isinstance(until, str) else until))

    def before_stop(self, text: str) -> str:
        """Return the text before the first stop text."""
        return min((text.partition(stop)[0] for stop in self.until if stop), key=len, default=text)


def language_model(model: Decoder, tokenizer: TextTokenizer, max_seq_len: int, batch_size: int) -> LM:
    """Wrap the decoder for lm-eval's ``evaluate``. In a process group all ranks share the work, and each has all
    results.

    Args:
        model: the decoder.
        tokenizer: tokenizer of its text. As in an exported folder, its JSON decides the tokens around a text.
        max_seq_len: tokens that the model reads at once; longer texts lose their beginning.
        batch_size: sequences in one pass.
    """
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    # As it is, unlike TextTokenizer's: names of special tokens in a text are those tokens for lm-eval.
    text_tokenizer = Tokenizer.from_str(tokenizer.content.decode("utf-8"))
    text_tokenizer.no_padding()
    text_tokenizer.no_truncation()
    first = first_token(tokenizer)
    first_text = text_tokenizer.decode([first], skip_special_tokens=False)

    class DecoderInPlace(TemplateLM):
        """Model that scores by :func:`score` and generates by :func:`write`."""

        @property
        def eot_token_id(self) -> int:
            return first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not string.startswith(first_text)
            ids: list[int] = text_tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
            return ids

        def _loglikelihood_tokens(
            self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            windows = []
            for _, context, continuation in requests:
                read = [*context, *continuation][-(max_seq_len + 1) :]
                windows.append(Window(read[:-1], continuation[-(len(read) - 1) :]))
            found = score(model, windows, batch_size, likeliest=True)
            return [(float(one.log_probs.sum()), bool(one.is_likeliest.all())) for one in found]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for i, request in enumerate(requests):
                tokens = self.tok_encode(request.args[0])
                for inputs, targets in utils.get_rolling_token_windows(tokens, first, max_seq_len, 1):
                    windows.append(Window(inputs, targets))
                    owners.append(i)
            totals = [0.0] * len(requests)
            for i, one in zip(owners, score(model, windows, batch_size), strict=True):
                totals[i] += float(one.log_probs.sum())
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            settings = [Writing.of(request.args[1]) for request in requests]
            prompts = []
            for request, setting in zip(requests, settings, strict=True):
                tokens = self.tok_encode(request.args[0]) or [first]
                prompts.append(Prompt(tokens[-(max_seq_len - setting.n_new) :], setting.n_new))

            def is_over(i: int, written: Sequence[int]) -> bool:
                text = text_tokenizer.decode(written)
                return written[-1] == first or settings[i].before_stop(text) != text

            found = write(model, prompts, batch_size, is_over)
            return [
                setting.before_stop(text_tokenizer.decode(tokens))
                for tokens, setting in zip(found, settings, strict=True)
            ]

    return DecoderInPlace()
