"""``birthmark demo``: what it says, and that its run shows all that it promises."""

from pathlib import Path

import pytest

from birthmark.launch.cli import main
from birthmark.launch.commands import demo
from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.config_file import read_config

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
def test_its_run_shows_a_direction_a_sink_and_its_lineage(tmp_path):
    assert main(["demo", f"--run_dir={tmp_path / 'run'}"]) == 0
    run = RunDir.open(tmp_path / "run")
    birth, *_, end = run.snapshots()
    assert birth.bias["alignment"] > 0.5
    assert max(birth.bias["alignment_stranger"], 0) < 0.3
    assert birth.summary["bias_text"]["sink_mass"] < 0.1
    assert end.summary["bias_text"]["sink_mass"] > 0.6
    lineage = [r for r in read_metrics(run.metrics) if "seedprint/z" in r][-1]
    assert lineage["seedprint/z"] > 10 > 4 > lineage["seedprint/z_stranger"]
