"""docs/model-fields.md is what the code says, and says all of it."""

import ast
import dataclasses
import inspect
import re
import typing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import birthmark
from birthmark.errors import UsageError
from birthmark.launch.reference.model_fields import Field, build, companions, field_table, model_fields, refusals
from birthmark.models.attention.attention import NORMALISERS
from birthmark.models.attention.differential import Difference
from birthmark.models.attention.normalisers import Explicit, FusedSoftmax
from birthmark.models.birth import born
from birthmark.models.config import (
    AttentionConfig,
    CalibrationConfig,
    DropoutConfig,
    ExpertsConfig,
    InitConfig,
    LatentConfig,
    ModelConfig,
)

FILE = Path(birthmark.__file__).parent / "docs" / "model-fields.md"
GROUPS = {
    "model": ModelConfig,
    "model.attention": AttentionConfig,
    "model.attention.calibration": CalibrationConfig,
    "model.attention.latent": LatentConfig,
    "model.experts": ExpertsConfig,
    "model.dropout": DropoutConfig,
    "model.init": InitConfig,
}


def rows():
    """Cells of the first table: field, value, meaning, source, kernel."""
    lines = FILE.read_text(encoding="utf-8").split("## What is refused")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    assert {len(row) for row in cells} == {5}
    return [(field.strip("`"), *rest) for field, *rest in cells]


@pytest.mark.heavy
def test_the_file_is_what_the_code_says():
    table = field_table()
    assert table == field_table()
    assert FILE.read_text(encoding="utf-8") == table, (
        "docs/model-fields.md is old: python -m birthmark.launch.reference.model_fields > docs/model-fields.md"
    )


def test_every_field_is_there_with_its_docstring_and_default():
    """Read from the source text, a second way."""
    found = {}
    for field, value, meaning, *_ in rows():
        found.setdefault(field, []).append((value, meaning))
    expected = set()
    for prefix, group in GROUPS.items():
        body = ast.parse(inspect.getsource(group)).body[0].body
        docs = {a.target.id: b.value.value for a, b in pairwise(body) if isinstance(a, ast.AnnAssign)}
        for field in dataclasses.fields(group):
            path = f"{prefix}.{field.name}"
            if path in GROUPS:
                continue
            expected.add(path)
            # Sources have a column of their own: the words around them stay.
            first = re.split(r"\[|\(|``", docs[field.name])[0].split()
            assert " ".join(first) in found[path][0][1], path
            defaults = [value for value, _ in found[path] if "**" in value]
            assert len(defaults) == 1, path
            if isinstance(field.default, str):
                assert defaults == [f"**{field.default}**"], path
    assert set(found) == expected


def test_every_value_of_every_field_has_a_row():
    values = {}
    for field, value, *_ in rows():
        values.setdefault(field, []).append(value.strip("*"))
    for prefix, group in GROUPS.items():
        for name, hint in typing.get_type_hints(group).items():
            # Some may be a class of the user's own instead.
            kind = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Union else hint
            if typing.get_origin(kind) is typing.Literal:
                assert values[f"{prefix}.{name}"] == list(typing.get_args(kind))
    parts = typing.get_args(typing.get_args(typing.get_type_hints(InitConfig)["zero"])[0])
    (zero,) = values["model.init.zero"]
    assert all(part in zero for part in parts)


def test_sources_are_those_of_the_values():
    found = {(field, value.strip("*")): source for field, value, _, source, _ in rows()}
    for at, source in {
        ("model.positions", "rope"): "arXiv 2104.09864",
        ("model.positions", "sinusoidal"): "arXiv 1706.03762",
        ("model.positions", "t5"): "arXiv 1910.10683",
        ("model.positions", "none"): "–",
        ("model.attention.normaliser", "sigmoid"): "arXiv 2409.04431, [AS]",
        ("model.attention.normaliser", "elu"): "[AS]",
        ("model.attention.aggregation", "plain"): "–",
        ("model.attention.aggregation", "headnorm"): "[SO]",
        ("model.attention.calibration.n_eff", "analytic"): "[BB]",
        ("model.attention.gate", "none"): "–",
        ("model.attention.gate", "channel"): "arXiv 2505.06708",
        ("model.mlp", "swiglu"): "arXiv 2002.05202",
        ("model.mlp", "relu2"): "Primer, arXiv 2109.08668",
    }.items():
        assert found[at] == source, at


def test_a_source_belongs_to_the_values_that_its_clause_names():
    names = typing.Literal["a", "b", "c", "none"]
    field = Field("x", names, "a", "A thing [AS]: ``a`` (arXiv 1.1), ``b`` (Name 2010); ``c``, f(x). Or (none).", "")
    assert field.sources() == {None: ["[AS]"], "a": ["arXiv 1.1", "Name 2010"], "b": ["Name 2010"]}


def test_every_kernel_of_the_table_is_in_the_legend():
    lines = FILE.read_text(encoding="utf-8").splitlines()
    legend = {line.split("**")[1].removeprefix("… + ") for line in lines if line.startswith("| **")}
    used = {name for *_, kernel in rows() for name in kernel.split(" + ")}
    assert used - {"–"} == legend


class Seer:
    def __init__(self):
        self.seen = set()

    def residual(self, *args):
        pass

    def attention(self, layer, attended):
        self.seen.add(type(attended.weights))

    def neurons(self, *args):
        pass


@pytest.mark.parametrize("field", ["model.attention.normaliser", "model.positions"])
def test_the_kernel_of_the_table_is_the_one_that_runs(field):
    kernels = {value.strip("*"): kernel for name, value, _, _, kernel in rows() if name == field}
    assert field != "model.attention.normaliser" or list(kernels) == list(NORMALISERS)
    small = {
        "model.d_model": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "model.vocab_size": 9,
        "model.max_seq_len": 8,
    }
    for value, kernel in kernels.items():
        seer = Seer()
        with torch.no_grad():
            born(build({**small, field: value}), 0)(torch.zeros(1, 5, dtype=torch.long), observer=seer)
        fused = Difference if "difference" in kernel else FusedSoftmax
        assert seer.seen == {fused if kernel.startswith("fused") else Explicit}, value


def test_every_value_is_possible_with_what_its_refusal_asks_for():
    """So the mend that a refusal names is one."""
    for field in model_fields():
        for value in field.others():
            needed, problems = companions({field.path: value})
            # "A gated model.mlp" is no value.
            assert problems == [] or value == ["mlp.gate"], (field.path, value, needed)


@pytest.mark.heavy
def test_refusals_are_refused_with_this_message():
    found = refusals()
    assert len(found) > 20
    for problem, changes in found.items():
        with pytest.raises(UsageError, match=re.escape(problem)):
            build(changes)
        # A field that nothing reads stands in its example, and the mend above the table.
        shown = problem.removesuffix(": leave it out or change that").partition(" is set, but ")
        assert f" | {(shown[2] or problem)} |" in FILE.read_text(encoding="utf-8")
