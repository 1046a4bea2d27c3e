"""A study of lineage: its file, what is refused, and a small one from births to tables and pictures."""

import csv
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from scipy import stats

from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.files import read_json
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.metrics.seedprint import Fingerprint
from birthmark.models.birth import born, digest
from birthmark.study.lineage.results import PairResult, count_verdicts, markdown
from birthmark.study.lineage.trials import StudyModel, lineage_trials, model_pairs, read_lineage_study, study_models
from birthmark.study.table import KINDS, kind_of
from birthmark.trainer.config_file import read_config
from birthmark.trainer.saved_config import write_config

STUDY = {
    "kind": "lineage",
    "base": "base.yaml",
    "init_seeds": [7, 8],
    "test": {"n_inputs": 200, "k": 0.5},
    "tests": {
        "dimensions": {},
        "published": {"null": "analytic"},
        "aggregated": {"null": "analytic", "aggregate": True},
        "narrow": {"null": "analytic", "k": 3},
        "embedding": {"probe": "embedding"},
    },
}


def continued(folder):
    """Continued runs, on the text in ``folder``."""
    return {"other": {"data.path": str(folder / "other.txt"), "trainer.max_steps": 10}}


@pytest.fixture
def write(tmp_path, lineage_base):
    """``write(changes=None, **fields)``: a study in the test's own folder, and its base; None takes a field away."""

    def build(changes=None, **fields):
        lineage_base(tmp_path, changes)
        fields = {"continue": continued(tmp_path)} | fields
        study = {name: value for name, value in (STUDY | fields).items() if value is not None}
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        return tmp_path / "study.yaml"

    return build


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD = {
    "no base": ({"base": None}, "base is missing"),
    "a misspelt field": ({"contine": {}}, "contine: no such field; did you mean continue?"),
    "arms": ({"arms": {}}, "arms: no such field; known are"),
    "one seed": ({"init_seeds": [1]}, "init_seeds is [1]: give at least two: strangers are the control"),
    "steps that are none": ({"steps": [10, 0]}, "steps is [10, 0]: give a list of different steps"),
    "a step twice": ({"steps": [10, 10]}, "steps is [10, 10]"),
    "continuations that have no names": ({"continue": {"data.path": "x"}}, "continue.data.path is 'x': write fields"),
    "a continuation called base": ({"continue": {"base": {}}}, "a name in continue is 'base'"),
    "a continuation that says where from": (
        {"continue": {"other": {"init_from": "x"}}},
        "continue.other.init_from is 'x': the study sets it",
    ),
    "a seed in a continuation": ({"continue": {"o": {"init_seed": 1}}}, "continue.o.init_seed is 1: the study sets"),
    "no tests": ({"tests": {}}, "tests is {}: name at least one"),
    "a test that is no group": ({"tests": {"a": 3}}, "tests.a is 3: write fields"),
    "a misspelt option": ({"tests": {"a": {"prob": 1}}}, "tests.a.prob: no such field; did you mean tests.a.probe?"),
    "a misspelt option of all": ({"test": {"n_input": 3}}, "test.n_input: no such field; did you mean test.n_inputs?"),
    "a null that there is not": (
        {"tests": {"a": {"null": "x"}}},
        "tests.a: null: 'x' is not one of 'dimensions', 'dimensions_sampled', 'matched', 'analytic'",
    ),
    "a value of another type": ({"tests": {"a": {"n_inputs": "x"}}}, "tests.a: n_inputs: 'x' is not a whole number"),
    "no value": ({"test": {"n_inputs": None}}, "tests.dimensions: n_inputs is null: give a value"),
    "an impossible recipe": ({"tests": {"a": {"aggregate": True}}}, "tests.a: aggregate is true: the null dimensions"),
    "a scale's field": ({"scales": {"big": {"kind": "lineage"}}}, "scales.big.kind: no such field"),
    "a scale's base": ({"scales": {"big": {"base": "x.yaml"}}}, "scales.big.base is 'x.yaml': no file"),
    "a scale's test": ({"scales": {"big": {"tests": {"a": {"l": 1}}}}}, "scales.big.tests.a.l: no such field"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_study_names_file_and_field(case, write):
    fields, expected = BAD[case]
    file = write(**fields)
    with pytest.raises(UsageError) as error:
        read_lineage_study(file)
    assert str(error.value).startswith(f"{file}: {expected}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("base", "fields", "expected"),
    [
        ({}, {"steps": [15]}, "steps has 15: base.yaml has checkpoints every 10 steps up to 20"),
        ({}, {"steps": [30]}, "steps has 30"),
        ({"init_from": "gpt2"}, {}, "init_from is 'gpt2': a study of lineage begins with births"),
        ({}, {"test": {"seq_len": 17}}, "tests.dimensions: --seq_len 17: give 1 to 16"),
        ({}, {"test": {"n_inputs": 3}}, "tests.dimensions: --n_inputs 3: give 10 to 1048576"),
        ({}, {"continue": {"o": {"trainer.max_steeps": 3}}}, "continue.o: trainer.max_steeps: no such field; did you"),
        ({}, {"continue": {"o": {"trainer.max_steps": "x"}}}, "continue.o: trainer.max_steps: 'x' is not a whole"),
    ],
)
def test_an_impossible_study_is_refused_before_any_run(base, fields, expected, write, tmp_path, capsys):
    file = write(base, **fields)
    assert main(["ablate", str(file), f"--out={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_a_file_names_the_kind_of_its_study(write, tmp_path, capsys):
    assert kind_of(write()) is KINDS["lineage"]
    assert kind_of(write(kind=None)) is KINDS["arms"]
    for wrong, hint in (("lineages", "did you mean lineage?"), ([3], "give arms, lineage or module:KIND")):
        assert main(["ablate", str(write(kind=wrong))]) == 2
        assert f"kind is {wrong!r}: no such kind; {hint}" in capsys.readouterr().err
    for wrong, why in (("math:pi", "is 3.14159"), ("math:tau2", "cannot be imported"), ("nothing:KIND", "cannot be")):
        assert main(["ablate", str(write(kind=wrong))]) == 2
        assert f"kind {wrong} {why}" in capsys.readouterr().err.replace(": cannot", " cannot")
    assert main(["ablate", "robustness"]) == 2
    assert "in the repository it is research/robustness/study.yaml" in capsys.readouterr().err
    assert main(["ablate", str(write()), "--arms=plain"]) == 2
    assert "--arms plain: a study of lineage has none" in capsys.readouterr().err


def test_tests_are_the_options_of_the_fingerprint_command(write, tmp_path):
    file = write(scales={"big": {"init_seeds": [1, 2, 3], "test": {"n_inputs": 500, "seq_len": 8}}})
    # YAML reads the bare word null as nothing, also where it is a name.
    file.write_text(file.read_text().replace("'null': analytic", "null: analytic"))
    study = lineage_trials(read_lineage_study(file), tmp_path / "out").study
    assert [test.probe.kind for test in study.tests.values()] == ["token"] * 4 + ["embedding"]
    assert {(test.probe.n_inputs, test.probe.seq_len) for test in study.tests.values()} == {(200, 16)}
    assert [test.recipe.null for test in study.tests.values()].count("analytic") == 3
    assert study.tests["published"].recipe.k == 0.5
    assert study.tests["narrow"].recipe.k == 3
    big = lineage_trials(read_lineage_study(file).at("big"), tmp_path / "out").study
    assert (big.name, big.init_seeds) == ("study-big", (1, 2, 3))
    assert {(test.probe.n_inputs, test.probe.seq_len, test.recipe.k) for test in big.tests.values()} >= {(500, 8, 0.1)}
    with pytest.raises(UsageError, match=r"--scale huge: .* has big"):
        read_lineage_study(file).at("huge")


# ── pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_table_has_its_pairs_and_no_pair_twice():
    run = RunDir(Path("run"))
    models = [StudyModel(seed, 0, "", run) for seed in (1, 2, 3)]
    models += [StudyModel(seed, step, "", run) for seed in (1, 2, 3) for step in (10, 20)]
    models += [StudyModel(seed, 5, name, run, 20) for seed in (1, 2, 3) for name in ("code", "prose")]
    found = model_pairs(models)
    assert len(found) == len(set(found))
    counts = [sum(table == i for table, *_ in found) for i in range(4)]
    # 3 births; 3 births × 6 checkpoints; 3 ends; 6 continued ones against 3 births and 3 ends, and among themselves.
    assert counts == [3, 18, 3, 36 + 15]
    kin = [sum(table == i and a.seed == b.seed for table, a, b in found) for i in range(4)]
    assert kin == [0, 6, 0, 12 + 3]
    assert all({a.step, b.step} == {20} for table, a, b in found if table == 2)
    # A run that is behind the others: the ends are where all have been.
    behind = [model for model in models if (model.seed, model.step) != (3, 20)]
    assert all({a.step, b.step} == {10} for table, a, b in model_pairs(behind) if table == 2)
    # What continues is compared with what it began from all the same.
    assert {a.step for table, a, _ in model_pairs(behind) if table == 3 and not a.continuation} == {0, 20}
    assert model_pairs([]) == []


# ── a small study, run ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def ready(tmp_path_factory, lineage_base, no_page):
    """The folder of a study; all of its runs but one are there before the command begins."""
    folder = tmp_path_factory.mktemp("lineage")
    lineage_base(folder)
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY | {"continue": continued(folder)}, sort_keys=False))
    trials = lineage_trials(read_lineage_study(folder / "study.yaml"), folder / "out")
    for trial in [*trials.bases, trials.continued[0]]:
        write_config(trial.config, folder / "trial.yaml")
        with no_page():
            assert main(["pretrain", f"--config={folder / 'trial.yaml'}"]) == 0
    return folder


@pytest.fixture(scope="module")
def rows(ready, python):
    """The study's table.csv, after the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", python)
        assert main(["ablate", str(ready / "study.yaml"), f"--out={ready / 'out'}"]) == 0
    return list(csv.DictReader((ready / "out" / "table.csv").open()))


def of(rows, test, **fields):
    return [row for row in rows if row["test"] == test and all(row[name] == value for name, value in fields.items())]


def test_continued_runs_start_where_their_base_ended_with_its_tokenizer(ready, rows):
    for seed in ("7", "8"):
        base, run = (RunDir(ready / "out" / name / f"seed-{seed}") for name in ("base", "other"))
        record = read_json(run.birth)
        assert record["init_from"] == f"{base.path}@20"
        assert record["data"]["path"] == str(ready / "other.txt")
        assert run.tokenizer.read_bytes() == base.tokenizer.read_bytes()
        assert run.checkpoint(10).is_dir()
        assert digest(born(read_config(base.config).model, int(seed))) == read_json(base.birth)["digest"]
    log = (ready / "out" / "other" / "seed-8.log").read_text()
    assert "step     10" in log
    assert not (ready / "out" / "other" / "seed-7.log").exists()  # it was there


def test_kin_are_kin_and_strangers_are_strangers(rows):
    for test in ("dimensions", "published", "aggregated"):
        assert len(of(rows, test)) == 1 + 8 + 1 + 9
        assert all(row["verdict"] == row["in_truth"] for row in of(rows, test))
    kin = of(rows, "dimensions", in_truth="kin")
    assert len(kin) == 4 + 4
    assert min(float(row["z"]) for row in kin) > 10
    assert {row["null"] for row in of(rows, "published")} == {"analytic"}
    # 3 of 32 dimensions hardly meet: no test, which is neither.
    lost = of(rows, "narrow", verdict="undefined")
    assert lost
    assert {row["z"] for row in lost} == {""}
    assert all("identity dimensions in common (of 3)" in row["reason"] for row in lost)


def test_a_statistic_is_scipys_on_the_hidden_states_of_transformers(ready, rows, tmp_path):
    tokens = torch.from_numpy(random_probe(300, 200, 16, 0))
    hidden = []
    for seed in (7, 8):
        assert main(["export", str(ready / "out" / "base" / f"seed-{seed}"), str(tmp_path / str(seed))]) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed))
        with torch.no_grad():
            hidden.append(model(tokens, output_hidden_states=True).hidden_states[-1][:, -1].numpy())
    (row,) = of(rows, "dimensions", table="3")
    expected = np.mean([stats.spearmanr(*columns).statistic for columns in zip(*(x.T for x in hidden), strict=True)])
    assert float(row["statistic"]) == pytest.approx(expected, abs=1e-5)
    assert (row["a"], row["b"], row["in_truth"]) == ("7@20", "8@20", "stranger")


def test_tables_are_for_people_too(ready, rows):
    text = (ready / "out" / "table.md").read_text()
    for title in ("## 200 sequences of 16 random tokens", "## 200 sequences of 16 Gaussian vectors", "### 3. Trained"):
        assert text.count(title) == (2 if title.startswith("###") else 1)
    (row,) = of(rows, "dimensions", a="birth 7", b="7 other@10")
    assert f"| birth 7 | 7 other@10 | kin | {float(row['statistic']):.4f} | {float(row['z']):.2f} |" in text
    assert "| 2. Birth and trained model | stranger | 4 | 0 of 4 kin, z " in text
    assert "null analytic: takes columns for independent" in text
    assert "narrow, undefined: " in text
    wrong = of(rows, "embedding", in_truth="stranger", verdict="kin")
    assert text.count("**kin**") == len(wrong) + len(of(rows, "narrow", in_truth="stranger", verdict="kin"))


def test_the_page_says_how_often_each_test_is_right(ready, rows, open_page):
    tab = open_page(ready / "out" / "index.html")
    text = tab.text("body")
    for test in ("dimensions", "published", "aggregated"):
        kin, strangers = (of(rows, test, in_truth=truth) for truth in ("kin", "stranger"))
        called = [sum(row["verdict"] == "kin" for row in found) for found in (kin, strangers)]
        of_one, of_two = (f"{n} of {len(found)} pairs" for n, found in zip(called, (kin, strangers), strict=True))
        assert f"The test {test} calls kin {of_one} of one birth, and {of_two} of two births." in text
    cells = tab.run("[...document.querySelectorAll('#panel-kinship td')].map(e => e.textContent).filter(Boolean)")
    births = {row["z"] for row in of(rows, "dimensions", a="birth 7", b="birth 8")}
    assert {f"{float(z):.1f}" for z in births} <= set(cells)


def test_pictures_are_drawn_and_a_second_time_nothing_is_run(ready, rows, capsys, monkeypatch):
    files = ("figure.png", "figure.svg", "matrix.png", "matrix.svg", "table.csv", "table.md")
    before = {file: (ready / "out" / file).read_bytes() for file in files}
    assert before["figure.png"].startswith(b"\x89PNG")
    assert b"8 other@10" in before["matrix.svg"]
    assert b"published" in before["figure.svg"]
    assert b"end of the base" in before["figure.svg"]
    monkeypatch.setattr("birthmark.measure.hidden_states.hidden_states", lambda *a, **k: pytest.fail("ran again"))
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("ran again"))
    assert main(["ablate", str(ready / "study.yaml"), f"--out={ready / 'out'}"]) == 0
    assert {file: (ready / "out" / file).read_bytes() for file in files} == before
    assert "4 of 4 kin" in capsys.readouterr().out


def test_a_run_of_another_config_stands_in_the_way(ready, rows, capsys):
    command = ["ablate", str(ready / "study.yaml"), f"--out={ready / 'out'}", "--set", "optim.lr=0.5"]
    assert main(command) == 2
    assert "a run of another config (optim.lr 0.001 there, 0.5 here)" in capsys.readouterr().err
    text = (ready / "study.yaml").read_text()
    (ready / "faster.yaml").write_text(text.replace("max_steps: 10", "max_steps: 10\n    optim.lr: 0.5"))
    assert main(["ablate", str(ready / "faster.yaml"), f"--out={ready / 'out'}"]) == 2
    assert "other/seed-7: a run of another config (optim.lr 0.001 there, 0.5 here)" in capsys.readouterr().err


def test_an_unfinished_study_is_summarised(ready, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("birthmark.study.lineage.run.draw_lineage", lambda study, results, out: [])
    summary = ["ablate", str(ready / "study.yaml"), f"--out={tmp_path / 'out'}", "--summary"]
    assert main(summary) == 2
    assert "no run of" in capsys.readouterr().err
    shutil.copytree(ready / "out" / "base", tmp_path / "out" / "base")
    assert main(summary) == 0
    partial_rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert {row["table"] for row in partial_rows} == {"1", "2", "3"}
    assert partial_rows == [row for row in rows if row["table"] != "4"]
    # The same runs from another base: the study's folder says what was changed in it.
    for file in ("base.yaml", "study.yaml"):
        text = (ready / file).read_text()
        (tmp_path / file).write_text(text.replace("log_every: 10", "log_every: 5"))
    (tmp_path / "out" / "overrides.yaml").write_text("trainer.log_every: '10'\n")
    assert main(["ablate", str(tmp_path / "study.yaml"), *summary[2:]]) == 0
    assert list(csv.DictReader((tmp_path / "out" / "table.csv").open())) == partial_rows
    # One run alone can be compared with its own birth only.
    shutil.rmtree(tmp_path / "out" / "base" / "seed-8")
    assert main(summary) == 0
    assert {row["in_truth"] for row in csv.DictReader((tmp_path / "out" / "table.csv").open())} == {"kin"}


def test_the_base_that_runs_continue_from_is_compared_whatever_the_steps(ready, rows, tmp_path):
    study = yaml.safe_load((ready / "study.yaml").read_text())
    file = ready / "early.yaml"
    file.write_text(yaml.safe_dump(study | {"steps": [10]}))
    models = study_models(lineage_trials(read_lineage_study(file), ready / "out"))
    assert {(model.step, model.age) for model in models if not model.continuation} == {(0, 0), (10, 10), (20, 20)}
    assert {(model.step, model.age) for model in models if model.continuation} == {(10, 30)}
    of_base = {(table, a.step) for table, a, b in model_pairs(models) if table > 1 and not a.continuation}
    assert of_base == {(2, 20), (3, 0), (3, 20)}
    # Without runs that continue, the steps are those of the file.
    file.write_text(yaml.safe_dump(study | {"steps": [10], "continue": {}}))
    assert {model.step for model in study_models(lineage_trials(read_lineage_study(file), ready / "out"))} == {0, 10}


def test_only_the_steps_of_the_file_are_compared(ready, rows, tmp_path):
    study = yaml.safe_load((ready / "study.yaml").read_text())
    file = ready / "late.yaml"
    file.write_text(yaml.safe_dump(study | {"steps": [20]}))
    trials = lineage_trials(read_lineage_study(file), ready / "out")
    assert {model.step for model in study_models(trials) if not model.continuation} == {0, 20}
    shutil.copytree(ready / "out" / "base", tmp_path / "base")
    shutil.rmtree(tmp_path / "base" / "seed-8" / "checkpoints" / "step-00000010")
    file.write_text(yaml.safe_dump(study | {"steps": [10, 20]}))
    with pytest.raises(UsageError, match=r"seed-8: has no checkpoint of step 10, as steps of .*late\.yaml asks for"):
        study_models(lineage_trials(read_lineage_study(file), tmp_path))


# ── its tables ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_verdicts_are_counted_for_kin_and_for_strangers():
    run = RunDir(Path("run"))
    one, two, later = StudyModel(1, 0, "", run), StudyModel(2, 0, "", run), StudyModel(1, 9, "", run)
    found = partial(Fingerprint, "dimensions", log10_p=-1.0, k=9, n_inputs=50)
    rows = [
        PairResult(1, one, later, {"t": found(verdict="kin", statistic=0.5, z=9.0)}),
        PairResult(1, two, later, {"t": found(verdict="kin", statistic=0.1, z=3.0)}),
        PairResult(1, two, later, {"t": found(verdict="stranger", statistic=0.0, z=-1.0)}),
        PairResult(1, two, later, {"t": found(verdict="undefined", statistic=np.nan, z=np.nan, reason="too few")}),
    ]
    kin, strangers = count_verdicts(rows, "t")
    assert (kin.expected, kin.n, kin.low, kin.high) == ("kin", 1, 9, 9)
    assert (strangers.n, strangers.low, strangers.high) == (3, -1, 3)
    assert strangers.verdicts == {"kin": 1, "stranger": 1, "undefined": 1}


def test_a_study_without_pairs_has_a_summary_without_rows(write, tmp_path):
    study = lineage_trials(read_lineage_study(write()), tmp_path / "out").study
    text = markdown(study, [])
    assert "| table | in truth | pairs | dimensions |" in text
    assert "###" not in text
