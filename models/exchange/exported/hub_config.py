"""The config of an exported model: the fields of :class:`ModelConfig`, in the form of ``transformers``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from ...config import ModelConfig
from .config_fields import config_of_fields, resolved_fields


class BirthmarkConfig(PretrainedConfig):
    """Config with every field of :class:`ModelConfig` under its name; the library's names for sizes work too."""

    model_type = "birthmark"
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {  # noqa: RUF012 - as the library declares it
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "max_seq_len",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, **given: Any) -> None:
        names = [field.name for field in fields(ModelConfig)]
        given = {self.attribute_map.get(name, name): value for name, value in given.items()}
        model = config_of_fields(ModelConfig, {name: given.pop(name) for name in names if name in given})
        given.pop("birthmark_fields", None)
        for name, value in resolved_fields(model).items():
            setattr(self, name, value)
        self.birthmark_fields = names
        # Standard deviation with which `from_config` draws weights. A birth comes from `birthmark export CONFIG@SEED`.
        self.initializer_range = given.pop("initializer_range", model.init.std)
        super().__init__(**given)

    def model_config(self) -> ModelConfig:
        """Build the architecture's config, checked.

        Raises:
            UsageError: fields that no model can have; the message names all of them.
        """
        found: ModelConfig = config_of_fields(
            ModelConfig, {field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        )
        return found
