import csv
import errno
import json
import os
import resource
import stat
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from birthmark.errors import RunError
from birthmark.files import atomic_path, write_json, write_text
from birthmark.measure import metrics_log
from birthmark.measure.metrics_log import (
    append_metrics,
    metrics_by_step,
    metrics_lines,
    read_metrics,
    truncate_metrics,
    write_metrics_csv,
)
from birthmark.measure.records import RunDir, Snapshot
from birthmark.models.birth import born, write_birth
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.trainer.checkpoints.upload import small_files

SNAPSHOT = Snapshot(
    {"step": 3, "bias": {"alignment": 0.5}, "bias_text": {"sink_mass": 0.1}},
    {"mean_prob": np.linspace(0, 1, 7), "sink_mass": np.ones((1, 1)), "sink_position": np.array([[2]])},
)


REFUSALS = {errno.ENOSPC: "no space left", errno.EDQUOT: "disk quota", errno.EFBIG: "larger than a file may be"}


@pytest.mark.parametrize(("number", "words"), [*REFUSALS.items(), (errno.EIO, "the device failed to write")])
@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_what_a_device_refuses_is_one_line_with_the_file(tmp_path, kind, number, words):
    said = (number, "said") if kind is OSError else (f"Error: I/O error: said (os error {number})",)
    error = kind(*said)
    with pytest.raises(RunError, match=rf"a\.txt: .*{words}"), atomic_path(tmp_path / "a.txt"):
        raise error
    assert list(tmp_path.iterdir()) == []


