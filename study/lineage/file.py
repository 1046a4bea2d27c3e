"""The file of a study of lineage: what is born, trained and continued, and how it is compared (docs/studies.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...trainer.config_parser import Parser
from ..reading import Reader, read_fields
from ..trials import as_flags
from .test_options import add_test_options

#: Folder of the runs that others go on from.
BASE = "base"
_SCALED = ("base", "init_seeds", "steps", "continue", "test", "tests")
_FIELDS = ("kind", "name", *_SCALED, "scales")
_OF_A_PROBE = ("probe", "n_inputs", "seq_len", "probe_seed")
_OF_A_TEST = (*_OF_A_PROBE, *(field.name for field in dataclasses.fields(LineageTestConfig)))
_DEFAULT_TESTS: dict[str, Any] = {"dimensions": {}, "published": {"null": "analytic"}}


@dataclass(frozen=True)
class Comparison:
    """How every pair of models is tested."""

    probe: FingerprintProbe
    """What both are shown."""
    seq_len: int | None
    """Tokens in a sequence of it, where the file says so; the probe's own are chosen with the models."""
    recipe: LineageTestConfig
    """What is made of it."""


@dataclass(frozen=True)
class Lineage:
    """A study file of the kind ``lineage``, checked and with its paths resolved."""

    file: Path
    name: str
    base: Path
    """Run config of all births."""
    init_seeds: tuple[int, ...]
    """Their seeds."""
    steps: tuple[int, ...]
    """Checkpoints of the base that are compared; none: all."""
    continuations: dict[str, dict[str, Any]]
    """Name → dotted fields in which the run that goes on differs from the base."""
    tests: dict[str, Comparison]
    """By name; the first is drawn as a matrix."""
    scales: dict[str, Lineage]
    """The same at other sizes."""

    def at(self, scale: str | None) -> Lineage:
        """The study at one of its scales; UsageError if the file has none of that name."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise UsageError(f"--scale {scale}: {self.file} has {', '.join(self.scales) or 'none'}")
        return self.scales[scale]


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_lineage(file: Path) -> Lineage:
    """Read and check a study file of the kind ``lineage``; UsageError names the file and the field."""
    content, reader = read_fields(file), Reader(file)
    reader.known(content, _FIELDS, "")
    name = content.get("name", file.stem)
    reader.name(name, "name")
    scales = {}
    for scale, fields in reader.named(content.get("scales", {}), "scales").items():
        where = f"scales.{scale}."
        reader.known(reader.group(fields, where.rstrip(".")), _SCALED, where)
        scales[scale] = _lineage(reader, f"{name}-{scale}", content | fields, dict.fromkeys(fields, where))
    return dataclasses.replace(_lineage(reader, name, content, {}), scales=scales)


def _lineage(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> Lineage:
    """The study at one scale; ``prefixes`` say where fields stand that are not at the top of the file."""

    def where(field: str) -> str:
        return prefixes.get(field, "") + field

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    seeds = reader.seeds(content.get("init_seeds", [0, 1]), where("init_seeds"))
    if len(seeds) < 2:
        raise reader.wrong(where("init_seeds"), list(seeds), "give at least two: strangers are the control")
    continuations = reader.changes(content.get("continue", {}), where("continue"))
    for continuation, fields in continuations.items():
        if continuation == BASE:
            raise reader.wrong(f"a name in {where('continue')}", BASE, "the runs that it goes on from are called so")
        if "init_from" in fields:
            field = f"{where('continue')}.{continuation}.init_from"
            raise reader.wrong(field, fields["init_from"], "the study decides it, leave it out")
    shared, tests = _options(reader, content.get("test", {}), where("test")), content.get("tests", _DEFAULT_TESTS)
    if not reader.named(tests, where("tests")):
        raise reader.wrong(where("tests"), tests, "name at least one")
    return Lineage(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where("base")),
        init_seeds=seeds,
        steps=_steps(reader, content.get("steps", []), where("steps")),
        continuations=continuations,
        tests={test: _comparison(reader, fields, shared, f"{where('tests')}.{test}") for test, fields in tests.items()},
        scales={},
    )


def _steps(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(step) is int and step > 0 for step in value)
    if not whole or len(set(value)) < len(value):
        raise reader.wrong(field, value, "give a list of different steps from 1, or leave it out for all checkpoints")
    return tuple(sorted(value))


def _options(reader: Reader, value: Any, where: str) -> dict[str, Any]:
    """Options of ``birthmark fingerprint``."""
    # YAML reads an unquoted `null` as none, also where it is a field's name.
    options = {"null" if name is None else name: option for name, option in reader.group(value, where).items()}
    reader.known(options, _OF_A_TEST, f"{where}.")
    return options


@cache
def _parser() -> Parser:
    parser = Parser()
    add_test_options(parser, 2000)
    return parser


def _comparison(reader: Reader, fields: Any, shared: dict[str, Any], where: str) -> Comparison:
    flags = as_flags(shared | _options(reader, fields, where))
    try:
        parsed = _parser().parse_args(flags)
    except UsageError as error:
        told = str(error).replace("birthmark pretrain --help", "birthmark fingerprint --help")
        raise UsageError(f"{reader.file}: {where}: {told}") from None
    options = {field.name: parsed[field.name] for field in dataclasses.fields(LineageTestConfig)}
    recipe = LineageTestConfig(**options | {"null": parsed.null or LineageTestConfig.null})
    if problems := recipe.problems():
        raise UsageError(f"{reader.file}: {where}: {'; '.join(problems)}")
    probe = FingerprintProbe(kind=parsed.probe, n_inputs=parsed.n_inputs, probe_seed=parsed.probe_seed)
    return Comparison(probe, parsed.seq_len, recipe)
