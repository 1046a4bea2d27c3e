"""`birthmark sample`: text that a model writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from jsonargparse import Namespace

from ...errors import UsageError
from ...messages import for_terminal
from ...schema import SEEDS, outside
from ...trainer.config_parser import Parser
from ..options import add_model, add_trust, tell

SUMMARY = "Let a model continue a text."


def add_options(parser: Parser) -> None:
    """Add the options for the model, the prompt and the sampling."""
    add_model(parser)
    parser.add_argument("--step", type=int | None, metavar="N", help="Take a run's checkpoint after N steps.")
    parser.add_argument("--prompt", type=str, default="", help="Text to continue; none begins a new one.")
    parser.add_argument("--max_tokens", type=int, default=100, metavar="N", help="Tokens to write at most.")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token.")
    parser.add_argument("--top_k", type=int | None, metavar="K", help="Draw from the K likeliest tokens only.")
    parser.add_argument("--seed", type=int, default=0, help="Decides the draws.")
    add_trust(parser)


def run(options: Namespace) -> int:
    """Print the text piece by piece."""
    bounds = {"max_tokens": (1, 1 << 24), "temperature": (0, math.inf), "top_k": (1, math.inf), "seed": SEEDS}
    if problems := outside("", options, bounds):
        raise UsageError(f"--{problems[0]}")
    parts = _continuation(options)
    first = next(parts, "")  # a command that fails prints nothing
    print(options.prompt, end="")
    held = ""
    for part in chain([first], parts):
        text = held + part
        held = "\r" * text.endswith("\r")  # the end of its line may follow
        print(for_terminal(text.removesuffix(held), "\n\t"), end="", flush=True)
    print(for_terminal(held), flush=True)
    return 0


def _continuation(options: Namespace) -> Iterator[str]:
    """Yield the model's continuation of the prompt piece by piece; end early at the end of text.

    Raises:
        UsageError: the model has no tokenizer, or the prompt is empty and no token begins a text.
    """
    import torch

    from ...data.tokenizer import TextTokenizer
    from ...measure.hf import HFModel
    from ...models.decoder import generate
    from ...trainer.by_name.loaded_model import load_named
    from ...trainer.by_name.name_grammar import at_step
    from ...trainer.by_name.texts_of_runs import end_tokens
    from ...trainer.devices import device

    loaded = load_named(at_step(options.model, options.step), trust_remote_code=options.trust_remote_code, tell=tell)
    if loaded.tokenizer_file is None:
        raise UsageError(
            f"{loaded.name}: has no tokenizer to read a prompt with; give a run that was trained on text, or a model "
            "with its tokenizer.json"
        )
    tokenizer, model = TextTokenizer.load(loaded.tokenizer_file), loaded.model.to(device()).eval()
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt is not UTF-8: give text in the terminal's own encoding") from None
    prompt = ids = tokenizer.encode([options.prompt])[0].tolist()
    if isinstance(model, HFModel):
        ids, ends = [*tokenizer.before_text, *ids], end_tokens(model)
    else:
        ends = frozenset() if tokenizer.end_of_text is None else frozenset([tokenizer.end_of_text])
    # A text begins where another ended.
    ids = ids or sorted(ends)[:1]
    if not ids:
        raise UsageError("--prompt is empty, and this tokenizer has no token that begins a text: give some text")
    if max(ids) >= model.config.vocab_size:
        raise UsageError(
            f"--prompt has token {max(ids)}: the model has {model.config.vocab_size}; give tokens below it"
        )
    drawing = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
    tokens_1T = torch.tensor([ids], device=device())
    # With the prompt's own: decoders that strip the space before a text would strip that before its continuation.
    written = list(prompt)
    printed = tokenizer.decode(written)
    for token in generate(model, tokens_1T, options.max_tokens, **drawing):
        if int(token) in ends:
            break
        written.append(int(token))
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # bytes of a character that is not whole yet
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(written)[len(printed) :]