@contextmanager
def file_limit(n_bytes):
    """A real limit on the size of files that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = Snapshot({"step": 3, "bias": {"x": 1.0}}, {"a": np.zeros(1 << 16)})


@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("step", LARGE.write),
        ("a.json", lambda path: write_json(path, ["x" * 1000] * 100)),
        ("a.txt", lambda path: write_text(path, "x" * 100_000)),
        ("metrics.jsonl", lambda path: append_metrics(path, 1, {f"name-{i}": 1.0 for i in range(9999)})),
    ],
)
def test_a_limit_on_files_is_one_line_with_the_file_and_leaves_the_last_good_state(tmp_path, file, write):
    Snapshot({"step": 3, "bias": {"x": 0.5}}, {"a": np.zeros(3)}).write(tmp_path / "step")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with file_limit(1 << 14), pytest.raises(RunError, match=rf"{file}: larger than a file may be"):
        write(tmp_path / file)
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert Snapshot.read(tmp_path / "step").bias == {"x": 0.5}


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_the_umask_decides_who_may_read_every_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        SNAPSHOT.write(tmp_path / "step")
        config = ModelConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=16, max_seq_len=8)
        (tmp_path / "birth").mkdir()
        write_birth(config, 0, tmp_path / "birth", max_shard_bytes=1000)
        save_pretrained(born(config, 0), tmp_path / "exported")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


def test_a_full_disk_under_the_log_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"metrics\.jsonl: no space left"):
        append_metrics(tmp_path / "metrics.jsonl", 1, {"a": 1.0})


def test_a_folder_that_is_gone_is_one_line_with_the_mend(tmp_path):
    with pytest.raises(RunError, match=r"run: the run's folder is gone \(moved or deleted\); go on with it .*--resume"):
        append_metrics(tmp_path / "run" / "metrics.jsonl", 1, {"a": 1.0})


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), atomic_path(tmp_path / "a.txt"):
        raise PermissionError(errno.EACCES, "no")


def test_a_snapshot_comes_back_as_it_was(tmp_path):
    SNAPSHOT.write(tmp_path / "s")
    back = Snapshot.read(tmp_path / "s")
    assert back.summary == SNAPSHOT.summary
    assert back.step == 3
    assert back.scalars() == {"bias/alignment": 0.5, "bias_text/sink_mass": 0.1}
    for name, array in SNAPSHOT.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
        assert back.arrays[name].shape == array.shape


def test_snapshots_of_a_run_take_the_memory_of_the_arrays_in_use(tmp_path):
    """Twenty snapshots of 1 MB; values are those that safetensors reads."""
    run = RunDir(tmp_path)
    for step in range(20):
        arrays = {f"a{i}": np.full((2, 1 << 14), i + step, dtype=np.float32) for i in range(8)}
        run.write_snapshot(Snapshot({"step": step, "bias": {}}, arrays))
    tracemalloc.start()
    try:
        snapshots = run.snapshots()
        means = [snapshot.arrays["a3"].mean() for snapshot in snapshots]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert means == [3 + step for step in range(20)]
    assert peak < 4 << 20
    stored = load_file(run.snapshot(7) / "arrays.safetensors")
    assert snapshots[7].arrays.keys() == stored.keys()
    for name, array in snapshots[7].arrays.items():
        np.testing.assert_array_equal(array, stored[name], strict=True)


def test_a_damaged_snapshot_is_named(tmp_path):
    SNAPSHOT.write(tmp_path / "s")
    arrays, summary = tmp_path / "s" / "arrays.safetensors", tmp_path / "s" / "summary.json"
    arrays.write_bytes(arrays.read_bytes()[:40])
    with pytest.raises(RunError, match=r"arrays\.safetensors: damaged"):
        Snapshot.read(tmp_path / "s")
    with arrays.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunError, match=r"arrays\.safetensors: damaged"):
        Snapshot.read(tmp_path / "s")
    arrays.unlink()
    with pytest.raises(RunError, match=r"arrays\.safetensors: missing"):
        Snapshot.read(tmp_path / "s")
    wrong_model = '{"step": 3, "bias": {}, "model": {"d_model": 16, "n_heads": [1]}}'
    # What was ranked has a number: null, which stands for NaN, is of scalars alone.
    token = '{"rank": 1, "id": 1, "text": "a", "p": 1.0, "argmax_share": null}'
    unranked = f'{{"step": 3, "bias": {{}}, "top_tokens": [{token}]}}'
    for text in ("{", "[]", '{"step": 1}', '{"bias": {}}', '{"step": 3, "bias": {"x": "high"}}', wrong_model, unranked):
        summary.write_text(text)
        with pytest.raises(RunError, match=r"summary\.json: damaged"):
            Snapshot.read(tmp_path / "s")


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "a.json", {"x": [float("nan"), 1.0], "y": float("inf")})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"x": [None, 1.0], "y": None}
    append_metrics(tmp_path / "m.jsonl", 1, {"a": float("nan")})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": None}]


def test_a_log_cut_short_by_a_crash_is_read_to_its_last_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(path)


def test_the_csv_has_a_row_per_step(tmp_path):
    run = RunDir(tmp_path)
    append_metrics(run.metrics, 0, {"val/loss": 3.0})
    append_metrics(run.metrics, 2, {"train/loss": 2.5, "train/lr": 0.1})
    append_metrics(run.metrics, 2, {"val/loss": 2.0, "bias/kendall_tau": float("nan")})
    write_metrics_csv(run)
    with (tmp_path / "metrics.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert [row["step"] for row in rows] == ["0", "2"]
    assert rows[0] == {"step": "0", "val/loss": "3.0", "train/loss": "", "train/lr": "", "bias/kendall_tau": ""}
    assert (rows[1]["train/loss"], rows[1]["val/loss"], rows[1]["bias/kendall_tau"]) == ("2.5", "2.0", "")


def test_a_log_that_grows_while_it_is_read_is_read_to_its_length_at_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    found = []
    for line in metrics_lines(path):
        found.append(line["step"])
        assert len(found) < 9
        with path.open("ab") as f:
            f.write(b'ep": 3}\n{"step": 4}\n')
    assert found == [1, 2]


def test_a_log_may_have_any_length_and_a_line_of_it_not(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    for step in range(4):
        append_metrics(run.metrics, step, {"train/loss": 1.5})
    # The bound of other texts, if the log should ever get one.
    monkeypatch.setattr(metrics_log, "TEXT_BYTES", 50, raising=False)
    assert run.metrics.stat().st_size > 50
    assert truncate_metrics(run.metrics, 2) == list(metrics_by_step(run)) == [0, 1, 2]
    write_metrics_csv(run)
    assert run.metrics_csv.read_bytes() == b"step,train/loss\n0,1.5\n1,1.5\n2,1.5\n"
    with run.metrics.open("r+b") as f:
        f.truncate(1 << 40)  # a line of zeros, more than fits into memory
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 4 has more than 16,777,216 bytes; remove it to go on"):
        read_metrics(run.metrics)


def test_truncation_drops_later_steps_and_the_cut_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 0.1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1, "a": 0.1}\n{"step": 2}\n'
    inode = path.stat().st_ino
    assert truncate_metrics(path, 2) == []
    assert path.stat().st_ino == inode  # nothing to drop: not written again
    path.write_text('{"step": 2, "train/loss": 0.1}\n{"step": 3}\n{"step": 4, "train/loss": 0.2}\n')
    assert truncate_metrics(path, 3) == [2]


def test_checkpoints_are_named_by_their_step(tmp_path):
    run = RunDir(tmp_path)
    assert run.checkpoints_by_step() == {}
    for step in (30, 4, 1200):
        run.checkpoint(step).mkdir(parents=True)
    found = [(step, path.relative_to(tmp_path).as_posix()) for step, path in run.checkpoints_by_step().items()]
    assert found == [(step, f"checkpoints/step-0000{step:04}") for step in (4, 30, 1200)]


def test_a_run_lists_its_files_once_and_leaves_no_half_of_those_under_its_lock(tmp_path):
    """Every path that a run gives by a name, its lock apart."""
    run = RunDir(tmp_path)
    named = [getattr(run, name) for name, value in vars(RunDir).items() if isinstance(value, property)]
    assert set(run.files) == {path for path in named if isinstance(path, Path)} - {run.lock}
    assert len(set(run.files)) == len(run.files) == 9
    for file in run.files:
        file.write_text("whole")
        half = tmp_path / f".{file.name}.x1y2"
        half.mkdir()
        (half / "new").write_text("ha")
    secret = tmp_path / "certificate.secret.json"
    secret.write_text("stays")
    assert {*small_files(run).values()} == {*run.files}
    run.remove_leftovers()
    # Another process may be writing these two at the time.
    written = {tmp_path / f".{file.name}.x1y2" for file in (run.report, run.certificate)}
    assert {*tmp_path.iterdir()} == {*run.files, secret, *written}
