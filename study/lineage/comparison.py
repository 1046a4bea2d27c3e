"""Settings of comparisons of models: the probe that they see and the recipe of the test, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jsonargparse import Namespace

from ...errors import UsageError
from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...trainer.config_parser import Parser
from .comparison_options import ProbeOptions

#: Names of the fields of a probe and of a recipe.
PROBE_FIELDS = tuple(field.name for field in dataclasses.fields(ProbeOptions))
RECIPE_FIELDS = tuple(field.name for field in dataclasses.fields(LineageTestConfig))
_NULLABLE = ("seq_len", "draws")


@dataclass(frozen=True)
class Comparison:
    """Settings of the test of every pair of models."""

    probe: FingerprintProbe
    """Inputs of both models."""
    seq_len: int | None
    """Tokens in a sequence of the probe, where a user gives them. The probe's own length is chosen with the models."""
    recipe: LineageTestConfig
    """Recipe from hidden states to a verdict."""


def _comparison(fields: Mapping[str, Any], mark: str = "") -> Comparison:
    recipe = LineageTestConfig(**{name: fields[name] for name in RECIPE_FIELDS})
    if problems := recipe.problems():
        raise UsageError("; ".join(f"{mark}{problem}" for problem in problems))
    check_probe(recipe, fields["probe"], mark)
    probe = FingerprintProbe(kind=fields["probe"], n_inputs=fields["n_inputs"], probe_seed=fields["probe_seed"])
    return Comparison(probe, fields["seq_len"], recipe)


def check_probe(recipe: LineageTestConfig, kind: str, mark: str = "") -> None:
    """Raise UsageError for inputs of a kind that the recipe's null does not read."""
    if recipe.null == "matched" and kind != "token":
        raise UsageError(f"{mark}probe {kind}: the null matched reads weights, no inputs; leave it out")


def read_comparison(fields: Mapping[str, Any]) -> Comparison:
    """Read a comparison from fields of a YAML file; missing fields have their defaults.

    Raises:
        UsageError: a value of another type, or an impossible recipe; the message names the field.
    """
    for name, value in fields.items():
        if value is None and name not in _NULLABLE:
            # The parser takes None for any field.
            raise UsageError(f"{name} is null: give a value, or leave it out")
    return _comparison(vars(_parser().parse_object(dict(fields))))


def comparison_of(options: Namespace) -> Comparison:
    """Build the comparison from a command's options; without ``--null``, under the default null.

    Raises:
        UsageError: an impossible recipe; the message names the option.
    """
    return _comparison({**vars(options), "null": options.null or LineageTestConfig.null}, mark="--")


@cache
def _parser() -> Parser:
    """Build a parser that checks values of the two dataclasses."""
    parser = Parser()
    parser.add_class_arguments(ProbeOptions, None, as_group=False)
    parser.add_class_arguments(LineageTestConfig, None, as_group=False)
    return parser


def describe_probe(probe: FingerprintProbe) -> str:
    """Describe a probe in words."""
    inputs = "random tokens" if probe.kind == "token" else "Gaussian vectors in place of embeddings"
    return f"{probe.n_inputs} sequences of {probe.seq_len} {inputs}"
