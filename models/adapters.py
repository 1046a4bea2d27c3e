"""Adapters: LoRA, prefix tuning and Prefix-Tuning+ on a decoder that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..errors import UsageError
from .adapter_config import AdapterConfig
from .attention.attention import Attention
from .attention.correlation import estimated_correlations
from .attention.scores import ExtraKey, Scores, learned_keys
from .birth import digest_of, draw_tensor
from .config import InitConfig, ModelConfig
from .decoder import Decoder
from .init import Constant, Distribution, Linear, Normal, ParameterRole, birth_plan
from .tensor_shards import shard_of


class LoraDown(Linear):
    """Map to the inner width. Drawn with 1/√fan-in, whatever the model's initialiser."""

    @override
    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        return {"weight": Normal(self.in_features**-0.5)}


class LoraUp(Linear):
    """Map from the inner width. Starts at 0, so that the product does."""

    @override
    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        return {"weight": Constant(0.0)}


class Lora(nn.Module):
    """``alpha/rank · B A x`` (arXiv 2106.09685, section 4.1); 0 at the start."""

    def __init__(self, adapter: AdapterConfig, linear: Linear) -> None:
        super().__init__()
        self.scale = adapter.lora_alpha / adapter.lora_rank
        self.down = LoraDown(linear.in_features, adapter.lora_rank, bias=False)
        self.up = LoraUp(adapter.lora_rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, in] → […, out]``."""
        product: Tensor = self.up(self.down(x)) * self.scale
        return product

    def product(self) -> Tensor:
        """Return the matrix that it adds to the map's weight, ``[out, in]``."""
        return self.up.weight @ self.down.weight * self.scale


def attach_lora(model: Decoder, adapter: AdapterConfig) -> None:
    """Put a LoRA beside each map that ``adapter.maps`` names, in every block."""
    for block in model.blocks:
        for name in adapter.lora_maps:
            linear = cast(Linear, block.get_submodule(name))
            linear.adapter = Lora(adapter, linear)


# ---------------------------------------------------------------- prefix tuning
# Keys and values of every block that belong to no token and that every query sees (arXiv 2101.00190).
#
# Legend: B sequences, H query heads, G key/value heads, T positions, P keys of the prefix, K head width.


class PrefixKeys(nn.Module):
    """Learned keys, which do not turn with the position, and their values, in an attention of any arm.

    Keys are drawn with unit length on average, and values start at 0: at the start the prefix writes nothing, but takes
    some weight from the tokens. No start of a key changes nothing: a softmax has to give it something.
    """

    def __init__(self, adapter: AdapterConfig, config: ModelConfig) -> None:
        super().__init__()
        shape = config.kv_heads, adapter.prefix_length, config.d_head
        # The width comes from the config: a sharded parameter has the shape of its shard.
        self.std = config.d_head**-0.5
        self.key, self.value = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
        self.parameter_roles = {"key": ParameterRole.BIAS, "value": ParameterRole.BIAS}
        self.as_one = config.attention.rows.is_softmax

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"key": Normal(self.std), "value": Constant(0.0)}

    def forward(self, scores: Scores) -> tuple[Scores, list[ExtraKey]]:
        """Return the tokens' scores, and the prefix as keys beside those of the tokens."""
        q_BHTK, keys = learned_keys(
            scores.q_BHTK, None, scores.scale, self.key, self.value, self.as_one, of_prefix=True
        )
        return replace(scores, q_BHTK=q_BHTK), keys


def attach_prefix(model: Decoder, adapter: AdapterConfig) -> None:
    """Give every block's attention a :class:`PrefixKeys`."""
    for block in model.blocks:
        cast(Attention, block.attn).adapter_keys = PrefixKeys(adapter, model.config)


# ---------------------------------------------------------------- Prefix-Tuning+
# Prefix-Tuning+: the effect of a prefix on a query, outside of the softmax (arXiv 2506.13674, definitions §12).
#
# Legend: B sequences, H query heads, T positions, K head width.

#: φ by name.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu": F.elu, "relu": F.relu, "identity": lambda x: x}


