"""A study of robustness: runs of three seeds, every kind of change, tables that can be counted by hand."""

import csv
import dataclasses
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import special, stats
from torch import nn

from birthmark.errors import RunError, UsageError
from birthmark.launch.cli import main
from birthmark.measure.hidden_states import FingerprintProbe, hidden_states
from birthmark.metrics.seedprint import Fingerprint, compare, level_z
from birthmark.research.robustness import results
from birthmark.research.robustness.results import ChangedTest, change_rates, compare_changed
from birthmark.research.robustness.run import rate_in_words
from birthmark.research.robustness.treatments import Base, Text, Workplace, read_treatment, text_of, towards, train
from birthmark.research.robustness.trials import read_robustness_study, robustness_trials
from birthmark.research.seeds.results import read_seeds_study, seeds_trials
from birthmark.study.trials import check_buildable
from birthmark.trainer.by_name.model_names import open_source
from birthmark.trainer.saved_config import write_config

SHORT = {"steps": 2, "lr": 0.01}
CHANGES = {
    "int4": {"kind": "round", "to": "int4"},
    "merge": {"kind": "merge", "share": 0.4},
    "extend": {"kind": "extend_vocabulary", "rows": 5},
    "drop": {"kind": "drop_blocks", "blocks": [1]},
    "negate": {"kind": "flip_signs", "share": 1.0},
    "tune": {"kind": "tune", **SHORT},
    "lora": {"kind": "adapt", "adapter": "lora", "rank": 2, **SHORT},
    "lora-merged": {"kind": "adapt", "adapter": "lora", "rank": 2, "merged": True, **SHORT},
    "prefix-plus": {"kind": "adapt", "adapter": "prefix_plus", **SHORT},
    "distill": {"kind": "distill", **SHORT},
}
RUN = {
    "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "max_seq_len": 10, "mlp": "swiglu"},
    "data": {"path": "backcopy"},
    "trainer": {
        "max_steps": 2, "micro_batch_size": 4, "global_batch_size": 4, "checkpoint_every": 2, "val_sequences": 4,
        "device": "cpu",
    },
    "snapshot": {"enabled": False},
    "log": {"wandb": "off"},
}  # fmt: skip
PROBE = FingerprintProbe(n_inputs=60, seq_len=6)


def write_study(folder, **changes):
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    content = {"kind": "birthmark.research.robustness.run:ROBUSTNESS", "base": "run.yaml", "init_seeds": [4, 7, 9]}
    content |= {"changes": CHANGES, "test": {"n_inputs": PROBE.n_inputs, "seq_len": PROBE.seq_len}}
    content |= {"tests": {"dimensions": {}, "matched": {"null": "matched"}}, **changes}
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory, no_page):
    """A study that has been run: its file, its folder, the rows of its CSV."""
    folder = tmp_path_factory.mktemp("robustness")
    file, out = write_study(folder), folder / "out"
    for trial in robustness_trials(read_robustness_study(file), out).bases:
        write_config(trial.config, folder / "trial.yaml")
        with no_page():
            assert main(["pretrain", f"--config={folder / 'trial.yaml'}"]) == 0
    assert main(["ablate", str(file), f"--out={out}"]) == 0
    return file, out, read_rows(out)


