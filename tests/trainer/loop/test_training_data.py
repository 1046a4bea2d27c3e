"""Streams in whole runs: what a run reads does not depend on where it was stopped, or on who reads."""

import json
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from quiet_runs import config_file, run, same_weights, up_to

from birthmark.data.config import DataConfig
from birthmark.errors import RunError
from birthmark.launch.cli import main
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.module import PretrainModule


@pytest.fixture
def streamed(tiny, tmp_path, word_tokenizer):
    """A run over two streamed files, in three streams."""
    (tmp_path / "set").mkdir()
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    for i in range(2):
        texts = [f"{i} {row} hello world some other text here {row}" for row in range(60)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "set" / f"{i}.parquet")
    places = {"path": tmp_path / "set", "tokenizer": tmp_path / "tokenizer.json", "cache_dir": tmp_path / "cache"}
    given = {name: str(place) for name, place in places.items()}
    data = DataConfig(**given, stream=True, n_streams=3, shuffle_buffer=8, val_fraction=0.2)
    config = tiny({"model.vocab_size": 270, "snapshot.enabled": False, "trainer.global_batch_size": 5})
    return replace(config, data=data)


@pytest.fixture
def seen(monkeypatch):
    """Rows by step that modules are given from now on."""
    rows, train = defaultdict(list), PretrainModule.training_step

    def look(module, batch_BT, batch_idx):
        rows[module.global_step + 1] += batch_BT.tolist()
        return train(module, batch_BT, batch_idx)

    monkeypatch.setattr(PretrainModule, "training_step", look)
    return rows


def test_a_run_goes_on_bit_for_bit(streamed, seen, tmp_path, capsys):
    whole = run(streamed, tmp_path / "whole")
    first = dict(seen)
    seen.clear()
    parts = run(streamed, up_to(2, whole, tmp_path / "parts").path, resume=True)
    assert dict(seen) == {step: first[step] for step in (3, 4, 5, 6)}
    assert same_weights(whole, parts, 6)
    a, b = (FolderCheckpointIO().load_checkpoint(one.checkpoint(6)) for one in (whole, parts))
    assert a["TrainingData"] == b["TrainingData"]

    config_file(tmp_path / "run.yaml", streamed)
    assert main(["data", str(tmp_path / "run.yaml"), "--step", "5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [sample["tokens"] for sample in shown["samples"]] == first[5]
    assert shown["sources"][0]["tokens"] is None


def test_another_set_is_refused(streamed, tmp_path):
    short = replace(streamed, trainer=replace(streamed.trainer, max_steps=2))
    run(short, tmp_path / "run")
    pq.write_table(pa.table({"text": ["another"]}), tmp_path / "set" / "2.parquet")
    with pytest.raises(RunError, match=r"^data\.path: the corpus is not the one this run began with \(content_hash, "):
        run(streamed, tmp_path / "run", resume=True)


#: Its arguments: a config, a run's folder, begin or resume, a strategy, a step at which it is killed, a folder for what
#: the rank reads.
_KILLED = """
import json, os, signal, sys
from pathlib import Path

from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.run import pretrain

file, out, resume, strategy, killed, seen = sys.argv[1:]
log, train = open(f"{seen}/{os.environ['RANK']}", "a"), PretrainModule.training_step

def look(module, batch_BT, batch_idx):
    if module.global_step == int(killed):
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps([module.global_step + 1, batch_BT.tolist()]), file=log, flush=True)
    return train(module, batch_BT, batch_idx)

PretrainModule.training_step = look
config = read_config(file, {"trainer.strategy": strategy})
pretrain(config, RunDir(Path(out)), resume=resume == "resume")
"""


@pytest.mark.slow
def test_processes_that_are_killed_and_come_back_in_other_numbers_read_one_order(streamed, seen, forked, tmp_path):
    config = replace(streamed, trainer=replace(streamed.trainer, max_steps=12))
    run(config, tmp_path / "whole")
    config_file(tmp_path / "run.yaml", config)
    (tmp_path / "script.py").write_text(_KILLED)
    found = {}
    for n, begin, strategy, killed in ((1, "begin", "single", 5), (3, "resume", "ddp", 9), (2, "resume", "ddp", -1)):
        folder = tmp_path / f"seen-{n}"
        folder.mkdir()
        arguments = (tmp_path / "run.yaml", tmp_path / "run", begin, strategy, killed, folder)
        with pytest.raises(AssertionError) if killed > 0 else nullcontext():
            forked(tmp_path / "script.py", *arguments, n=n)
        rows = defaultdict(list)
        for rank in range(n):
            for line in (folder / str(rank)).read_text().splitlines():
                step, batch = json.loads(line)
                rows[step] += batch
        found |= rows
    assert found == dict(seen)
