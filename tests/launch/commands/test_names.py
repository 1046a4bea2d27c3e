"""All kinds of names in all commands: each works, or is refused in one line that says why this kind cannot serve."""

import json
import shutil

import pytest

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.models.birth import born, certificate_of, digest
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.gguf_file import write_gguf
from birthmark.models.exchange.pretrained import write_pretrained
from birthmark.trainer.by_name.model_names import SourceWithBirth, open_any_source
from birthmark.trainer.checkpoints.folder_io import load_model
from birthmark.trainer.config_file import read_config
from birthmark.trainer.saved_config import write_config

#: Of every kind of name, an example in the folder of `place`.
NAMES = {
    "run": "x",
    "step": "x@2",
    "start": "x@0",
    "checkpoint": "x/checkpoints/step-00000002",
    "birth": "tiny.yaml@5",
    "folder": "hf",
    "gguf": "m.gguf",
    "hub": "nobody/nothing@main",
    "snapshot": "measured",
}
_THEIRS = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=24, max_seq_len=12, mlp="swiglu")


@pytest.fixture(scope="module")
def place(run_of_two_checkpoints, tmp_path_factory):
    """A folder with a model of each kind; the run has a snapshot of step 2 and a certificate."""
    folder = tmp_path_factory.mktemp("names")
    run = RunDir(shutil.copytree(run_of_two_checkpoints.path, folder / "x"))
    shutil.copy(run.config, folder / "tiny.yaml")
    weights = born(_THEIRS, 0).state_dict()
    write_pretrained(_THEIRS, weights, folder / "hf")
    write_gguf(_THEIRS, weights, folder / "m.gguf")
    probe = ["--n_sequences=4", "--seq_len=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(["snapshot", "x@2", *probe, "--out", str(run.snapshot(2))]) == 0
        assert main(["snapshot", "x", *probe, "--out", "measured"]) == 0
        assert main(["certify", "--run", "x"]) == 0
    return folder


@pytest.fixture
def said(place, monkeypatch, capsys):
    """``said("audit x@2")``: status, standard output and standard error of a command in the folder."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))

    def run(line):
        capsys.readouterr()
        status = main(line.split())
        return (status, *capsys.readouterr())

    return run


def of_whole_runs(why):
    """Lines of a command that takes runs alone, by the kind of another name."""
    of_a_run = dict.fromkeys(("step", "checkpoint"), "is the checkpoint of step 2") | {"start": "is the birth"}
    others = {"birth": "a birth of a config", "folder": "a folder of transformers", "gguf": "a GGUF model"}
    others["snapshot"] = "a snapshot, without weights"
    lines = {kind: f"{what} of a run; {why}: give x" for kind, what in of_a_run.items()}
    return lines | {kind: f"is {what}; {why}: give" for kind, what in others.items()} | {"hub": "not a run"}


NOT_FROM_THE_HUB = "no such folder, and not from the hub either"
NO_WEIGHTS = "is a snapshot, without weights; birthmark report reads it, and a model is needed"
OF_A_PAGE = of_whole_runs("a page shows what was measured in a run")
#: A command, with ``{}`` for the name → the kinds that it refuses, and what its line says; it serves all others.
REFUSED = {
    "sample {} --prompt a": {
        **dict.fromkeys(NAMES, "has no tokenizer to read a"),
        "hub": NOT_FROM_THE_HUB,
        "snapshot": NO_WEIGHTS,
    },
    "report {} --json": {
        **{kind: OF_A_PAGE[kind] for kind in ("birth", "folder", "gguf", "hub")},
        "start": "x has no snapshot of that step; there are: 2",
    },
    "figure {} loss --out new/loss.svg": of_whole_runs("a figure shows a whole run"),
    "certify {} --out new/certificate.json": of_whole_runs("a certificate lists all checkpoints of a run"),
    "export {} new/export": {
        "folder": "is a folder of transformers, the form that an export writes; there is nothing to convert",
        "hub": "nor a GGUF file; a model of the hub has the form that an export writes already",
        "snapshot": NO_WEIGHTS,
    },
    "verify x {}": {"hub": NOT_FROM_THE_HUB, "snapshot": "is a snapshot, without weights"},
    "audit {} tiny.yaml@3": {"snapshot": "is a snapshot, without weights; give checkpoints"},
    "describe {}": {"hub": NOT_FROM_THE_HUB, "snapshot": "is a folder without a run in it; give a YAML file"},
    "birth {}": {
        **dict.fromkeys(("step", "checkpoint"), "is the checkpoint of step 2 of a run; a birth is drawn from a config"),
        "folder": "is a folder of transformers; a birth is drawn from a config: give CONFIG@SEED, a run or RUN@0",
        "gguf": "is a GGUF model; a birth is drawn",
        "hub": "no such file, nor a config that comes with the package",
        "snapshot": "is a snapshot, without weights; a birth is drawn",
    },
    "data --config {}": {
        **dict.fromkeys(("step", "start"), "is a checkpoint, and a config is needed; give x for that of its run"),
        **dict.fromkeys(("checkpoint", "folder", "snapshot"), "is a folder without a run in it; give a YAML file"),
        "birth": "is a birth, and a config is needed; give tiny.yaml, and init_seed 5 beside it",
        "gguf": "is a GGUF model, and a config is needed; give a YAML file",
        "hub": "no such file, nor a config that comes with the package",
    },
    "adapt {} --adapter.kind=lora --data.path=backcopy --model.max_seq_len=12 --snapshot.enabled=false --run_dir=x": {
        **dict.fromkeys(("start", "birth"), "is a birth, where nothing is to be adapted; give a trained model, or"),
        "hub": NOT_FROM_THE_HUB,
        "snapshot": "neither a run, RUN@STEP, a checkpoint nor a folder of transformers",
        # The next fault that is seen: the model was found.
        **dict.fromkeys(("run", "step", "checkpoint", "folder", "gguf"), "--run_dir x: already in use"),
    },
    "pretrain --resume {}": of_whole_runs("a run goes on from its last checkpoint, and --init_from begins a new one"),
}
#: Served, but by a run of its own below, or with an answer that is not 0.
_NOT_HERE = {("pretrain --resume {}", "run")}
_STATUS = {"verify x {}": (0, 3), "audit {} tiny.yaml@3": (0, 3)}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("command", REFUSED)
def test_a_kind_of_name_serves_a_command_or_the_line_says_why_not(command, kind, said, place):
    if (command, kind) in _NOT_HERE:
        return
    (place / "new").mkdir()
    try:
        status, out, err = said(command.format(NAMES[kind]))
    finally:
        shutil.rmtree(place / "new")
    if (line := REFUSED[command].get(kind)) is None:
        assert status in _STATUS.get(command, (0,)), err
        assert out
    else:
        assert (status, out) == (2, ""), out
        (error,) = [one for one in err.splitlines() if one.startswith("birthmark: error: ")]
        assert line in error


@pytest.mark.parametrize("kind", NAMES)
def test_python_and_all_commands_that_take_a_model_open_it_by_one_resolver(kind, said, place):
    """They differ in what they do with it; the names below are those that each of them gives to this function."""
    del said  # its folder
    if kind in ("hub", "snapshot"):
        with pytest.raises(UsageError, match=r"not from the hub either|is a snapshot, without weights"):
            open_any_source(NAMES[kind])
        return
    source = open_any_source(NAMES[kind])
    run = RunDir(place / "x")
    if kind in ("folder", "gguf"):
        expected = born(_THEIRS, 0)
    elif kind in ("start", "birth"):
        expected = born(read_config(run.config).model, 3 if kind == "start" else 5)
    else:
        expected = load_model(read_config(run.config).model, run.checkpoint(4 if kind == "run" else 2))
    assert digest(source.load()) == digest(expected)
    assert isinstance(source, SourceWithBirth) == (kind not in ("folder", "gguf"))


# ---------------------------------------------------------------- what was refused before, from end to end


def test_a_suite_is_named_by_steps_and_births(said):
    status, out, _ = said("audit x@2,4 x@0 --json")
    assert status == 0
    status, out, _ = said("audit x@0 tiny.yaml@3,4 x@4 --json")
    # Seed 3 is the run's own, and has its birth's weights; 4 is another.
    found = {one["name"]: [finding["kind"] for finding in one["findings"]] for one in json.loads(out)["checkpoints"]}
    assert status == 3
    assert found == {"x@0": [], "tiny.yaml@3": [], "tiny.yaml@4": ["stranger"], "x@4": []}


def test_a_page_of_a_step_is_that_of_its_snapshot(said):
    by_step = json.loads(said("report x --step 2 --json")[1])
    for name in ("x@2", "x/checkpoints/step-00000002", "--run=x@2"):
        assert json.loads(said(f"report {name} --json")[1]) == by_step
    assert said("report x@4 --json")[2].endswith("x@4: x has no snapshot of that step; there are: 2\n")
    assert "x@2: a snapshot has a page of its own" in said("report x@2 x")[2]


def test_a_certificate_is_found_in_its_run(said, run_of_two_checkpoints):
    run = run_of_two_checkpoints.path
    assert f"{run}: a run without a certificate; birthmark certify {run} writes it" in said(f"verify {run} x")[2]
    assert said("verify x x@2")[1].startswith("x@2: verified: the certificate lists it, as step 2")
    assert said("verify --certificate x/certificate.json --run x@4")[0] == 0
    assert said("verify x tiny.yaml@5")[0] == 3


@pytest.mark.parametrize(("name", "seed"), [("tiny.yaml@5", 5), ("x@0", 3)])
def test_a_run_that_starts_from_a_birth_is_born_so(name, seed, said, place, no_page):
    fields = "--data.path=backcopy --trainer.max_steps=1 --snapshot.enabled=false --log.wandb=off --trainer.device=cpu"
    sizes = (
        "--model.max_seq_len=12 --trainer.micro_batch_size=2 --trainer.global_batch_size=2 --trainer.val_sequences=2"
    )
    with no_page():
        status, _, err = said(f"pretrain --init_from {name} --run_dir born {fields} {sizes}")
    try:
        assert status == 0, err
        birth, config = RunDir(place / "born").read_birth(), read_config(place / "born/config.yaml")
    finally:
        shutil.rmtree(place / "born")
    model = read_config(place / "tiny.yaml").model
    assert birth["digest"] == certificate_of(model, seed)["digest"]
    assert (config.model, config.init_seed, config.init_from, birth["init_from"]) == (model, seed, "", None)
    assert config.optim.lr == type(config.optim)().lr


def test_a_start_from_a_birth_refuses_what_contradicts_it(said):
    fit = "--model.max_seq_len=12 --snapshot.enabled=false"
    for more, line in {
        "--init_seed=9": "init_seed is 9, but --init_from tiny.yaml@5 is the birth of seed 5: leave one out",
        "--model.d_model=8": "model.d_model is 8, but --init_from tiny.yaml@5 has 16: leave it out",
        "--model.init.kind=gpt2": "model.init.kind is gpt2, but --init_from tiny.yaml@5 has",
    }.items():
        status, _, err = said(f"pretrain --init_from tiny.yaml@5 --data.path=backcopy {fit} {more}")
        assert (status, err.count("\n")) == (2, 1)
        assert line in err


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_start_from_a_model_is_no_birth(adapter, said, place):
    run = RunDir(place / f"begun-{adapter}")
    run.path.mkdir()
    shutil.copy(place / "x" / "birth.json", run.path)
    options = {"init_from": "x@2", "adapter.kind": adapter}
    write_config(read_config(place / "x" / "config.yaml", options), run.config)
    for name in (
        run.path.name,
        f"{run.path.name}@0",
        f"{run.path.name}/config.yaml@3",
        "tiny.yaml --set init_from=x@2",
    ):
        status, out, err = said(f"birth {name} --json --out new")
        assert (status, out) == (2, ""), (name, err)
        assert f"{name.split()[0]}: begins from x@2, and has no birth of its own; give CONFIG@SEED, or a run" in err
        assert not (place / "new").exists()


def test_a_birth_and_a_description_take_a_seed_and_fields(said):
    digests = {name: json.loads(said(f"birth {name} --json")[1])["digest"] for name in ("x", "x@0", "tiny.yaml@3")}
    assert len(set(digests.values())) == 1
    assert said("birth tiny.yaml@5 --json")[1] == said("birth --config tiny.yaml --seed 5 --json")[1]
    assert "--seed 4: the name gives seed 5; leave one of them out" in said("birth tiny.yaml@5 --seed 4")[2]
    assert said("describe x@2 --json")[1] == said("describe tiny.yaml --json")[1]
    smaller = json.loads(said("describe tiny.yaml --set model.n_layers=1 --json")[1])
    assert smaller == json.loads(said("describe --config tiny.yaml --model.n-layers 1 --json")[1])
    assert smaller["n_params"] < json.loads(said("describe tiny.yaml --json")[1])["n_params"]
    assert "--set model.n_layers=1: hf is a model with weights" in said("describe hf --set model.n_layers=1")[2]
