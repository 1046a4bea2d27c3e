"""Losses of texts in windows of a model's length, and bits per byte: what a model needs over a text's UTF-8 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..errors import UsageError
from ..files import user_path
from ..measure.measurement import evaluation_mode
from ..measure.ranks import rank, sum_over_ranks, world_size
from ..models.decoder import Decoder
from ..models.linear_cross_entropy import IGNORED

# ---------------------------------------------------------------- log-likelihoods of tokens after their contexts
# The only place at which evaluation calls the model.
#
# Legend: B windows of a batch, T their tokens, V vocabulary.

#: Logits that are held at once, where they are looked at: half a gigabyte in float32.
_MOST_LOGITS = 1 << 27


class Window(NamedTuple):
    """Tokens to read, and targets to predict: for the last ``len(targets)`` tokens read, the token after each."""

    inputs: Sequence[int]
    targets: Sequence[int]


class TokenScores(NamedTuple):
    """Scores of the targets of one window, ``[S]`` each, on the CPU."""

    log_probs: Tensor
    """Log-probability in nats, float64."""
    is_likeliest: Tensor
    """True if no token is likelier for the model, bool; all False if not requested."""


def score(model: Decoder, windows: Sequence[Window], batch_size: int, *, likeliest: bool = False) -> list[TokenScores]:
    """Score every window's targets, in their order.

    The pass runs in the precision of the weights, without autocast, and changes nothing. Collective: call on every rank
    with the same windows. Each passes every n-th batch and returns all; all make the same number of passes, since
    weights may be sharded.

    Args:
        model: the decoder, in any state.
        windows: no longer than the model reads.
        batch_size: windows in one pass, at most.
        likeliest: find the likeliest token too, for which logits are held.
    """
    if not windows:
        return []
    device, n_ranks = model.device, world_size()
    starts = [0]
    for window in windows:
        starts.append(starts[-1] + len(window.targets))
    found_N2 = torch.zeros(starts[-1], 2, dtype=torch.float64)
    batches = _batches(windows, batch_size, model.config.vocab_size if likeliest else 0)
    # Padding batches are passed and not counted.
    missing = -len(batches) % n_ranks
    dealt = [(batch, i < len(batches)) for i, batch in enumerate([*batches, *batches[:1] * missing])]
    with evaluation_mode(model):
        for batch, counts in dealt[rank() :: n_ranks]:
            scores = _pass(model, [windows[i] for i in batch], device, likeliest)
            if counts:
                for i, scores_S2 in zip(batch, scores, strict=True):
                    found_N2[starts[i] : starts[i + 1]] = scores_S2
    # Each score comes from one rank and is 0 on the others, so that the sum is that rank's score.
    found_N2 = sum_over_ranks(found_N2)
    return [
        TokenScores(part_S2[:, 0], part_S2[:, 1] > 0) for part_S2 in found_N2.split([len(w.targets) for w in windows])
    ]


def _batches(windows: Sequence[Window], batch_size: int, logits_of_token: int) -> list[list[int]]:
    """Group the windows into batches, by number, the longest first: windows of one batch have about one length."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].inputs))
    found: list[list[int]] = []
    while order:
        most = batch_size
        if logits_of_token:
            most = min(most, max(1, _MOST_LOGITS // (len(windows[order[0]].inputs) * logits_of_token)))
        found.append(order[:most])
        order = order[most:]
    return found


def _pass(model: Decoder, windows: Sequence[Window], device: torch.device, likeliest: bool) -> list[Tensor]:
    """Return scores ``[S, 2]`` of each window. Shorter windows are padded behind, where no earlier token sees it."""
    length = max(len(window.inputs) for window in windows)
    tokens_BT = torch.zeros(len(windows), length, dtype=torch.int64)
    targets_BT = torch.full((len(windows), length), IGNORED)
    for i, (inputs, targets) in enumerate(windows):
        tokens_BT[i, : len(inputs)] = torch.as_tensor(inputs)
        targets_BT[i, len(inputs) - len(targets) : len(inputs)] = torch.as_tensor(targets)
    # The module's call, not its forward: strategies gather weights in its hooks.
    if likeliest:
        logits_BTV = model(tokens_BT.to(device)).float()
        known_BT1 = targets_BT.to(device).clamp_min(0)[..., None]
        log_probs_BT = (logits_BTV.gather(-1, known_BT1) - logits_BTV.logsumexp(-1, keepdim=True))[..., 0]
        is_likeliest_BT = logits_BTV.argmax(-1) == known_BT1[..., 0]
    else:
        log_probs_BT = -model(tokens_BT.to(device), targets_BS=targets_BT.to(device)).per_token
        is_likeliest_BT = torch.zeros_like(log_probs_BT)
    found_BT2 = torch.stack([log_probs_BT.double(), is_likeliest_BT.double()], -1).cpu()
    return [found_BT2[i, len(inputs) - len(targets) : len(inputs)] for i, (inputs, targets) in enumerate(windows)]


# ---------------------------------------------------------------- bits per byte of a text
# The information that a model needs to predict it, over its UTF-8 bytes, for any tokenizer.


@dataclass(frozen=True)
class Text:
    """A text in windows of tokens, each of which is predicted once."""

    windows: list[Window]
    n_bytes: int

    def bits_per_byte(self, model: Decoder, batch_size: int) -> float:
        """Compute the summed −log₂ p of its tokens over its bytes."""
        scores = score(model, self.windows, batch_size)
        return -sum(float(one.log_probs.sum()) for one in scores) / math.log(2) / self.n_bytes


def text_windows(tokens: list[int], first: int, length: int, stride: int) -> list[Window]:
    """Cut windows of at most ``length`` tokens that predict each of ``tokens`` once, the first from the token
    ``first``.

    The first window predicts as many tokens as it reads; each later one advances by ``stride``, predicts that many, and
    reads ``length − stride`` tokens before them.
    """
    read = [first, *tokens]
    windows, done = [], 0
    while done < len(tokens):
        end = min(len(tokens), done + (stride if done else length))
        # Token i of the text is read at i + 1 and predicted from i.
        windows.append(Window(read[max(0, end - length) : end], tokens[done:end]))
        done = end
    return windows


def first_token(tokenizer: TextTokenizer) -> int:
    """Return the token before a text: the end of a previous text, or the token that the tokenizer puts before a text.

    Raises:
        UsageError: the tokenizer has neither.
    """
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    if tokenizer.before_text:
        return tokenizer.before_text[0]
    raise UsageError(
        f"data.tokenizer {tokenizer.name}: it has no end-of-text token and puts none before a text, after which eval "
        "would read; give one that has, or leave eval.tasks and eval.texts out"
    )


def read_text(file: str, most_bytes: int) -> str:
    """Read the beginning of a text, whole characters of at most ``most_bytes`` bytes.

    Raises:
        UsageError: the file is missing, unreadable, not UTF-8, or empty.
    """
    path = user_path(file)
    try:
        with Path(path).open("rb") as opened:
            content = opened.read(most_bytes + 4)
    except OSError as error:
        raise UsageError(f"eval.texts has {file!r}: {error.strerror}; give a text file") from None
    cut = min(len(content), most_bytes)
    if cut < len(content):
        while cut and content[cut] & 0xC0 == 0x80:  # the middle of a character
            cut -= 1
    try:
        text = content[:cut].decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"eval.texts has {file!r}: byte {error.start} is no UTF-8; give a text file") from None
    if not text:
        raise UsageError(f"eval.texts has {file!r}: there is no text in it; give more, or leave it out")
    return text


def prepare_text(text: str, tokenizer: TextTokenizer, length: int, stride: int | None) -> Text:
    """Cut a text into windows of ``length`` tokens; ``stride`` as in :func:`text_windows`, by default ``length``."""
    tokens = tokenizer.encode([text])[0].tolist()
    windows = text_windows(tokens, first_token(tokenizer), length, stride or length)
    return Text(windows, len(text.encode("utf-8")))
