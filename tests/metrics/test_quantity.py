"""Declarations of quantities: complete, free of contradictions, and as the instrument measures."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from birthmark.data.probes import random_probe
from birthmark.measure.measurement import birth_reference, measure
from birthmark.metrics.quantities import LOGGED, MEASURED, METRICS, SECTIONS, by_block, over_training, quantities_of
from birthmark.metrics.quantity import LEVELS, Column, Quantity
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig

CONFIG = ModelConfig(d_model=16, n_layers=3, n_heads=2, vocab_size=40, max_seq_len=12, d_ff=24)
SIZES = {
    "layer": 3, "state": 4, "head": 2, "position": 12, "channel": 16, "direction": 16, "unit": 24, "token": 40,
    "epsilon": 9, "rank": 10, "stranger": 1, "expert": 0,
}  # fmt: skip


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def measured(request):
    """A measurement with all that may be there: birth, stranger, rows that need not sum to 1."""
    config = replace(CONFIG, attention=AttentionConfig(normaliser=request.param))
    probe = random_probe(40, 5, 12, 0)
    birth, stranger = (birth_reference(born(config, seed), probe, 4) for seed in (0, 1))
    return measure(born(config, 0), probe, birth, [stranger])


def test_what_is_measured_is_what_is_declared_in_its_order_and_shape(measured):
    declared = [q for group in METRICS.values() for q in group]
    scalars = [q.name for q in declared if q.has_scalar]
    assert list(measured.scalars) == [name for name in scalars if name in measured.scalars]
    shapes = {q.name: tuple(SIZES[axis] for axis in q.axes) for q in declared if q.has_array}
    # Nine positions behind the first are seen by a quarter of twelve queries.
    shapes |= {name: (3, 9) for name in shapes if name.startswith("secondary_sink_")}
    assert [(name, array.shape) for name, array in measured.arrays.items() if array.shape != shapes[name]] == []
    always = [q for q in declared if not q.when]
    assert {q.name for q in always if q.has_scalar} <= measured.scalars.keys()
    assert {q.name for q in always if q.has_array} <= measured.arrays.keys()


def test_declarations_stand_on_each_other():
    names = [q.name for group in METRICS.values() for q in group]
    assert len(names) == len(set(names))
    for q in [*MEASURED.values(), *LOGGED.values()]:
        assert q.section in {*SECTIONS, "loss", "speed", "evaluation", ""}
        assert q.definition.endswith(".")
        assert not q.of or MEASURED[q.of].has_array
        if isinstance(q.control, str) and q.control not in LEVELS:
            assert {**MEASURED, **LOGGED}[q.control].has_scalar
            assert q.control_label
    assert [p for q in MEASURED.values() for p in q.problems()] == []
    assert all(not link.headline or MEASURED[link.headline].has_scalar for link in SECTIONS.values())


def test_tables_are_ordered_by_place():
    every = [*LOGGED.values(), *MEASURED.values()]
    first = ["val/loss", "train/loss", "val/loss_trigger", "seedprint/z"]
    assert [q.name for q, _ in over_training(every)][:4] == first
    assert [q.name for q, _ in by_block(every)][:3] == ["inter", "intra", "alignment"]
    last = Quantity("mine", ("layer", "head"), scalar="mean", per_block="mean", definition="Mine.")
    assert [over_training([last, *every])[-1][0], by_block([last, *every])[-1][0]] == [last, last]
    # Without a reduction it has no one number for each block.
    assert by_block([replace(last, per_block="")]) == []


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean", [2.5, 8.5]), ("max", [5, 11]), ("median", [2.5, 8.5]), ("first", [0, 6]), ("last", [5, 11]),
     ("last_mean", [3.5, 9.5])],
)  # fmt: skip
def test_blocks_of_an_array(reduction, expected):
    quantity = Quantity("x", ("layer", "head", "position"), per_block=reduction)
    np.testing.assert_array_equal(quantity.blocks(np.arange(12.0).reshape(2, 2, 3)), expected)


def test_a_control_is_a_number_a_level_or_a_scalar():
    summary = {
        "bias": {"sink_uniform": 0.1, "nothing": None},
        "bias_text": {"sink_uniform": 0.2},
        "probe": {"seq_len": 64},
        "model": {"d_model": 32, "n_heads": 2},
    }
    levels = [Quantity("x", control=c).level(summary) for c in (0.5, "seq_len", "1/sqrt(d_head)", "sink_uniform")]
    assert levels == [0.5, 64, 0.25, 0.1]
    assert Quantity("x", control="sink_uniform").level(summary, "bias_text") == 0.2
    assert all(np.isnan(Quantity("x", control=c).level(summary)) for c in (None, "nothing", "absent"))
    assert all(np.isnan(Quantity("x", control=level).level({})) for level in LEVELS)
    of_length = Quantity("x", control="seq_len")
    assert of_length.level(summary, "bias_text") == 64
    assert of_length.level({**summary, "probe_text": {"seq_len": 8}}, "bias_text") == 8


def test_a_declaration_survives_json():
    more = {"over_training": Column("my\nown"), "by_block": None}
    quantity = Quantity("mine", ("layer", "head"), definition="Mine.", scalar="mean", **more)
    stored = json.loads(json.dumps(quantity.to_json()))
    assert Quantity.from_json(stored) == quantity
    assert Quantity.from_json({**stored, "field_of_a_later_version": 1}) == quantity
    assert [Quantity.from_json(q.to_json()) for q in MEASURED.values()] == list(MEASURED.values())
    found = quantities_of({"quantities": [stored]})
    assert found["mine"] == quantity
    assert found.keys() - {"mine"} == MEASURED.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Sink mass"}, "name 'Sink mass': give lower-case"),
        ({"axes": ("layer", "width")}, "x: axis 'width': give one of layer, state"),
        ({"axes": ("layer",), "scalar": "middle"}, "x: scalar 'middle': give one of mean, max, sum, last"),
        ({"per_block": "some"}, "x: per_block 'some': give one of"),
        ({"scalar": "mean"}, "x: scalar 'mean' is made of an array: give axes"),
        ({"format": ".3q"}, "x: format '.3q': give a format specification, percent or ratio"),
        ({"definition": ""}, "x: give a definition"),
    ],
)  # fmt: skip
def test_an_impossible_declaration_says_what_is_wrong(fields, message):
    (problem,) = Quantity(**{"name": "x", "definition": "X."} | fields).problems()
    assert message in problem
    with pytest.raises(ValueError, match=message.split(":")[0]):
        Quantity.from_json({"name": "x", "definition": "X."} | fields)


@pytest.mark.parametrize("value", [3, {}, {"name": 4}, {"name": "x", "axes": 3, "definition": "X."}], ids=str)
def test_what_is_no_declaration_is_refused(value):
    with pytest.raises(ValueError, match="declares no quantity"):
        Quantity.from_json(value)


def test_declarations_load_no_framework():
    code = "import sys, birthmark.metrics.quantities; assert not {'torch', 'scipy', 'matplotlib'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
