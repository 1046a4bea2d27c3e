"""Cost of rounding to a model, by kind of linear map, by block and by position, beside the outliers of what is rounded.

Inputs of linear maps are rounded per token to 4 bits, as ``birthmark quantise`` does it for all maps at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from ...measure.config import SnapshotConfig
from ...measure.hf import HFModel
from ...measure.next_tokens import losses_of, mean_and_error
from ...measure.quantised.linear_maps import linear_maps
from ...measure.quantised.rounding import rounded
from ...trainer.by_name.loaded_model import load_named, text_for

BITS = 4
#: Positions that are left out of the rounding, one at a time, as controls of position 0.
N_CONTROLS = 5


@torch.no_grad()
def rounding_by_place(file: Path, text: Path, settings: SnapshotConfig) -> dict[str, Any]:
    """Round the inputs of the linear maps of one kind, of one block, and of all but one position, while the model reads
    text.

    Returns:
        Loss, its rises with standard errors, and the crest of what is rounded: the largest size of a token's entries
        over their root mean square, a mean over tokens behind position 0, maps and sequences.
    """
    loaded = load_named(str(file))
    model = loaded.model
    assert isinstance(model, HFModel)
    tokens_NT = torch.from_numpy(text_for(loaded, settings, [str(text)]).tokens_NT)
    names = {module: name for name, module in model.model.named_modules()}
    maps = [linear.module for linear in linear_maps(model)]

    def losses() -> np.ndarray:
        parts = [losses_of(model(ids_BT), ids_BT, 0).mean(1) for ids_BT in tokens_NT.split(settings.batch_size)]
        return torch.cat(parts).numpy()

    crests: dict[nn.Module, list[Tensor]] = {module: [] for module in maps}

    def crest(module: nn.Module, x_BTC: Tensor) -> None:
        rest = x_BTC[:, 1:]
        crests[module].append((rest.abs().amax(-1) / rest.square().mean(-1).sqrt()).mean(1))

    with _hooked(maps, crest):
        alone = losses()

    def cost(some: Sequence[nn.Module], kept: int | None = None) -> tuple[float, float]:
        """Compute the rise of the loss with a position left as it is."""

        def round_input(module: nn.Module, x_BTC: Tensor) -> Tensor:
            new_BTC = rounded(x_BTC, BITS, -1)
            if kept is not None:
                new_BTC[:, kept] = x_BTC[:, kept]
            return new_BTC

        with _hooked(some, round_input):
            return mean_and_error(losses() - alone)

    drawn = np.random.default_rng(0).choice(np.arange(1, settings.seq_len // 2), N_CONTROLS, replace=False)
    by_kind: dict[str, list[nn.Module]] = {}
    by_block: dict[int, list[nn.Module]] = {}
    for module in maps:
        by_kind.setdefault(names[module].rpartition(".")[2], []).append(module)
        by_block.setdefault(int(re.findall(r"\.(\d+)\.", names[module])[0]) + 1, []).append(module)

    def row(some: Sequence[nn.Module]) -> dict[str, Any]:
        return {"crest": float(np.mean([torch.cat(crests[m]).mean() for m in some])), "rise": cost(some)}

    rows = {str(block): row(some) for block, some in by_block.items()}
    crest_L, rise_L = (np.array(x) for x in zip(*((r["crest"], r["rise"][0]) for r in rows.values()), strict=True))
    test = stats.spearmanr(crest_L, rise_L)
    return {
        "loss": mean_and_error(alone),
        "all_maps": cost(maps),
        "all_maps_but_position_0": cost(maps, 0),
        "all_maps_but_a_drawn_position": {int(position): cost(maps, int(position)) for position in drawn},
        "crest_and_rise_by_block": {"spearman": float(test.statistic), "p": float(test.pvalue)},
        "by_kind": {kind: row(some) for kind, some in by_kind.items()},
        "by_block": rows,
    }


@contextmanager
def _hooked(maps: Sequence[nn.Module], change: Callable[[nn.Module, Tensor], Tensor | None]) -> Iterator[None]:
    """Let a function see, and replace, the inputs of linear maps ``[B, T, C]``."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        new = change(module, args[0])
        return None if new is None else (new, *args[1:])

    handles = [module.register_forward_pre_hook(before) for module in maps]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
