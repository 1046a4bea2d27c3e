"""Reading configs: what stands in a file, what overrides it, and what is refused."""

import dataclasses
import re
import time

import pytest
import yaml

from birthmark.errors import UsageError
from birthmark.models.config import dotted, nested
from birthmark.trainer.config import RunConfig
from birthmark.trainer.config_file import build_config, config_of, read_config
from birthmark.trainer.config_parser import Parser, add_run_fields, field_kinds, field_value, listed_config


@pytest.fixture
def file(tmp_path):
    """A run's file with a few fields."""
    file = tmp_path / "small.yaml"
    file.write_text("model: {d_model: 32, n_heads: 2}\noptim: {lr: 1e-2}\ntrainer:\n  max_steps: 5\n")
    return file


def test_what_a_file_leaves_out_has_its_default(file):
    expected = RunConfig()
    expected = dataclasses.replace(
        expected,
        model=dataclasses.replace(expected.model, d_model=32, n_heads=2),
        optim=dataclasses.replace(expected.optim, lr=0.01),
        trainer=dataclasses.replace(expected.trainer, max_steps=5),
    )
    assert read_config(file) == expected
    assert read_config(str(file)) == expected
    assert build_config(dataclasses.asdict(expected)) == expected


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ({"trainer.max_steps": 7}, "trainer.max_steps", 7),
        ({"trainer": {"max_steps": 7}}, "trainer.max_steps", 7),
        ({"trainer.max_steps": "7"}, "trainer.max_steps", 7),
        ({"optim.lr": "1e-3"}, "optim.lr", 0.001),
        ({"optim.lr": 1}, "optim.lr", 1.0),
        ({"trainer.keep_last": 3}, "trainer.keep_last", 3),
        ({"trainer.keep_last": None}, "trainer.keep_last", None),
        ({"model.attention.window": 4}, "model.attention.window", 4),
        ({"snapshot.probes": ["random"]}, "snapshot.probes", ["random"]),
        ({"name": "7"}, "name", "7"),
        ({"init_seed": 9}, "init_seed", 9),
    ],
    ids=str,
)
def test_overrides_replace_fields_of_the_file_and_nothing_else(file, overrides, path, value):
    changed = read_config(file, overrides)
    found = changed
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)
    branch = expected = dataclasses.asdict(read_config(file))
    *groups, last = path.split(".")
    for group in groups:
        branch = branch[group]
    branch[last] = value
    assert dataclasses.asdict(changed) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer.max_stps": 3}, "trainer.max_stps: no such field; did you mean trainer.max_steps?"),
        ({"trainr.max_steps": 3}, "trainr.max_steps: no such field; did you mean trainer.max_steps?"),
        ({"frobnicate": 3}, "frobnicate: no such field; see birthmark pretrain --help"),
        ({"trainer": 3}, "trainer is 3; write fields as `name: value` under it"),
        ({"trainer.max_steps": None}, "trainer.max_steps is null: give a value, or leave it out"),
        ({"trainer.precision": None}, "trainer.precision is null: give a value, or leave it out"),
        ({"trainer.max_steps": 1.5}, "trainer.max_steps: 1.5 is not a whole number"),
        ({"trainer.precision": "fp16"}, "trainer.precision: 'fp16' is not one of 'auto', 'fp32', 'bf16', 'fp8'"),
        ({"model.d_model": 33}, "model.d_model 33 is not divisible by model.n_heads 2"),
        ({"model.d_model": {}}, "model.d_model: {} is not a whole number"),
        ({"model": {"attention": {"headnorm": {}}}}, "model.attention.headnorm: no such field"),
        ({"optimizer": {}}, "optimizer: no such field"),
        ({"model": {"n_heads": 4}, "model.n_heads": 8}, "model.n_heads stands twice, nested and with dots"),
        ({"data.schedule": [{"step": 1, "weights": [1]}]}, "data.schedule[0].weights: [1] is not a group, {NAME: NUM"),
    ],
    ids=str,
)
def test_a_wrong_override_is_refused_by_its_field_and_not_blamed_on_the_file(file, overrides, message):
    with pytest.raises(UsageError) as refused:
        read_config(file, overrides)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {sources: [{path: a, wieght: 1}]}", "data.sources[0].wieght: no such field; there are path, weight"),
        (
            "data: {sources: [{path: stdlib}, stdlib]}",
            "data.sources[1] is 'stdlib': write {path: …}, with any of weight",
        ),
        ("data: {sources: [{weight: 1}]}", "data.sources[0].path: missing; write {path: …}, with any of weight"),
        ("data: {schedule: [{step: 3}]}", "data.schedule[0].weights: missing; write {step: …, weights: …}"),
        ("data: {sources: {path: stdlib}}", "data.sources"),
        ("data: {sources: }", "data.sources is null: give a list, [] for none"),
        ("model: {d_modle: 8}", "model.d_modle: no such field; did you mean model.d_model?"),
        ("1: 2", "1: no such field"),
        ("modle: {d_model: 8}", "modle.d_model: no such field; did you mean model.d_model?"),
        ("trainer: {precision: fp16}", "trainer.precision: 'fp16' is not one of"),
        ("model: [1, 2]", "model is [1, 2]"),
        ("model:", "model is null; write fields as"),
        ("", "the file is null; write fields as"),
        ("[1]", "the file is [1]"),
        ("data.sources: [null]", "data.sources[0] is null: write {path: …}"),
        ("model: {d_model: 8", "not YAML"),
        ("data: {path: }", "data.path is null: give a value"),
        ("init_seed: one", "init_seed: 'one' is not a whole number"),
        ("optim: {lr: {}}", "optim.lr: {} is not a number"),
        ("optimizer: {}", "optimizer: no such field"),
        ("data: {sourcess: {}}", "data.sourcess: no such field; did you mean data.sources?"),
        ("model: {d_model: 32}\nmodel.d_model: 64", "model.d_model stands twice, nested and with dots: leave one out"),
        ("model.attention.gate: head\nmodel: {attention: {gate: head}}", "model.attention.gate stands twice"),
        ("model: 3\nmodel.d_model: 64", "model is 3; write fields as `name: value` under it"),
        (
            "data: {schedule: [{step: , weights: {a: 1}}]}",
            "data.schedule[0].step: missing; write {step: …, weights: …}",
        ),
        ("data: {sources: [{path: stdlib, weight: x}]}", "data.sources[0].weight: 'x' is not a number or null"),
        ("model: {d_model: 33, n_heads: 2}", "model.d_model 33 is not divisible"),
    ],
    ids=repr,
)
def test_a_wrong_file_is_refused_by_file_and_field(tmp_path, text, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    for overrides in ({}, {"trainer.max_steps": 3}):
        with pytest.raises(UsageError, match=re.escape(f"{file}: {message}")):
            read_config(file, overrides)


def test_the_command_line_refuses_the_same_in_a_file_and_names_the_place_in_an_option(tmp_path):
    """The parser of the command line reads files by itself, and names an entry's field without its list."""
    parser, file = Parser(), tmp_path / "wrong.yaml"
    add_run_fields(parser)
    for words, message in [
        ("optim: {lr: {}}", "optim.lr: {} is not a number"),
        ("optimizer: {}", "optimizer: no such field"),
        ("model: {d_model: 32}\nmodel.d_model: 64", "model.d_model stands twice"),
        ("data.sources: [{pth: a}]", "data.sources[0].path: missing"),
        (["--data.schedule", "[{step: 1, weights: [1]}]"], "data.schedule[0].weights: [1] is not a group, {NAME: NUM"),
        (["--data.sources+={path: a, weight: x}"], "data.sources+[0].weight: 'x' is not a number or null"),
        (["--data", "{sourcess: {}}"], "data.sourcess: no such field; did you mean data.sources?"),
        (["--data={sources: [{path: a, weight: x}]}"], "data.sources[0].weight: 'x' is not a number or null"),
        (["--data", "{schedule: [{step: 1, weights: [1]}]}"], "data.schedule[0].weights: [1] is not a group, {NAME: N"),
        (["--optim", "{lr: {}}"], "optim.lr: {} is not a number"),
        (["--model.attention={gatee: head}"], "model.attention.gatee: no such field"),
        (["--data="], "data is null; write fields as"),
    ]:
        if isinstance(words, str):
            file.write_text(words)
            words, message = ["--config", str(file)], f"--config {file}: {message}"
        with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
            parser.parse_args(words)


def test_a_group_is_an_option_too_as_yaml_or_in_a_file(tmp_path):
    parser, file = Parser(), tmp_path / "group.yaml"
    add_run_fields(parser)
    file.write_text("attention.window: 4\nattention: {gate: head}\n")
    expected = build_config({"model": {"attention": {"window": 4, "gate": "head"}}, "init_seed": 3})
    for words in (["--model", str(file)], [f"--model={file}"], [f"--model={file.read_text()}"]):
        assert config_of(parser.parse_args([*words, "--model.attention", "{}", "--init_seed=3"])) == expected


#: One group in two spellings, for which the parser's own reading of a file takes the later one alone.
SPELT_TWICE = [
    "trainer.max_steps: 5\ntrainer: {micro_batch_size: 8}",
    "trainer: {micro_batch_size: 8}\ntrainer.max_steps: 5",
    "model.attention.window: 4\nmodel: {d_model: 64}",
    "model: {attention: {window: 4}}\nmodel.attention: {gate: head}",
    "model.attention: {gate: head}\nmodel: {d_model: 64, attention.window: 4}",
]


def test_a_group_in_two_spellings_is_one_group_on_the_command_line_too(tmp_path):
    """A run of five steps trained a thousand: only `read_config` kept both."""
    parser, file = Parser(), tmp_path / "twice.yaml"
    add_run_fields(parser)
    for text in SPELT_TWICE:
        file.write_text(text)
        found = config_of(parser.parse_args(["--config", str(file), "--init_seed", "3"]))
        assert found == read_config(file, {"init_seed": 3}), text
        fields = yaml.safe_load(text)
        options = [word for name, value in fields.items() for word in (f"--{name}", yaml.safe_dump(value))]
        assert config_of(parser.parse_args([*options, "--init_seed=3"])) == found
        names = dotted(fields)
        assert {name: dotted(dataclasses.asdict(found))[name] for name in names} == names


def test_an_empty_group_changes_nothing(file):
    expected = read_config(file)
    for nothing in ({"model": {}}, {"model": {"attention": {}}}, {"model.attention": {}, "model": {}}):
        assert read_config(file, nothing) == expected
        assert build_config(nothing | dotted(dataclasses.asdict(expected))) == expected


def test_an_override_can_mend_a_file(tmp_path):
    file = tmp_path / "open.yaml"
    file.write_text("model: {d_model: 33, n_heads: 2}")
    assert read_config(file, {"model.n_heads": 3, "model.positions": "none"}).model.n_heads == 3


def test_no_file_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"no\.yaml: no such file"):
        read_config(tmp_path / "no.yaml")


