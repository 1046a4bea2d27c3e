"""Conversion, both ways, between ModelConfig and ``config.json``, and between parameters and a family's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from ...errors import UsageError
from ...messages import one_line
from ..config import GATED, MAX_STD, AttentionConfig, ExpertsConfig, InitConfig, ModelConfig, dotted
from ..decoder import Decoder
from .families import ACTIVATIONS, FAMILIES, Family

_BY_TYPE = {family.model_type: family for family in FAMILIES}
_PARTS: dict[str, Any] = {"attention": AttentionConfig, "experts": ExpertsConfig}
_HINTS = get_type_hints(ModelConfig) | {
    f"{part}.{name}": hint for part, kind in _PARTS.items() for name, hint in get_type_hints(kind).items()
}


def family_of_json(content: Mapping[str, Any], where: str) -> Family:
    """Return the family that a ``config.json`` names. UsageError, beginning with ``where``, if it is not supported."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in _BY_TYPE:
        raise UsageError(f"{where}: model_type {name!r} is none of {', '.join(_BY_TYPE)}: give a model of one of these")
    if content.get("quantization_config") is not None:
        raise UsageError(f"{where}: quantization_config is set: give the checkpoint before it was quantised")
    return _BY_TYPE[name]


def config_from_json(content: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the model's config from a ``config.json`` of ``transformers``.

    Fields for training only, dropout and the losses of routers, are left out; ``init`` is ``normal`` with std
    ``initializer_range``.

    Raises:
        UsageError: an unsupported family, or a key whose value ModelConfig cannot express; begins with ``where``.
    """
    given = _fields(content, family_of_json(content, where), where)
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in given.items():
        part, _, inner = name.partition(".")
        if inner:
            parts[part][inner] = value
    std = content.get("initializer_range")
    std = float(std) if isinstance(std, (int, float)) and 0 < std <= MAX_STD else InitConfig.std
    try:
        return ModelConfig(
            **{name: value for name, value in given.items() if "." not in name},
            **{part: kind(**parts[part]) for part, kind in _PARTS.items()},
            init=InitConfig(kind="normal", std=std),
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def config_to_json(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Build the ``config.json`` of a model, for ``transformers`` 4 and 5. Exact if :func:`obstacles` finds none."""
    fields = _resolved(config)
    activations = [name for name, mlp in _mlps(family).items() if mlp == config.mlp]
    content: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    # A family has one value for all blocks, and none is exact where this config has a list.
    values = {key: None if isinstance(fields[name], list) else fields[name] for key, name in family.keys.items()}
    content |= {key: value for key, value in values.items() if value is not None or family.keys[key] in _NULLABLE}
    content |= {family.activation: (activations or [family.silent[family.activation]])[0]}
    content |= {key: value for key, value in family.required.items() if isinstance(value, bool)}
    content |= {old: content[key] for old, key in family.renamed.items() if key in content}
    if "rope_theta" in family.keys:
        rope = {key: content[key] for key in ("rope_theta", "partial_rotary_factor") if key in content}
        content["rope_parameters"] = {"rope_type": "default", **rope}
    content |= {key: getattr(config.dropout, name) for key, name in family.dropout.items()}
    # The library's product of all experts at once, its default, fails unless rows are multiples of 16 bytes.
    if config.experts.is_on and (config.d_model % 8 or fields["experts.d_ff"] % 8):
        content["experts_implementation"] = "eager"
    content["initializer_range"] = config.init.std
    return content


def obstacles(config: ModelConfig, family: Family, *, cached: bool = True) -> dict[str, tuple[Any, Any]]:
    """Return the fields of ``config``, dotted, that ``family`` would change: (value in the config, value in the
    family); with ``cached`` also those that only its cache would change.
    """
    fields = _resolved(config)
    in_family = _architecture(ModelConfig()) | _fields(config_to_json(config, family), family, family.model_type)
    derived = {
        "n_kv_heads": in_family["n_heads"],
        "head_dim": in_family["d_model"] // in_family["n_heads"],
        "attention.qkv_bias": in_family["bias"],
        "experts.d_ff": in_family["d_ff"] if in_family["experts.n_experts"] else None,
    }
    in_family |= {name: value for name, value in derived.items() if in_family[name] is None}
    # Its cache keeps the last 1 - window keys, and -0 are all of them.
    if cached and config.attention.window == 1 and "attention.window" in family.keys.values():
        in_family["attention.window"] = "at least 2"
    if config.d_model % config.n_heads and not family.any_head_dim:
        in_family["head_dim"] = f"{config.d_model}/{config.n_heads}"
    return {name: (value, in_family[name]) for name, value in fields.items() if in_family[name] != value}


def family_of(config: ModelConfig, *, cached: bool = True) -> Family:
    """Return the first family that expresses ``config`` exactly, except for its distribution at birth.

    Args:
        config: of the model.
        cached: the family's cache is to be exact, too.

    Raises:
        UsageError: there is none; names the fields that keep the closest family from it.
    """
    found = {family.model_type: obstacles(config, family, cached=cached) for family in FAMILIES}
    closest = min(found, key=lambda name: len(found[name]))
    if fields := found[closest]:
        here = ", ".join(f"model.{name} {value}" for name, (value, _) in fields.items())
        there = ", ".join(str(value) for _, value in fields.values())
        verb = "has" if len(fields) == 1 else "have"
        raise UsageError(f"{here} {verb} no counterpart in transformers: the closest family, {closest}, has {there}")
    return _BY_TYPE[closest]


#: Fields that null leaves to others, or to none, here and in ``transformers``.
_NULLABLE = ("n_kv_heads", "head_dim", "d_ff", "attention.window")


def _architecture(config: ModelConfig) -> dict[str, Any]:
    """Flatten all fields by dotted name, except those that no pass of a trained model reads: ``init``, ``dropout`` and
    the losses of routers.
    """
    given = dotted(asdict(config)).items()
    unread = ("init.", "dropout.", "experts.load_balance", "experts.router_z_loss")
    return {name: value for name, value in given if not name.startswith(unread)}


def _resolved(config: ModelConfig) -> dict[str, Any]:
    """Flatten all fields, with defaults that depend on other fields resolved. If every block has experts, only their
    width is read.
    """
    bias, ff, experts = config.attention.qkv_bias, config.ff, config.experts
    if experts.is_on:
        width = experts.d_ff or ff
        experts, ff = replace(experts, d_ff=width), ff if experts.n_dense else width
    attention = replace(config.attention, qkv_bias=config.bias if bias is None else bias)
    return _architecture(
        replace(
            config,
            n_kv_heads=config.kv_heads,
            head_dim=config.d_head,
            d_ff=ff,
            attention=attention,
            experts=experts,
        )
    )


def _fields(content: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Read the fields of ModelConfig that a ``config.json`` and its family decide, by dotted name."""
    given: dict[str, Any] = {key: value for key, value in content.items() if value is not None}
    given |= {key: given[old] for old, key in family.renamed.items() if old in given}
    for name in ("rope_parameters", "rope_scaling"):
        rope = given.get(name) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise UsageError(f"{where}: {name} {rope!r}: no counterpart in ModelConfig; leave it at its default")
        given |= {"rope_type" if key == "type" else key: value for key, value in rope.items() if value is not None}
    for key, wanted in family.required.items():
        value = given.get(key, wanted)
        if any(one != wanted for one in (value if isinstance(value, list) else [value])):
            named = f"rope_scaling with rope_type {value!r}" if key == "rope_type" else f"{key} {value!r}"
            raise UsageError(f"{where}: {named} has no counterpart in ModelConfig: only {wanted!r} can be read")

    fields = dict(family.fixed)
    source: dict[str, str] = {}
    for key, name in family.keys.items():
        if key not in given and key not in family.silent:
            raise UsageError(f"{where}: {key} is missing: give it")
        silent = None if _is_null(content, key) and name in _NULLABLE else family.silent.get(key)
        if _is_null(content, key) and silent is not None:
            raise UsageError(f"{where}: {key} is null: give its value, or leave it out for {silent!r}")
        value = _typed(given[key], name, f"{where}: {key}") if key in given else silent
        if name in source and fields[name] != value:
            raise UsageError(
                f"{where}: {source[name]} {fields[name]!r} with {key} {value!r} has no counterpart in ModelConfig: "
                "both must be the same"
            )
        fields[name], source[name] = value, key
    if _is_null(content, family.activation):
        raise UsageError(f"{where}: {family.activation} is null: give its name, or leave it out")
    activation = given.get(family.activation, family.silent[family.activation])
    mlp = _mlps(family).get(activation) if isinstance(activation, str) else None
    if mlp is None:
        raise UsageError(f"{where}: {family.activation} {activation!r} has no counterpart in ModelConfig")
    return fields | {"mlp": mlp}


def _is_null(content: Mapping[str, Any], key: str) -> bool:
    """Return True if a key is present without a value: ``transformers`` keeps that as null, not as a missing key."""
    return key in content and content[key] is None


def _mlps(family: Family) -> dict[str, str]:
    """Map activations that a ``config.json`` of ``family`` may name to ``mlp``."""
    kinds = {act: mlp for mlp, act in GATED.items()} if family.gated else {act: act for act in ACTIVATIONS.values()}
    return {name: kinds[act] for name, act in ACTIVATIONS.items() if act in kinds}


def _typed(value: Any, name: str, where: str) -> Any:
    """Convert ``value`` to the type of the field ``name`` of ModelConfig; JSON may write a float as a whole number."""
    kind = next(kind for kind in get_args(_HINTS[name]) or (_HINTS[name],) if kind is not type(None))
    if isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind):
        with suppress(OverflowError):  # JSON knows whole numbers above any float
            return kind(value)
    raise UsageError(f"{where} is {one_line(repr(value), 40)}: give a value of type {kind.__name__}")


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of a family and the parameters of this decoder that form it."""

    hf_name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool
    n_heads: int | None
    """Number of heads within which the parameters lie side by side; None if they lie one after the other."""

    def join(self, tensors: list[Tensor]) -> Tensor:
        """Join parameters, ``[out, in]`` or ``[out]`` each, along ``out`` into the family's tensor."""
        joined = tensors[0]
        if len(tensors) > 1 and self.n_heads is not None:
            joined = torch.stack([t.unflatten(0, (self.n_heads, -1)) for t in tensors], dim=1).flatten(0, 2)
        elif len(tensors) > 1:
            joined = torch.cat(tensors)
        return (joined.T if self.transposed else joined).contiguous()

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Split the family's tensor into parameters of this decoder; yield them by name."""
        tensor = tensor.T if self.transposed else tensor
        n = len(self.names)
        if n > 1 and self.n_heads is not None:
            parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (self.n_heads, n, -1)).unbind(1)]
        else:
            parts = list(tensor.chunk(n)) if n > 1 else [tensor]
        yield from zip(self.names, parts, strict=True)


