"""`birthmark describe`: what a model is made of."""

from __future__ import annotations

from typing import Any

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.config_parser import Parser
from ..options import MODEL_NAMES, add_json, add_overrides, config_with_overrides, tell

SUMMARY = "Show what a model is made of, without allocating it."


def add_options(parser: Parser) -> None:
    """Add the options that name the config or the model."""
    parser.add_argument("config", type=str, metavar="CONFIG|MODEL", help=f"A config, or {MODEL_NAMES}.")
    add_overrides(parser, "Change fields of the config.")
    add_json(parser)


def run(options: Namespace) -> int:
    """Describe a model."""
    from rich.console import Console

    from ...plan.describe import describe, print_description
    from ...report.terminal import print_json
    from ...trainer.by_name.name_grammar import read_name

    name = options.config
    found = read_name(name)
    if found.kind in ("run", "birth"):
        options.config = str(found.run.config if found.kind == "run" else found.path)
    of_hub = found.kind == "hub" and "/" in name and not found.path.is_file()
    is_model = found.kind == "gguf" or (found.path / "config.json").is_file() or of_hub
    if is_model and options["set"]:
        raise UsageError(f"--set {options['set'][0]}: {name} is a model with weights; leave it out, or give a config")
    description = _of_model(name) if is_model else describe(config_with_overrides(options).model)
    if options.json:
        print_json(description)
    else:
        print_description(description, Console())
    return 0


def _of_model(name: str) -> dict[str, Any]:
    """Describe a model of transformers; only by its parameters, if our decoder cannot express it."""
    from ...models.config import ModelConfig
    from ...plan.describe import describe, describe_shapes
    from ...trainer.by_name.model_names import hf_folder_of, open_any_source

    source = open_any_source(name, tell=tell)
    if isinstance(source.config, ModelConfig):
        found = describe(source.config)
    else:
        found = describe_shapes(hf_folder_of(name, False, tell).parameter_shapes().items())
    return found | {"stored_kinds": dict(source.stored_kinds)}