def read_rows(out):
    with (out / "table.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def rows_of(rows, **wanted):
    return [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]


@pytest.mark.heavy
def test_every_change_is_tested_against_every_base(done):
    _, out, every = done
    rows = rows_of(every, test="dimensions")
    assert len(every) == 2 * len(rows) == 2 * 3 * (1 + len(CHANGES)) * 3 * 2
    for change in CHANGES:
        truth = Counter((row["in_truth"], row["reference"]) for row in rows_of(rows, change=change))
        two = change in ("merge", "distill")
        assert truth["kin", "trained"] == truth["kin", "birth"] == 3
        assert truth["partly", "trained"] == (3 if change == "merge" else 0)
        assert truth["stranger", "trained"] == (3 if change == "merge" else 6)
        assert all(row["other_is"] == (("merged" if change == "merge" else "teacher") if two else "")
                   for row in rows_of(rows, change=change))  # fmt: skip
    # The next seed is the other one: 4 → 7 → 9 → 4. A distilled model has that one's birth.
    assert {(row["birth_seed"], row["other_seed"]) for row in rows_of(rows, change="merge")} == {
        ("4", "7"), ("7", "9"), ("9", "4"),
    }  # fmt: skip
    assert {(row["birth_seed"], row["other_seed"]) for row in rows_of(rows, change="distill")} == {
        ("7", "4"), ("9", "7"), ("4", "9"),
    }  # fmt: skip
    assert {row["verdict"] for row in rows_of(rows, change="distill", in_truth="kin")} == {"kin"}
    assert {row["verdict"] for row in rows_of(rows, change="int4", in_truth="kin")} == {"kin"}
    assert all((out / name).stat().st_size for name in ("index.html", "table.md", "figure.png", "figure.svg"))
    table = (out / "table.md").read_text()
    assert "| merge | " in table
    assert f"after {len(CHANGES)} of {len(CHANGES)} changes." in table  # nothing is no change
    assert "## matched: null matched, weights: " in table


@torch.no_grad()
def test_the_tests_are_those_of_models_that_were_changed_by_hand(done):
    """Weights rounded and averaged here, and blocks left out by not calling them."""
    _, out, rows = done
    four, seven = (open_source(str(out / "base" / f"seed-{seed}")).load() for seed in (4, 7))
    reference = hidden_states(open_source(f"{out}/base/seed-9@0").load(), PROBE)

    def z_of(change):
        wanted = {"birth_seed": 4, "reference": "birth", "reference_seed": 9, "test": "dimensions"}
        (row,) = rows_of(rows, change=change, **wanted)
        return float(row["z"])

    assert z_of("unchanged") == pytest.approx(compare(reference, hidden_states(four, PROBE)).z, abs=1e-4)
    assert z_of("extend") == z_of("unchanged")
    merged = open_source(str(out / "base" / "seed-4")).load()
    for parameter, a, b in zip(merged.parameters(), four.parameters(), seven.parameters(), strict=True):
        parameter.copy_(0.6 * a + 0.4 * b)
    assert z_of("merge") == pytest.approx(compare(reference, hidden_states(merged, PROBE)).z, abs=0.05)
    del four.blocks[1]
    assert z_of("drop") == pytest.approx(compare(reference, hidden_states(four, PROBE)).z, abs=0.05)
    assert z_of("lora") == pytest.approx(z_of("lora-merged"), abs=0.05)
    assert abs(z_of("lora") - z_of("unchanged")) > 0


def test_what_hides_kin_from_one_test_does_not_from_the_other(done):
    negated = {test: rows_of(done[2], change="negate", in_truth="kin", test=test) for test in ("dimensions", "matched")}
    assert {row["verdict"] for row in negated["dimensions"]} == {"stranger"}
    assert all(float(row["z"]) < -5 for row in negated["dimensions"])
    assert {row["verdict"] for row in negated["matched"]} == {"kin"}


@torch.no_grad()
def test_merged_lora_gives_the_same_logits(done):
    file, out, _ = done
    bases = [Base(trial) for trial in robustness_trials(read_robustness_study(file), out).bases]
    rows = [read_treatment(CHANGES[name]) for name in ("lora", "lora-merged")]
    place = Workplace(bases[0], bases[1], text_of(bases[0].trial), Counter(row.training for row in rows))
    with torch.enable_grad():
        beside = rows[0].make(place)
        # One training serves both, and is in memory no longer than until the second has it.
        assert list(place.kept.values()) == [beside]
        merged = rows[1].make(place)
    assert place.kept == {}
    tokens = torch.randint(40, (3, 10), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(merged(tokens), beside(tokens), atol=1e-5, rtol=1e-5)
    assert (beside(tokens) - bases[0].trained()(tokens)).abs().max() > 1e-3
    assert not any("adapter" in name for name, _ in merged.named_parameters())
    # Training goes on behind the last sequence that the base has read.
    assert torch.equal(place.text.batch(None, 0), place.text.batch(None, 0))
    first = {tuple(row) for step in range(2) for row in place.text.batch(None, step - 2).tolist()}
    assert not first & {tuple(row) for row in place.text.batch(None, 0).tolist()}


def test_what_is_done_is_not_done_again(done, monkeypatch):
    file, out, rows = done
    trials = robustness_trials(read_robustness_study(file), out)
    bases = [Base(trial) for trial in trials.bases]
    outcomes = sorted((out / "changed").rglob("*.json"))
    assert len(outcomes) == 3 * (1 + len(CHANGES))
    before = {path: path.stat().st_mtime_ns for path in outcomes}
    lost = out / "changed" / "tune" / "seed-4.json"
    lost.unlink()

    def again(**how):
        return compare_changed(trials.study, bases, text_of(bases[0].trial), out, **how)

    assert len(again(only_read=True)) == len(rows) - 12
    assert not lost.exists()
    assert [r.found.z for r in again()] == [float(row["z"]) for row in rows]
    after = {path: path.stat().st_mtime_ns for path in sorted((out / "changed").rglob("*.json"))}
    assert {path for path in before if before[path] != after[path]} == {lost}
    # Another change of that name is another model.
    other = dataclasses.replace(trials.study, changes={"tune": read_treatment({**CHANGES["tune"], "steps": 3})})
    read = compare_changed(other, bases, text_of(bases[0].trial), out, only_read=True)
    assert {r.change for r in read} == {"unchanged"}
    with monkeypatch.context() as patch:
        # Bases that were trained anew are others.
        patch.setattr(results, "weights_digest", lambda model: "another")
        assert again(only_read=True) == []
    lost.write_text('{"key"')
    with pytest.raises(RunError, match=r"seed-4\.json"):
        again(only_read=True)


def test_a_change_is_made_again_when_what_it_was_trained_on_is_another(done, tmp_path, monkeypatch):
    file, out, _ = done
    trials = robustness_trials(read_robustness_study(file), out)
    bases, text = [Base(trial) for trial in trials.bases], text_of(trials.bases[0])
    study = dataclasses.replace(trials.study, changes={name: trials.study.changes[name] for name in ("int4", "tune")})
    contents = {}
    monkeypatch.setattr(Text, "content", lambda self, path: contents[path])

    def found(content, **how):
        contents[None] = content
        return {result.change for result in compare_changed(study, bases, text, tmp_path, **how)}

    everything = {"unchanged", "int4", "tune"}
    assert found("one") == found("one", only_read=True) == everything
    # What trains on nothing is what it was.
    assert found("other", only_read=True) == everything - {"tune"}
    assert found("other") == found("other", only_read=True) == everything


def test_the_content_of_a_text_follows_its_bytes(done, tmp_path):
    file, out, _ = done
    base = robustness_trials(read_robustness_study(file), out).bases[0]
    assert text_of(base).content(None) is None
    story, table = tmp_path / "story.txt", tmp_path / "rows.jsonl"
    story.write_text("Once upon a time.")
    table.write_text('{"text": "Once upon a time."}\n')
    data = dataclasses.replace(base.config.data, path=str(story), cache_dir=str(tmp_path / "cache"))
    text = Text(dataclasses.replace(base.config, data=data), None)
    for path in (story, table):
        before = text.content(str(path))
        assert text.content(str(path)) == before
        path.write_text(path.read_text().replace("Once", "Then"))
        assert text.content(str(path)) != before
    assert text.content(None) == text.content(str(story)) != text.content(str(table))
    # What says how the run's own corpus is read says nothing of another one.
    of_tables = Text(dataclasses.replace(base.config, data=dataclasses.replace(data, max_bad_rows=3)), None)
    assert of_tables.content(str(story)) == text.content(str(story))
    # Evaluation texts decide what is left of it.
    evaluation = tmp_path / "evaluation.txt"
    evaluation.write_text("A question.")
    kept = dataclasses.replace(data, decontaminate=str(evaluation))
    text = Text(dataclasses.replace(base.config, data=kept), None)
    before = text.content(str(story))
    evaluation.write_text("Another question.")
    assert text.content(str(story)) != before
    # Nothing was tokenised for it.
    assert not list((tmp_path / "cache").glob("shards-*"))
    reads = {name: read_treatment(change).texts for name, change in CHANGES.items()}
    assert [name for name, texts in reads.items() if texts] == [*CHANGES][-5:]  # those that train
    assert read_treatment({**CHANGES["tune"], "data": str(story)}).texts == [str(story)]


def made(change, own, seed, z, second=None, role="", reference="trained"):
    verdict = "undefined" if z is None else "kin" if z > 2.33 else "stranger"
    z, reason = (np.nan, "NaN") if z is None else (z, "")
    found = Fingerprint("dimensions", verdict, 0.0, z, -1.0, 32, 60, reason)
    return ChangedTest(change, own, second, role, reference, seed, "dimensions", found)


def test_rates_are_counted_and_have_the_interval_of_clopper_and_pearson():
    results = [
        *(made("noise", seed, seed, z) for seed, z in enumerate((9.0, 5.0, 1.0, None))),
        made("noise", 0, 0, 8.0, reference="birth"),
        *(made("noise", 0, seed, z) for seed, z in ((1, 0.5), (2, 3.0))),
        made("noise", 0, 1, -0.5, reference="birth"),
        made("merge", 0, 0, 7.0, 1, "merged"),
        made("merge", 0, 1, 4.0, 1, "merged"),
        made("merge", 0, 1, 6.0, 1, "merged", "birth"),
        made("merge", 0, 2, 0.1, 1, "merged"),
        made("merge", 1, 1, 7.0, 2, "merged"),
        made("merge", 1, 2, 1.0, 2, "merged"),
        made("merge", 2, 2, 7.0, 0, "merged"),
        made("merge", 2, 0, None, 0, "merged"),
    ]
    noise, merge = change_rates(results, "dimensions")
    assert (noise.trained.rate.n_kin, noise.trained.rate.n_defined, noise.trained.rate.n_undefined) == (2, 3, 1)
    assert (noise.trained.median, noise.trained.least, noise.trained.most) == (5.0, 1.0, 9.0)
    assert (noise.birth.values, noise.strangers.values) == ((8.0,), (0.5, 3.0, -0.5))
    low, high = stats.beta.ppf(0.025, 2, 2), stats.beta.ppf(0.975, 3, 1)
    assert noise.trained.rate.interval == pytest.approx((low, high))
    assert rate_in_words(noise.trained.rate) == f"2 of 3 ({100 * low:.1f}–{100 * high:.0f} %); 1 undefined"
    assert merge.second.values == (4.0, 1.0)
    assert (merge.partly.n_kin, merge.partly.n_defined, merge.partly.n_undefined) == (1, 2, 1)
    assert merge.strangers.values == (0.1,)


def a(change):
    return {"changes": {"a": change}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (a({"kind": "prun"}), "changes.a: kind is 'prun': did you mean prune?"),
        (a({"kind": "prune", "share": 2.0}), "changes.a: share is 2.0: give a share between 0 and 1"),
        (a({"kind": "drop_blocks", "blocks": [2]}), "changes.a: drop_blocks: blocks has 2: the model has"),
        (a({"kind": "tune", "steps": 0, "lr": 1.0}), "changes.a: steps is 0: give at least 1"),
        (a({"kind": "distill", "steps": 1, "lr": -1.0}), "changes.a: lr is -1.0: give a number above 0"),
        (a({"kind": "tune", "steps": 1, "lr": 1.0, "data": "/no/such"}), "/no/such"),
        (a({"kind": "adapt", "adapter": "lora", "rank": 32, **SHORT}), "changes.a: adapter.rank is 32"),
        (
            a({"kind": "adapt", "adapter": "prefix_plus", "merged": True, **SHORT}),
            "changes.a: merged is true: prefix_plus cannot be added to weights",
        ),
        ({"changes": {"unchanged": {"kind": "rotate"}}}, "the row of the trained models themselves has this name"),
        ({"changes": []}, "changes is "),
        ({"init_seeds": [1, 2]}, "init_seeds is .*: give at least three"),
        ({"tests": {"a": {"null": "none"}}}, "tests.a: "),
        ({"test": {"seq_len": 11}, "tests": {"d": {}}}, "tests.d: --seq_len 11: give 1 to 10"),
        ({"steps": [1]}, "steps: no such field"),
    ],
)
def test_a_study_that_is_impossible_is_one_line(tmp_path, fields, message):
    with pytest.raises(UsageError, match=message) as caught:
        robustness_trials(read_robustness_study(write_study(tmp_path, **fields)), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "study.yaml") in str(caught.value)


@pytest.mark.parametrize("read", [read_robustness_study, read_seeds_study])
def test_the_study_of_the_repository_is_possible_at_every_scale(read, tmp_path):
    study = read(Path(sys.modules[read.__module__].__file__).with_name("study.yaml"))
    for scale in (None, *study.scales):
        chosen = study.at(scale)
        of_seeds = read is read_seeds_study
        trials = seeds_trials(chosen, tmp_path) if of_seeds else robustness_trials(chosen, tmp_path).bases
        assert {trial.seed for trial in trials} == set(chosen.init_seeds)
        check_buildable(trials)


def test_arms_and_a_summary_of_nothing_are_one_line(tmp_path, capsys):
    file = write_study(tmp_path)
    for option, message in (("--arms=a", "a study of robustness has none"), ("--summary", "no changed model of")):
        assert main(["ablate", str(file), f"--out={tmp_path / 'out'}", option]) == 2
        assert message in capsys.readouterr().err


def test_the_line_of_the_picture_stands_where_p_is_the_level():
    for null, tails in {"dimensions": 1, "dimensions_sampled": 1, "matched": 2, "analytic": 2}.items():
        assert tails * stats.norm.sf(level_z(null)) == pytest.approx(0.01), null


# ---------------------------------------------------------------- short trainings


class One(nn.Module):
    """One number, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.moving, self.frozen = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()), requires_grad=False)


class Says(nn.Module):
    """Gives logits ``[B, T, V]``, whatever it reads."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens_BT):
        return self.logits


@pytest.mark.parametrize(("steps", "moved"), [(1, 1), (10, 10), (20, 0.5 + 19)])
def test_the_rate_rises_over_a_tenth_of_the_steps_and_stays(steps, moved):
    """AdamW moves by the rate where a gradient stays the same."""
    seen = []
    model = train(One(), seen.append, steps, 0.01, lambda model, batch: model.moving + model.frozen)
    assert model.moving.item() == pytest.approx(1 - 0.01 * moved, abs=1e-5)
    assert model.frozen.item() == 1
    assert seen == list(range(steps))
    assert not model.training


def test_a_loss_that_is_no_number_ends_it_in_a_line():
    with pytest.raises(RunError, match="the training has a loss of nan at step 0: give a smaller lr"):
        train(One(), lambda step: None, 3, 0.01, lambda model, batch: model.moving * float("nan"))


def test_a_student_is_drawn_to_all_that_its_teacher_says_where_a_token_counts():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (2 * torch.randn(2, 3, 7, generator=generator) for _ in "ab")
    batch_BT = torch.tensor([[1, 2, 3, 4], [1, 2, -1, -1]])
    found = towards(Says(teacher))(Says(student), batch_BT)
    p, q = (special.softmax(x.double().numpy(), axis=-1) for x in (teacher, student))
    counted = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert found.item() == pytest.approx(sum(stats.entropy(p[at], q[at]) for at in counted) / 4, rel=1e-5)
