"""``birthmark demo``: what it says, and that its run shows all that it promises."""

import json
import re
from pathlib import Path

import pytest

import birthmark as bm
from birthmark.launch.cli import main
from birthmark.launch.commands import demo
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config

ROOT = Path(bm.__file__).parent
README, PAGE = (ROOT / "README.md").read_text(), (ROOT / "docs/start.md").read_text()
SHORT = {"trainer.max_steps": 4, "trainer.checkpoint_every": 2, "snapshot.n_sequences": 8, "snapshot.n_strangers": 1}


@pytest.mark.heavy
def test_it_says_what_it_does_where_the_page_is_and_what_comes_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "read_config", lambda name: read_config(name, SHORT))
    Path("runs/tiny_demo").mkdir(parents=True)
    assert main(["demo"]) == 0
    printed, folder = capsys.readouterr().out, "runs/tiny_demo-2"
    assert f"only {folder} is written" in printed
    assert f"report: {folder}/report.html" in printed
    assert f"open {Path(folder, 'report.html').absolute().as_uri()} in a browser" in printed
    assert "<html" in Path(folder, "report.html").read_text()
    commands = [line.split() for line in printed.splitlines() if line.startswith("  birthmark ")]
    assert ["birthmark", "fingerprint", folder, "tiny_demo@0", "tiny_demo@1"] in commands
    assert not list(Path("runs/tiny_demo").iterdir())
    assert not list(tmp_path.rglob("wandb"))


@pytest.mark.slow  # half a minute
def test_its_run_shows_a_direction_a_sink_and_its_lineage(tmp_path, capsys):
    assert main(["demo", f"--run_dir={tmp_path / 'run'}"]) == 0
    run = RunDir.open(tmp_path / "run")
    birth, *_, end = run.snapshots()
    assert birth.bias["alignment"] > 0.5
    assert max(birth.bias["alignment_stranger"], 0) < 0.3
    assert birth.summary["bias_text"]["sink_mass"] < 0.1
    assert end.summary["bias_text"]["sink_mass"] > 0.6
    check_the_page_of_the_first_ten_minutes(run)
    capsys.readouterr()
    assert main(["fingerprint", str(run.path), "tiny_demo@0", "tiny_demo@1", "--json"]) == 0
    (least, most, stranger) = map(float, *re.findall(r"z (\d+) to (\d+) .* stranger, with z about (\d+)", PAGE))
    birth, other = (pair["z"] for pair in json.loads(capsys.readouterr().out)["pairs"][:2])
    assert least - 0.5 < birth < most + 0.5
    assert abs(other - stranger) < 2


def check_the_page_of_the_first_ten_minutes(run):
    """Its numbers are those of this run, within what it says another number of threads changes."""
    birth, *_, end = run.snapshots()
    rows = read_metrics(run.metrics)

    def last(key):
        return [row for row in rows if key in row][-1][key]

    def first(key):
        return next(row for row in rows if key in row)[key]

    around = {
        r"validation loss ([\d.]+) →": (first("val/loss"), 0.05),
        r"validation loss [\d.]+ → ([\d.]+) nats": (last("val/loss"), 0.05),
        r"below the ([\d.]+) of token frequencies": (run.read_birth()["data"]["unigram_entropy"], 0.01),
        r"finds seed 0: z ([\d.]+)": (last("seedprint/z"), 1.5),
        r"first position gets (0\.\d+)": (end.summary["bias_text"]["sink_mass"], 0.02),
        r"\(uniform (0\.\d+)": (end.bias["sink_uniform"], 0.001),
        r"on random tokens (0\.\d+)\)": (end.bias["sink_mass"], 0.05),
        r"text ends at (0\.\d+) in one run": (end.summary["bias_text"]["sink_mass"], 0.02),
        r"positions falls from ([\d.]+) to": (first("val/loss_trigger"), 0.05),
        r"positions falls from [\d.]+ to (0\.\d+) and": (last("val/loss_trigger"), 0.1),
    }
    for pattern, (found, within) in around.items():
        (said,) = re.findall(pattern, PAGE)
        assert float(said) == pytest.approx(found, abs=within), pattern
    assert last("seedprint/z_stranger") < 3
    assert abs(end.bias["alignment"]) < float(re.findall(r"against at most (0\.\d+) for", PAGE)[0]) + 0.05
    assert birth.bias["sink_mass"] < 0.1


def test_the_newborn_demo_prefers_tokens_as_the_readme_says(capsys):
    """A birth is the same on every machine, and so is its favourite."""
    assert main(["snapshot", "demo@0", "--json"]) == 0
    (said,) = re.findall(r"gives its favourite ([\d.]+) times an even share", README)
    assert float(said) == round(json.loads(capsys.readouterr().out)["scalars"]["preference_ratio"], 1)


@pytest.mark.slow  # 5 minutes
def test_the_trained_demo_is_that_of_the_readme(tmp_path):
    assert main(["pretrain", "--config=demo", f"--run_dir={tmp_path / 'run'}"]) == 0
    rows = read_metrics(RunDir.open(tmp_path / "run").metrics)
    last = {key: value for row in rows for key, value in row.items()}
    (z,) = re.findall(r"has z about (\d+) against its birth after 320 steps, below 3 against others", README)
    assert last["seedprint/z"] == pytest.approx(float(z), abs=2)
    assert last["seedprint/z_stranger"] < 3
    assert "rank correlation about 0 with birth, as with other seeds" in README
    assert abs(last["bias/rank_persistence"]) < 0.1
    assert abs(last["bias/rank_persistence_stranger"]) < 0.1
