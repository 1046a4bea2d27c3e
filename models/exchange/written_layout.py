"""How a model is written for ``transformers``: as a family that the library has, or with its own modelling code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_type_hints

from ...errors import UsageError
from ...schema import SchemaError, check, checked
from ..config import ModelConfig
from ..parameter_shapes import parameter_shapes, tensor_shapes
from .conversion import (
    TensorMapping,
    config_from_json,
    config_to_json,
    family_of,
    family_of_json,
    tensor_mappings,
)
from .exported.assembly import CONFIGURATION, MODELING, exported_code
from .exported.config_fields import config_of_fields, resolved_fields

#: ``model_type`` of models that bring their code, and what their tensors' names begin with.
OWN_TYPE, OWN_PREFIX = "birthmark", "decoder."


@dataclass(frozen=True)
class Layout:
    """What a folder holds beside the tokenizer."""

    model_type: str
    """As ``config.json`` names it."""
    config: dict[str, Any]
    """``config.json``, but for what follows from weights and tokenizer."""
    mappings: list[TensorMapping]
    """Every tensor, made of ours."""
    buffers: frozenset[str] = frozenset()
    """Tensors that are no weights, and keep their dtype."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of code: name → text."""
    own_tokenizer: bool = False
    """Whether ``AutoTokenizer`` splits text by the family's own rules."""


def native_layout(config: ModelConfig) -> Layout:
    """That of the first family of ``transformers`` that has the architecture.

    Raises:
        UsageError: there is none; names the fields in the way.
    """
    family = family_of(config)
    return Layout(
        family.model_type,
        config_to_json(config, family),
        tensor_mappings(config, family),
        own_tokenizer=family.own_tokenizer,
    )


def own_mappings(config: ModelConfig) -> tuple[list[TensorMapping], frozenset[str]]:
    """Tensors of a model that brings its code, which have our names; and which of them are buffers."""
    shapes = tensor_shapes(config)
    mappings = [TensorMapping(f"{OWN_PREFIX}{name}", (name,), shape, False, None) for name, shape in shapes.items()]
    buffers = shapes.keys() - dict(parameter_shapes(config)).keys()
    return mappings, frozenset(f"{OWN_PREFIX}{name}" for name in buffers)


def own_layout(config: ModelConfig) -> Layout:
    """With the modelling code of the decoder beside the weights: any architecture but those with a user's own classes.

    Raises:
        UsageError: a part is a class of the user's own, whose code is not here to be written.
    """
    if own := config.attention.own_parts:
        part, name = next(iter(own.items()))
        raise UsageError(
            f"model.attention.{part} {name}: a class of your own is not exported, since its code may need more than "
            "torch; put it into the package (CONTRIBUTING.md), or share the run itself"
        )
    mappings, buffers = own_mappings(config)
    content = {
        "architectures": ["BirthmarkForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.BirthmarkConfig",
            "AutoModelForCausalLM": f"{MODELING}.BirthmarkForCausalLM",
        },
        "model_type": OWN_TYPE,
        "birthmark_fields": list(resolved_fields(config)),
        **resolved_fields(config),
        "initializer_range": config.init.std,
    }
    return Layout(OWN_TYPE, content, mappings, buffers, exported_code())


def own_config(content: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that the ``config.json`` of one with its own code describes.

    Raises:
        UsageError: a field that this version does not know, is missing, or has an impossible value; begins with
            ``where``.
    """
    try:
        names = checked(content.get("birthmark_fields"), list[str], "birthmark_fields")
        if missing := [name for name in names if name not in content]:
            raise UsageError(f"{missing[0]} is missing: give it")
        given = {name: content[name] for name in names}
        _check_types(given, ModelConfig)
        found: ModelConfig = config_of_fields(ModelConfig, given)
    except (SchemaError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None
    return found


def _check_types(given: Mapping[str, Any], kind: Any, where: str = "") -> None:
    """SchemaError of a field, in a tree of them, that is of another type than the config's."""
    hints = get_type_hints(kind)
    for name in given.keys() & hints.keys():
        nested = is_dataclass(hints[name])
        check(given[name], dict[str, Any] if nested else hints[name], f"{where}{name}")
        if nested:
            _check_types(given[name], hints[name], f"{where}{name}.")


def layout_of(config: ModelConfig, own_code: bool = False) -> Layout:
    """The family that has the architecture; with its own code where there is none, or where that is asked for.

    Raises:
        UsageError: a part is a class of the user's own.
    """
    if own_code or config.attention.own_parts:
        return own_layout(config)
    try:
        return native_layout(config)
    except UsageError:
        return own_layout(config)


@dataclass(frozen=True)
class Expected:
    """What a folder must hold, by its ``config.json``."""

    model_type: str
    config: ModelConfig
    mappings: list[TensorMapping]
    head: str
    """Tensor of the output head."""
    base: str = ""
    """Prefix that checkpoints without a language-model head leave out."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a tensor → its name in ``mappings``."""
    not_parameters: tuple[str, ...] = ()
    """Ends of the names of tensors that are passed over."""


def expected_of(content: Mapping[str, Any], where: str) -> Expected:
    """What belongs to a ``config.json``, of a family of ``transformers`` or of a model that brings its code, which is
    not run: the decoder is here.

    Raises:
        UsageError: no family of ours, or a key whose value ModelConfig cannot express; begins with ``where``.
    """
    if content.get("model_type") == OWN_TYPE:
        config = own_config(content, where)
        return Expected(OWN_TYPE, config, own_mappings(config)[0], f"{OWN_PREFIX}head.weight")
    family, config = family_of_json(content, where), config_from_json(content, where)
    return Expected(
        family.model_type,
        config,
        tensor_mappings(config, family),
        f"{family.modules['head']}.weight",
        family.base,
        family.aliases,
        family.not_parameters,
    )
