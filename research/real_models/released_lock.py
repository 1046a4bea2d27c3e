"""Dominance and QK lock as [SO] released them (definitions §18), beside the definitions' forms, for every block.

Both read one channel that is given by hand, so they are no quantities of a snapshot: there the channel is the largest
of each vector, and the first key is the one that the head computes.

Legend: N sequences, T positions, D width, H query heads, G key heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...measure.config import SnapshotConfig
from ...measure.hf import HFModel
from ...measure.measurement import measure
from ...trainer.by_name.loaded_model import load_named, text_for


def released_lock(file: Path, channel: int, text: Path, settings: SnapshotConfig) -> dict[str, Any]:
    """Measure both forms while a model of the LLaMA or Gemma family reads text.

    Args:
        file: GGUF file of the model.
        channel: the massive channel.
        text: folder of texts.
        settings: the probe's size.

    Returns:
        ``released``: ``dominance`` ``[L]`` of the channel, ``lock`` and ``positive`` ``[L][H]``, and the lock of the
        next channel as a control. ``defined``: the same by the definitions, dominance at the embedding and behind
        every block.
    """
    loaded = load_named(str(file))
    model = loaded.model
    assert isinstance(model, HFModel)
    tokens_NT = text_for(loaded, settings, [str(text)]).tokens_NT
    at_NT = torch.from_numpy(tokens_NT)
    found = read_lock(model.decoder, at_NT, channel)
    control = read_lock(model.decoder, at_NT, (channel + 1) % model.config.d_model)
    arrays = measure(model, tokens_NT, batch_size=settings.on_any_device).arrays
    defined = {"dominance": arrays["dominance"][:, 0], "lock": arrays["qk_cosine"], "positive": arrays["qk_positive"]}
    return {
        "released": found | {"lock_control": control["lock"]},
        "defined": {k: v.tolist() for k, v in defined.items()},
    }


@torch.no_grad()
def read_lock(decoder: nn.Module, tokens_NT: Tensor, channel: int) -> dict[str, Any]:
    """Compute the released forms of one channel, one sequence at a time.

    - ``dominance``: mean over sequences of the channel's size at position 0 behind the norm before attention, over the
      mean of the others' mean size.
    - ``lock``: ``|cos|`` between the first left singular vector of a head's query map and the channel's column of its
      key map.
    - ``positive``: share of queries t ≥ 1, before rotation and norms of heads, with a positive product with that
      column.

    Args:
        decoder: a model of ``transformers`` without its head, whose blocks have ``input_layernorm``,
            ``self_attn.q_proj`` and ``k_proj``.
        tokens_NT: token ids.
        channel: the channel.
    """
    base: Any = decoder
    blocks, n_heads = base.layers, base.config.num_attention_heads
    key_HK = [_keys_by_head(block.self_attn.k_proj.weight[:, channel], block.self_attn, n_heads) for block in blocks]
    sizes: list[list[Tensor]] = [[] for _ in blocks]
    products: list[list[Tensor]] = [[] for _ in blocks]

    def first(layer: int, x_BTD: Tensor) -> None:
        size_BD = x_BTD[:, 0].abs().double()
        others_B = (size_BD.sum(-1) - size_BD[:, channel]) / (size_BD.shape[-1] - 1)
        sizes[layer].append(torch.stack([size_BD[:, channel], others_B]))

    def queries(layer: int, q_BTC: Tensor) -> None:
        q_BTHK = q_BTC[:, 1:].unflatten(-1, (n_heads, -1))
        products[layer].append((q_BTHK * key_HK[layer]).sum(-1).flatten(0, 1) > 0)

    norms, maps = [b.input_layernorm for b in blocks], [b.self_attn.q_proj for b in blocks]
    with _outputs(norms, first), _outputs(maps, queries):
        for ids_T in tokens_NT:
            base(ids_T[None])
    dominance = []
    for by_sequence in sizes:
        of_channel, of_others = torch.cat(by_sequence, 1).mean(1).tolist()
        dominance.append(of_channel / of_others)
    lock = []
    for block, k_HK in zip(blocks, key_HK, strict=True):
        map_HKD = block.self_attn.q_proj.weight.double().unflatten(0, (n_heads, -1))
        direction_HK = torch.linalg.svd(map_HKD, full_matrices=False).U[..., 0]
        lock.append(torch.nn.functional.cosine_similarity(direction_HK, k_HK.double(), dim=-1).abs().tolist())
    positive = [torch.cat(by_sequence).double().mean(0).tolist() for by_sequence in products]
    return {"channel": channel, "dominance": dominance, "lock": lock, "positive": positive}


def _keys_by_head(column_C: Tensor, attention: Any, n_heads: int) -> Tensor:
    """Give each query head the part of a key map's column that its key head has, ``[H, K]``."""
    k_GK = column_C.float().unflatten(0, (-1, attention.head_dim))
    return k_GK.repeat_interleave(n_heads // len(k_GK), 0)


@contextmanager
def _outputs(modules: Sequence[nn.Module], read: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Show the output of each module with its index."""

    def hook(layer: int) -> Any:
        def show(module: nn.Module, inputs: Any, output: Tensor) -> None:
            read(layer, output)

        return show

    handles = [module.register_forward_hook(hook(i)) for i, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
