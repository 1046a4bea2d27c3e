"""`birthmark sample`: text that a run's model writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.records import RunDir
from ...schema import SEEDS, outside
from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser
from ..options import add_run

SUMMARY = "Let a run's model continue a text."


def add_options(parser: Parser) -> None:
    """The checkpoint, the text, and how tokens are drawn."""
    add_run(parser)
    parser.add_argument("--prompt", type=str, default="", help="Text to continue; none begins a new one.")
    parser.add_argument("--max_tokens", type=int, default=100, metavar="N", help="Tokens to write at most.")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token.")
    parser.add_argument("--top_k", type=int | None, metavar="K", help="Draw from the K likeliest tokens only.")
    parser.add_argument("--seed", type=int, default=0, help="Decides the draws.")


def run(options: Namespace) -> int:
    """Print the text as it comes."""
    bounds = {"max_tokens": (1, 1 << 24), "temperature": (0, math.inf), "top_k": (1, math.inf), "seed": SEEDS}
    if problems := outside("", options, bounds):
        raise UsageError(f"--{problems[0]}")
    parts = _continuation(options)
    first = next(parts, "")  # a command that fails prints nothing
    print(options.prompt + first, end="", flush=True)
    for part in parts:
        print(part, end="", flush=True)
    print(flush=True)
    return 0


def _continuation(options: Namespace) -> Iterator[str]:
    """What the model writes after the prompt, as it comes; ends early at the end of text.

    Raises:
        UsageError: the run has no tokenizer; an empty prompt, where no token begins a text.
    """
    import torch

    from ...data.tokenizer import TextTokenizer
    from ...models.generate import generate
    from ...trainer.adaptation.adapted_model import load_trained
    from ...trainer.checkpoints.find import find_checkpoint
    from ...trainer.devices import device

    source = RunDir.open(Path(options.run))
    config = read_config(source.config)
    file = source.own_tokenizer()
    if file is None:
        raise UsageError(f"{source.path}: has no tokenizer.json (its data is no text), so that no prompt can be read")
    tokenizer = TextTokenizer.load(file)
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt is not UTF-8: give text in the terminal's own encoding") from None
    # A text begins where another ended.
    ids = tokenizer.encode([options.prompt])[0].tolist() or [t for t in [tokenizer.end_of_text] if t is not None]
    if not ids:
        raise UsageError("--prompt is empty, and this tokenizer has no token that begins a text: give some text")
    if max(ids) >= config.model.vocab_size:
        raise UsageError(f"--prompt has token {max(ids)}: the model has {config.model.vocab_size}")
    model = load_trained(config, find_checkpoint(source, options.step), device())
    tokens = generate(
        model,
        torch.tensor([ids], device=device()),
        options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    written: list[int] = []
    printed = ""
    for token in tokens:
        if int(token) == tokenizer.end_of_text:
            break
        written.append(int(token))
        text = tokenizer.decode(written)
        if not text.endswith("\ufffd"):  # bytes of a character that is not whole yet
            yield text[len(printed) :]
            printed = text
    yield tokenizer.decode(written)[len(printed) :]
