"""One grammar for the words of every command: names by position or by option, fields, lists, dashes."""

import pytest

from birthmark.errors import UsageError
from birthmark.launch.command_line import named_arguments, normal_dashes
from birthmark.launch.command_table import COMMANDS, command_parser, parse_command

#: Words that each command needs beside its name of a config or a model.
NEEDS = {
    "plan": ["--n_gpus", "1"],
    "identify": ["--seeds", "0..1"],
    "intervene": ["--kind", "mask", "--layer", "1"],
    "length": ["--to", "2x"],
}
CONFIGS = ("doctor", "describe", "plan", "birth", "data", "tokenise")
MODELS = ("sample", "snapshot", "quantise", "identify", "intervene", "length", "compare", "fingerprint", "audit")
RUNS = ("report", "certify")


def parsed(command, *words):
    return parse_command(command, normal_dashes(words)).as_dict()


def plain(command, *words):
    """What the parser alone reads, with the arguments first: the spelling of the help."""
    return command_parser(command).parse_args(list(words)).as_dict()


@pytest.mark.parametrize("command", CONFIGS)
def test_a_config_may_stand_anywhere_or_behind_its_option(command):
    needs = NEEDS.get(command, [])
    expected = plain(command, "tiny_demo", *needs, "--set", "model.n_layers=2", "trainer.max_steps=3", "--json")
    sets = ["--set", "model.n_layers=2", "--set", "trainer.max_steps=3"]
    for words in (
        ["tiny_demo", *needs, *sets, "--json"],
        ["--config", "tiny_demo", *needs, *sets, "--json"],
        [*needs, "--json", "--config=tiny_demo", *sets],
        ["--json", *sets, "tiny_demo", *needs],
        ["--set=model.n_layers=2", *needs, "--json", "tiny_demo", "--set=trainer.max_steps=3"],
        ["--model.n-layers", "2", "tiny_demo", "--trainer.max_steps=3", *needs, "--json"],
    ):
        assert parsed(command, *words) == expected, words


@pytest.mark.parametrize("command", [*MODELS, *RUNS])
def test_a_model_may_stand_anywhere_or_behind_its_option(command):
    needs = NEEDS.get(command, [])
    expected = plain(command, "runs/x@2", *needs)
    for words in (
        [*needs, "runs/x@2"],
        *([f"--{name}", "runs/x@2", *needs] for name in ("run", "runs", "model", "models")),
        [*needs, "--run=runs/x@2"],
    ):
        assert parsed(command, *words) == expected, words


@pytest.mark.parametrize("command", ["compare", "fingerprint", "length", "report", "audit"])
def test_several_models_keep_their_order_however_they_are_given(command):
    needs = NEEDS.get(command, [])
    expected = plain(command, "a", "b", "c", *needs)
    option = "--out"
    for words in (["a", "--run", "b", "c"], ["--runs", "a", "b", "--model=c"], ["a", option, "x.html", "b", "c"]):
        found = parsed(command, *words, *needs)
        assert found == expected | ({"out": "x.html"} if option in words else {}), words


@pytest.mark.parametrize(
    ("command", "plainly", "spellings"),
    [
        ("export", ["x", "new", "--gguf"], [["--out", "new", "--gguf", "x"], ["--gguf", "--run", "x", "new"]]),
        ("verify", ["c.json", "x"], [["--run", "x", "c.json"], ["--checkpoint=x", "--certificate", "c.json"]]),
        (
            "figure",
            ["x", "loss", "--out", "l.png"],
            [["--out", "l.png", "--run", "x", "loss"], ["x", "--figure=loss", "--out=l.png"]],
        ),
        ("ablate", ["sinks", "--arms", "a"], [["--config", "sinks", "--arms", "a"], ["--arms=a", "--study", "sinks"]]),
        (
            "ablate",
            ["sinks", "--sbatch", "gpus=1", "time=2:00", "--set", "a=1", "b=2"],
            [["--set", "a=1", "--sbatch", "gpus=1", "--set", "b=2", "--sbatch=time=2:00", "sinks"]],
        ),
        ("snapshot", ["x", "--data", "a", "b"], [["--data", "a", "--run", "x", "--data", "b"]]),
        ("identify", ["x", "--seeds", "1", "--config", "demo"], [["--config=demo", "x", "--seeds=1"]]),
        ("sample", ["x", "--prompt", "-- a b", "--seed", "-1"], [["--seed=-1", "--prompt=-- a b", "x"]]),
        ("sample", ["--", "-x"], [["--", "-x"]]),
    ],
)  # fmt: skip
def test_arguments_of_two_kinds_find_their_places(command, plainly, spellings):
    for words in spellings:
        found, expected = parsed(command, *words), plain(command, *plainly)
        if command == "ablate":
            found["set"], expected["set"] = set(found["set"]), set(expected["set"])
        assert found == expected, words


def test_a_run_is_trained_by_the_name_of_its_config_and_fields_win_wherever_they_stand():
    expected = plain("pretrain", "--config=tiny_demo", "--trainer.max_steps=3", "--data.data_seed=4")
    for words in (
        ["tiny_demo", "--trainer.max_steps", "3", "--data.data-seed=4"],
        ["--trainer.max-steps=3", "--config", "tiny_demo", "--set", "data.data_seed=4"],
        ["--set", "trainer.max-steps=3", "--set", "data.data_seed=4", "tiny_demo"],
    ):
        found = parsed("pretrain", *words)
        assert found == expected, words
        assert found["trainer"]["max_steps"] == 3
    assert parsed("adapt", "--adapter.kind", "lora", "x", "--optim.lr=1")["init_from"] == "x"
    assert parsed("adapt", "--run=x", "--optim.lr=1")["init_from"] == "x"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_never_suggests_itself(command):
    parser = command_parser(command)
    options = {*parser._option_string_actions, *named_arguments(parser)}
    words = {action.dest for action in parser._actions} | {"config", "run", "model", "set", "frobnicate"}
    for name in words - {"help"}:
        if f"--{name}" in options or parser.passes_on or (parser.bare and name == "set"):
            continue
        with pytest.raises(UsageError) as error:
            parse_command(command, [f"--{name}", "x"])
        assert f"{name}: no such" in str(error.value)
        assert f"did you mean --{name}?" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("doctor demo tiny_demo", "tiny_demo: one name too many; see birthmark doctor --help"),
        ("doctor demo --config tiny_demo", "demo: one name too many; see birthmark doctor --help"),
        ("demo x", "x: one name too many; see birthmark demo --help"),
        ("adapt x y --adapter.kind=lora", "y: one name too many; see birthmark adapt --help"),
        ("export --out new", "model: missing; see birthmark export --help"),
        ("sample --run", "--run: give a value"),
        ("doctor -n 3", "--n: no such option; see birthmark doctor --help"),
        ("doctor --confg demo", "--confg: no such option; did you mean --config?"),
        ("plan demo --n_gpus=1 --trainer.max_step=4", "--trainer.max_step: no such field; did you mean trainer."),
        ("describe demo --model.attention {}", "--model.attention: a group; give --model.attention.FIELD VALUE"),
        ("pretrain demo --set trainer.max_steps", "--set trainer.max_steps: write FIELD=VALUE, as in"),
        ("pretrain --resume runs/x demo", "--resume takes the config of the run itself: leave --config out"),
        ("pretrain dmo", "dmo: no such file, nor a config that comes with the package; did you mean demo?"),
    ],
)
def test_words_that_mean_nothing_are_one_line(words, line):
    command, *rest = words.split()
    with pytest.raises(UsageError) as error:
        parse_command(command, rest)
    assert str(error.value).startswith(line)
