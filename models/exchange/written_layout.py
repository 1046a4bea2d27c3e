"""Written form of a model for ``transformers``: as a family that the library has, or with its own modelling code."""

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

#: ``model_type`` of models that bring their code, and the prefix of their tensors' names.
MODEL_TYPE, DECODER_PREFIX = "birthmark", "decoder."


@dataclass(frozen=True)
class Layout:
    """Contents of a folder beside the tokenizer."""

    model_type: str
    """Name of the family in ``config.json``."""
    config: dict[str, Any]
    """``config.json``, without the fields that follow from weights and tokenizer."""
    mappings: list[TensorMapping]
    """Every tensor, with the parameters that form it."""
    buffers: frozenset[str] = frozenset()
    """Tensors that are no weights, and keep their dtype."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of code: name → text."""
    own_tokenizer: bool = False
    """True if ``AutoTokenizer`` splits text by the family's own rules."""


def native_layout(config: ModelConfig) -> Layout:
    """Return the layout of the first family of ``transformers`` that has the architecture.

    Raises:
        UsageError: there is none; names the fields that prevent it.
    """
    family = family_of(config)
    return Layout(
        family.model_type,
        config_to_json(config, family),
        tensor_mappings(config, family),
        own_tokenizer=family.own_tokenizer,
    )


def decoder_mappings(config: ModelConfig) -> tuple[list[TensorMapping], frozenset[str]]:
    """Return the tensors of a model that brings its code, under this decoder's names, and the names of its buffers."""
    shapes = tensor_shapes(config)
    mappings = [TensorMapping(f"{DECODER_PREFIX}{name}", (name,), shape, False, None) for name, shape in shapes.items()]
    buffers = shapes.keys() - dict(parameter_shapes(config)).keys()
    return mappings, frozenset(f"{DECODER_PREFIX}{name}" for name in buffers)


def decoder_layout(config: ModelConfig) -> Layout:
    """Return the layout with the decoder's modelling code beside the weights, for any architecture without a user's
    classes.

    Raises:
        UsageError: a part is a user's class, whose code cannot be written.
    """
    if own := config.attention.user_parts:
        part, name = next(iter(own.items()))
        raise UsageError(
            f"model.attention.{part} {name}: a class of your own is not exported, since its code may need more than "
            "torch; put it into the package (CONTRIBUTING.md), or share the run itself"
        )
    mappings, buffers = decoder_mappings(config)
    content = {
        "architectures": ["BirthmarkForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.BirthmarkConfig",
            "AutoModelForCausalLM": f"{MODELING}.BirthmarkForCausalLM",
        },
        "model_type": MODEL_TYPE,
        "birthmark_fields": list(resolved_fields(config)),
        **resolved_fields(config),
        "initializer_range": config.init.std,
    }
    return Layout(MODEL_TYPE, content, mappings, buffers, exported_code())


def decoder_config(content: Mapping[str, Any], where: str) -> ModelConfig:
    """Read the config of a model that brings its own code from its ``config.json``.

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
    """Raise SchemaError for a field, in a tree of them, that differs in type from the config's."""
    hints = get_type_hints(kind)
    for name in given.keys() & hints.keys():
        nested = is_dataclass(hints[name])
        check(given[name], dict[str, Any] if nested else hints[name], f"{where}{name}")
        if nested:
            _check_types(given[name], hints[name], f"{where}{name}.")


def layout_of(config: ModelConfig, own_code: bool = False) -> Layout:
    """Return the layout of the family that has the architecture; with own code if there is none, or on request.

    Raises:
        UsageError: a part is a user's class.
    """
    if own_code or config.attention.user_parts:
        return decoder_layout(config)
    try:
        return native_layout(config)
    except UsageError:
        return decoder_layout(config)


@dataclass(frozen=True)
class Expected:
    """Contents that a folder must have, by its ``config.json``."""

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
    """Return the contents that a ``config.json`` implies, for a family of ``transformers`` or a model that brings its
    code. That code is not run: this package has the decoder.

    Raises:
        UsageError: an unsupported family, or a key whose value ModelConfig cannot express; begins with ``where``.
    """
    if content.get("model_type") == MODEL_TYPE:
        config = decoder_config(content, where)
        return Expected(MODEL_TYPE, config, decoder_mappings(config)[0], f"{DECODER_PREFIX}head.weight")
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