def tensor_mappings(config: ModelConfig, family: Family) -> list[TensorMapping]:
    """List the mapping of every tensor that a checkpoint of ``family`` holds for ``config``, in this decoder's order of
    parameters.
    """
    with torch.device("meta"):
        parameters = dict(Decoder(config).named_parameters())
    order = list(family.modules)
    named: dict[str, list[tuple[int, str]]] = {}
    for name in parameters:
        module, _, leaf = name.rpartition(".")
        # Blocks and experts are counted.
        general = ".".join("*" if part.isdigit() else part for part in module.split("."))
        full = f"{family.modules[general]}.{'weight' if leaf == 'gain' else leaf}"
        for part in filter(str.isdigit, module.split(".")):
            full = full.replace("*", part, 1)
        named.setdefault(full, []).append((order.index(general), name))
    found = []
    for full, of_tensor in named.items():
        names = tuple(name for _, name in sorted(of_tensor))
        transposed = full.split(".")[-2] in family.transposed and parameters[names[0]].ndim == 2
        mapping = TensorMapping(full, names, (), transposed, config.n_heads if family.by_head else None)
        shape = tuple(mapping.join([parameters[name] for name in names]).shape)
        found.append(TensorMapping(full, names, shape, transposed, mapping.n_heads))
    return found
