"""Evidence that fingerprints read from a model: its weight matrices by role, and its states on given inputs.

Legend: D width, F hidden units, H heads, K width of a head, L blocks, N inputs, R positions of some inputs, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birthmark.errors import UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.hidden_states import FingerprintProbe, hidden_states
from birthmark.measure.stream_weights import stream_weights
from birthmark.metrics.matched_weights import StreamWeights
from birthmark.metrics.seedprint import HiddenStates
from birthmark.models.decoder import Decoder

#: Sequences of the probe whose hidden units are kept, all positions of each.
SEQUENCES_OF_UNITS = 20


@dataclass(frozen=True)
class Names:
    """Locations of the matrices of a model family: module names, with the block's number in those of blocks."""

    embed: str
    block: str
    q: str
    k: str
    v: str
    o: str
    up: str
    down: str
    gate: str | None = None
    packed: str | None = None
    """Module that holds q, k and v side by side."""
    transposed: bool = False
    """True if weights are ``[in, out]``."""


_OURS = Names(
    "embed", "blocks.{}", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down", "mlp.gate"
)  # fmt: skip
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = Names(
    "model.embed_tokens", "model.layers.{}", *_ATTENTION, "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj",
    "mlp.gate_proj",
)  # fmt: skip
_OPT = Names(
    "model.decoder.embed_tokens", "model.decoder.layers.{}", *_ATTENTION, "self_attn.out_proj", "fc1", "fc2"
)  # fmt: skip
_GPT2 = Names(
    "transformer.wte", "transformer.h.{}", "", "", "", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", packed="attn.c_attn",
    transposed=True,
)  # fmt: skip
#: Model types of ``transformers`` whose matrices are known.
FAMILIES: Mapping[str, Names] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "opt": _OPT,
    "gpt2": _GPT2,
}


@dataclass(frozen=True)
class Block:
    """Weight matrices of one block, all ``[out, in]``, float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate: np.ndarray | None


@dataclass(frozen=True)
class Evidence:
    """One model as all methods see it."""

    name: str
    n_heads: int
    embed_VD: np.ndarray
    blocks: tuple[Block, ...]
    parameters: Mapping[str, np.ndarray]
    """All parameters, by name."""
    final: HiddenStates
    """Input of the output head at the last position, ``[N, D]``."""
    states_LND: np.ndarray
    """The residual stream after each block at the last position."""
    up_LRF: np.ndarray
    """Outputs of the up-projections at all positions of some inputs."""
    gate_LRF: np.ndarray | None
    """Outputs of the gates; None where the MLP has none."""
    stream: StreamWeights
    """Weights that the null ``matched`` reads."""


def names_of(model: Decoder | HFModel) -> Names:
    """Return the locations of a model's matrices.

    Raises:
        UsageError: the model's family is not in the table.
    """
    if isinstance(model, Decoder):
        return _OURS
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UsageError(f"{kind}: its matrices are not known here; known are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def gather(name: str, model: Decoder | HFModel, probe: FingerprintProbe) -> Evidence:
    """Run a probe through a model once, and collect its weights. The model stays unchanged.

    Args:
        name: name of the model, for messages.
        model: a model on the CPU.
        probe: a token probe, the same for all models.
    """
    names, n_layers = names_of(model), model.config.n_layers
    module = model if isinstance(model, Decoder) else model.model
    blocks = [module.get_submodule(names.block.format(i)) for i in range(n_layers)]
    kept: dict[tuple[str, int], list[Tensor]] = {}
    hooks = [block.register_forward_hook(partial(_keep_last, kept, i)) for i, block in enumerate(blocks)]
    n_positions = min(SEQUENCES_OF_UNITS, probe.n_inputs) * probe.seq_len
    gated = _has_gate(names, blocks[0])
    for place in ("up", "gate") if gated else ("up",):
        for i, block in enumerate(blocks):
            projection = block.get_submodule(str(getattr(names, place)))
            hooks.append(projection.register_forward_hook(partial(_keep_units, kept, place, i, n_positions)))
    try:
        final_ND = hidden_states(model, probe, batch_size=100)
    finally:
        for hook in hooks:
            hook.remove()

    def of_all(place: str) -> np.ndarray:
        return np.stack([torch.cat(kept[place, i]).numpy() for i in range(n_layers)])

    parameters = {key: value.detach().float().numpy().copy() for key, value in module.named_parameters()}
    return Evidence(
        name=name,
        n_heads=model.config.n_heads,
        embed_VD=parameters[f"{names.embed}.weight"],
        blocks=tuple(_block(names, parameters, i, gated) for i in range(n_layers)),
        parameters=parameters,
        final=HiddenStates(final_ND),
        states_LND=of_all("state"),
        up_LRF=of_all("up"),
        gate_LRF=of_all("gate") if gated else None,
        stream=stream_weights(model),
    )


def _has_gate(names: Names, block: nn.Module) -> bool:
    if names.gate is None:
        return False
    parent, _, last = names.gate.rpartition(".")
    return getattr(block.get_submodule(parent), last, None) is not None


def _keep_last(kept: dict[tuple[str, int], list[Tensor]], i: int, block: nn.Module, inputs: Any, output: Any) -> None:
    x_BTD: Tensor = output[0] if isinstance(output, tuple) else output
    kept.setdefault(("state", i), []).append(x_BTD[:, -1].float().clone())


def _keep_units(
    kept: dict[tuple[str, int], list[Tensor]],
    place: str,
    i: int,
    n_positions: int,
    projection: nn.Module,
    inputs: Any,
    output: Tensor,
) -> None:
    found = kept.setdefault((place, i), [])
    left = n_positions - sum(len(x_RF) for x_RF in found)
    if left > 0:
        # OPT's maps see positions of all sequences in one row.
        found.append(output.flatten(0, -2)[:left].float().clone())


def _block(names: Names, parameters: Mapping[str, np.ndarray], i: int, gated: bool) -> Block:
    def weight(place: str) -> np.ndarray:
        found = parameters[f"{names.block.format(i)}.{place}.weight"]
        return found.T if names.transposed else found

    if names.packed is None:
        q, k, v = (weight(place) for place in (names.q, names.k, names.v))
    else:
        q, k, v = np.split(weight(names.packed), 3)
    gate = weight(str(names.gate)) if gated else None
    return Block(q, k, v, weight(names.o), weight(names.up), weight(names.down), gate)


def shared_names(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """List the parameters that have the same name and shape in two models, in the first one's order."""
    return [name for name in a if name in b and a[name].shape == b[name].shape]