@pytest.mark.heavy
def test_a_file_is_read_in_less_time_than_a_parser_is_built(tmp_path, tiny):
    """Reading thirty files took three and a half seconds when each built a parser of its own."""
    files = [tmp_path / f"{i}.yaml" for i in range(10)]
    for i, file in enumerate(files):
        file.write_text(yaml.safe_dump(dataclasses.asdict(tiny({"init_seed": i}))))
    read_config(files[0])

    def seconds(do):
        start = time.process_time()
        do()
        return time.process_time() - start

    reading = min(seconds(lambda file=file: read_config(file)) for file in files)
    assert reading < min(seconds(lambda: add_run_fields(Parser())) for _ in range(3))
    assert [read_config(file).init_seed for file in files] == list(range(10))


#: Texts that YAML takes for other texts, or for none; and values of every kind that a field may have.
TEXTS = ["a #b", " a", "a ", "&x a", "!a", "*a", "| a", "it's", "'3'"]
VALUES = [None, True, False, 0, 3, -1, 1.5, float("inf"), "", "3", "null", "true", "1e3", "~", "rope", "[1]", "head"]
VALUES += [[], [0], [1, 2], [1.5], [None], [None, 3], ["a"], ["3"], ["null"], [True], [[1]], {}, {"name": 1}, ["text"]]


def test_a_value_is_what_the_parser_of_the_command_line_makes_of_it():
    """Every kind of field, every value: jsonargparse refuses the same and gives the same, of the same type."""
    kinds = {str(kind): (name, kind) for name, kind in field_kinds(RunConfig).items() if listed_config(kind) is None}
    words = {word for kind in kinds for word in re.findall(r"'(\w+)'", kind)}
    parser = Parser(prog="birthmark pretrain")
    add_run_fields(parser)
    taken = set()
    for name, kind in kinds.values():
        for value in [*VALUES, *TEXTS, *words]:
            try:
                expected = dotted(parser.parse_object(nested({name: value}), defaults=False).as_dict())[name]
            except UsageError:
                with pytest.raises(UsageError, match=f"^{re.escape(name)}: .* is not "):
                    field_value(name, value, kind)
                continue
            # It takes null for every field, and looks for numbers in the texts of a list.
            if value is None or value in (["3"], ["null"]):
                continue
            assert repr(field_value(name, value, kind)) == repr(expected), name
            taken.add(name)
    assert len(taken) == len(kinds)
    path = field_kinds(RunConfig)["data.path"]
    assert [field_value("data.path", text, path) for text in TEXTS] == TEXTS
