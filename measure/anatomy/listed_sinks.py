"""Secondary sinks of a measurement as a table: positions and tokens (definitions §13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: Entries of the table for each probe.
N_LISTED = 10
_COLUMNS = ("importance", "position", "token", "heads")


def secondary_sinks(
    probe: str,
    arrays: Mapping[str, np.ndarray],
    epsilon: float,
    token_texts: Callable[[Sequence[int]], list[str]] | None,
) -> list[dict[str, Any]]:
    """List the secondary sinks of all blocks, one entry for each position and token, largest importance first.

    Args:
        probe: name of the probe.
        arrays: arrays of the measurement on it.
        epsilon: importance above which a key is a sink.
        token_texts: function from token ids to texts; None without a tokenizer: a token then reads ``[id]``.

    Returns:
        Entries with ``probe``, ``position``, ``id``, ``text``, ``blocks`` and ``heads`` (number with a sink there),
        and the largest ``importance``.
    """
    if "secondary_sink_importance" not in arrays:  # of a model whose attention is not seen
        return []
    columns = [arrays[f"secondary_sink_{name}"].ravel().tolist() for name in _COLUMNS]
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    for importance, position, token, heads in zip(*columns, strict=True):
        if importance > epsilon:
            # The arrays are floating if some blocks have no attention.
            place = int(position), int(token)
            entry = merged.setdefault(place, {"blocks": 0, "heads": 0, "importance": 0.0})
            entry["blocks"] += 1
            entry["heads"] += int(heads)
            entry["importance"] = max(entry["importance"], importance)
    order = sorted(merged, key=lambda place: (-merged[place]["importance"], *place))[:N_LISTED]
    known = token_texts is not None and all(token >= 0 for _, token in order)
    tokens = [token for _, token in order]
    texts = token_texts(tokens) if known and token_texts is not None else [f"[{token}]" for token in tokens]
    return [
        {"probe": probe, "position": position, "id": token, "text": text, **merged[position, token]}
        for (position, token), text in zip(order, texts, strict=True)
    ]
