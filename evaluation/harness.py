"""Decoder as a model of lm-eval, with the tokens and windows that its ``hf`` makes for the exported model.

So scores in a run equal those of lm-eval on the model that ``birthmark export`` writes from the same weights, document
by document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ..data.tokenizer import TextTokenizer
from ..models.decoder import Decoder
from .bits_per_byte import first_token
from .windows import Window, score
from .writing import Prompt, write

if TYPE_CHECKING:
    from lm_eval.api.model import LM

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
