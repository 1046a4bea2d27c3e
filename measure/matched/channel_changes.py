"""Changes of a decoder's weights that leave its logits the same, and what they hide from which test of lineage.

Legend: D width of the residual stream; a map S ``[D, D]`` takes every state x of the stream to x·S.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...errors import UsageError
from ...models.decoder import Decoder

_TABLES = re.compile(r"(embed|head|positions\.table)\.weight$")
_READERS = re.compile(r"(attn\.[qkv]|attn\.gate\.map|mlp\.up|mlp\.gate)\.weight$")
_WRITERS = re.compile(r"(attn\.o|mlp\.down)\.(weight|bias)$")
_NORMS = re.compile(r"(^|\.)norm(_attn|_mlp)?(_out)?\.(gain|bias)$")
_IN_ATTENTION = re.compile(r"attn\.[qk]\.norm\.")


def _refuse(model: Decoder, change: str, why: str) -> UsageError:
    return UsageError(f"{change}: would change what this model computes ({why})")


def _map_stream(model: Decoder, s_DD: Tensor) -> None:
    """Take the stream to x·S; norms must be equivariant under it, their gains as they are."""
    for name, parameter in model.named_parameters():
        if _IN_ATTENTION.search(name):
            continue
        if _TABLES.search(name) or _READERS.search(name):
            parameter.copy_(parameter @ s_DD)
        elif _WRITERS.search(name):
            parameter.copy_(s_DD.T @ parameter)
        elif _NORMS.search(name):
            parameter.copy_(parameter @ (s_DD.abs() if name.endswith("gain") else s_DD))


def _permute(model: Decoder, rng: np.random.Generator) -> None:
    _map_stream(model, torch.eye(model.config.d_model)[rng.permutation(model.config.d_model)])


def _flip(model: Decoder, rng: np.random.Generator) -> None:
    if model.config.norm == "layernorm":
        raise _refuse(model, "signs", "LayerNorm subtracts the mean of the channels")
    _map_stream(model, torch.diag(torch.from_numpy(rng.choice([-1.0, 1.0], model.config.d_model)).float()))


def _negate(model: Decoder, rng: np.random.Generator) -> None:
    _map_stream(model, -torch.eye(model.config.d_model))


def _behind_norms(model: Decoder) -> dict[str, list[str]]:
    """Every norm of the stream, by name, with the maps that read behind it."""
    if model.config.norm == "none" or model.config.norm_placement != "pre" or model.config.tie_embeddings:
        raise UsageError("scale, rotation: need norms that stand before maps of their own, in blocks and at the head")
    found = {"norm": ["head"]}
    for i in range(model.config.n_layers):
        parts = {name for name, _ in model.named_parameters()}
        for norm, readers in (
            ("norm_attn", ("attn.q", "attn.k", "attn.v", "attn.gate.map")),
            ("norm_mlp", ("mlp.up", "mlp.gate")),
        ):
            at = f"blocks.{i}."
            found[at + norm] = [at + reader for reader in readers if f"{at}{reader}.weight" in parts]
    return found


def _scale_gains(model: Decoder, factors: Callable[[Tensor], Tensor]) -> None:
    """Multiply every gain by factors ``[D]``, given the gain, and divide what reads behind it."""
    parameters = dict(model.named_parameters())
    for norm, readers in _behind_norms(model).items():
        if f"{norm}.bias" in parameters:
            raise _refuse(model, "scale, rotation", "its norms have biases")
        factor_D = factors(parameters[f"{norm}.gain"])
        parameters[f"{norm}.gain"].mul_(factor_D)
        for reader in readers:
            parameters[f"{reader}.weight"].div_(factor_D)


def _scale(model: Decoder, rng: np.random.Generator) -> None:
    _scale_gains(model, lambda gain_D: torch.from_numpy(np.exp(rng.standard_normal(len(gain_D)))).float())


def _rotate(model: Decoder, rng: np.random.Generator) -> None:
    _scale_gains(model, lambda gain_D: 1 / gain_D)
    width = model.config.d_model
    gaussian_DD = rng.standard_normal((width, width))
    q_DD = np.linalg.qr(gaussian_DD)[0]
    if model.config.norm == "layernorm":
        # The mean of the channels must stay: in a basis that begins with the direction of ones, the others turn.
        gaussian_DD[:, 0] = 1
        basis_DD, turn_DD = np.linalg.qr(gaussian_DD)[0], np.eye(width)
        turn_DD[1:, 1:] = np.linalg.qr(q_DD[1:, 1:])[0]
        q_DD = basis_DD @ turn_DD @ basis_DD.T
    s_DD = torch.from_numpy(q_DD).float()
    gains = {name: p.clone() for name, p in model.named_parameters() if name.endswith("gain")}
    _map_stream(model, s_DD)
    for name, parameter in model.named_parameters():
        if name in gains:
            parameter.copy_(gains[name])


def _reorder(model: Decoder, rng: np.random.Generator) -> None:
    """Hidden units of every MLP, and channels of the values of every head, in another order."""
    config = model.config
    if config.attention.own_parts or config.attention.aggregation != "plain" or config.attention.gate != "none":
        raise _refuse(model, "units", "its value aggregation or gate tells the channels apart")
    parameters = dict(model.named_parameters())
    for i in range(config.n_layers):
        order_F = torch.from_numpy(rng.permutation(config.ff))
        for name in ("mlp.up.weight", "mlp.gate.weight", "mlp.up.bias", "mlp.gate.bias"):
            if (held := parameters.get(f"blocks.{i}.{name}")) is not None:
                held.copy_(held[order_F])
        down = parameters[f"blocks.{i}.mlp.down.weight"]
        down.copy_(down[:, order_F])
        order_K = torch.from_numpy(rng.permutation(config.d_head))
        for name in ("attn.v.weight", "attn.v.bias"):
            if (held := parameters.get(f"blocks.{i}.{name}")) is not None:
                held.copy_(held.unflatten(0, (config.kv_heads, -1))[:, order_K].flatten(0, 1))
        o = parameters[f"blocks.{i}.attn.o.weight"]
        o.copy_(o.unflatten(1, (config.n_heads, -1))[:, :, order_K].flatten(1, 2))


#: Changes by name.
CHANGES: dict[str, Callable[[Decoder, np.random.Generator], None]] = {
    "permutation": _permute,
    "signs": _flip,
    "negation": _negate,
    "scale": _scale,
    "rotation": _rotate,
    "units": _reorder,
}


@torch.no_grad()
def changed(model: Decoder, change: str, seed: int = 0) -> Decoder:
    """A copy with other weights and the same logits, up to rounding.

    Args:
        model: is left as it was.
        change: ``permutation``, ``signs`` and ``rotation`` of the channels of the residual stream; ``negation`` of all
            of them; ``scale``, factors exchanged between the gains of norms and what reads behind them; ``units``,
            another order of hidden units and of the channels of values.
        seed: decides it.

    Raises:
        UsageError: the architecture does not allow the change.
    """
    copied = copy.deepcopy(model)
    CHANGES[change](copied, np.random.default_rng(seed))
    return copied