class PrefixMemory(nn.Module):
    """``φ(q_t)ᵀ M`` with a matrix ``M [K, K]`` for each query head, 0 at the start.

    Queries are those that enter the scores. The heads' matrices lie one under the other, as the rows of a query map do.
    """

    def __init__(self, adapter: AdapterConfig, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.phi = config.n_heads, FEATURE_MAPS[adapter.phi]
        self.matrix = nn.Parameter(torch.zeros(config.n_heads * config.d_head, config.d_head))
        self.parameter_roles = {"matrix": ParameterRole.MATRIX}

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"matrix": Constant(0.0)}

    def forward(self, q_BHTK: Tensor) -> Tensor:
        """Map queries ``[B, H, T, K]`` to the addition to the heads' outputs, same shape."""
        matrix_HKK = self.matrix.unflatten(0, (self.n_heads, -1)).to(q_BHTK.dtype)
        return self.phi(q_BHTK) @ matrix_HKK


def attach_prefix_plus(model: Decoder, adapter: AdapterConfig) -> None:
    """Give every block's attention a :class:`PrefixMemory`."""
    for block in model.blocks:
        cast(Attention, block.attn).adapter_output = PrefixMemory(adapter, model.config)


# ---------------------------------------------------------------- adapters by name
# Attachment to a decoder, which is frozen, and the names of their tensors.

#: Functions that attach an adapter, by ``adapter.kind``.
ADAPTERS: dict[str, Callable[[Decoder, AdapterConfig], None]] = {
    "lora": attach_lora,
    "prefix": attach_prefix,
    "prefix_plus": attach_prefix_plus,
}


#: Attribute of a decoder that has one: the decoder's own sources, which leave with exported models, know of none.
_ATTACHED = "attached_adapter"


def is_adapter(name: str) -> bool:
    """Return True if a decoder's tensor belongs to an adapter, by its full name."""
    return any(part.startswith("adapter") for part in name.split("."))


def attach(model: Decoder, adapter: AdapterConfig) -> None:
    """Attach an adapter, whose parameters have no values yet, and freeze all else: weights, and moments that training
    would move.

    Args:
        model: the model, on any device; before it is sharded.
        adapter: adapter to attach; ``none`` leaves the model as it is.
    """
    if not adapter.is_on:
        return
    model.requires_grad_(False)
    for part in estimated_correlations(model):
        part.frozen = True
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    with torch.device(device):
        ADAPTERS[adapter.kind](model, adapter)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    setattr(model, _ATTACHED, adapter)


def adapter_of(model: nn.Module) -> AdapterConfig:
    """Return the config of the adapter on a model of any kind; ``none`` without one."""
    found = getattr(model, _ATTACHED, AdapterConfig())
    assert isinstance(found, AdapterConfig)
    return found


@torch.no_grad()
def initialize_adapter(model: Decoder, init: InitConfig, init_seed: int) -> None:
    """Overwrite every parameter of the adapter with its initial value under ``init_seed``. Each rank of a sharded
    adapter draws its shard. Values are keyed as at a birth: by the parameter's name.
    """
    if not adapter_of(model).is_on:
        return
    plan = birth_plan(model, init)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            shard = shard_of(parameter)
            shard.fill(partial(draw_tensor, init_seed, name, shard.numel, plan[name]), at_once=plan[name].whole)


def base_digest(model: nn.Module) -> str:
    """Return the SHA-256 over the parameters and buffers of the model beneath an adapter, in the form of a birth
    digest.

    Collective: call on every rank if the model is sharded. Gathers one parameter at a time.
    """
    named = sorted([*model.named_parameters(), *model.named_buffers()])
    return digest_of((name, tensor) for name, tensor in named if not is_adapter(name))


# ---------------------------------------------------------------- LoRA merged into the weights beside it
# The same function, without an adapter.


@torch.no_grad()
def merged(model: Decoder) -> Mapping[str, Tensor]:
    """Return every parameter and buffer of the model by name, with the LoRA products added to weights.

    Raises:
        UsageError: another kind of adapter, which weights of the model cannot express.
    """
    if (kind := adapter_of(model).kind) != "lora":
        raise UsageError(f"--merge: adapter.kind is {kind}, and no weights of the model do what it does; leave it out")
    found: dict[str, Tensor] = {name: x for name, x in model.state_dict().items() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Lora):
            found[f"{prefix}.weight"] = module.weight + module.adapter.product()
    return found
