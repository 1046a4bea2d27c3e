import csv
import errno
import json

import numpy as np
import pytest
from safetensors import SafetensorError

from birthmark.errors import RunError, UsageError
from birthmark.files import atomic_path, read_json, write_json, write_text
from birthmark.measure.records import (
    RunDir,
    Snapshot,
    append_metrics,
    read_metrics,
    truncate_metrics,
    write_metrics_csv,
)

SNAPSHOT = Snapshot(
    {"step": 3, "bias": {"alignment": 0.5}, "bias_text": {"sink_mass": 0.1}},
    {"mean_prob": np.linspace(0, 1, 7), "sink_mass": np.ones((1, 1)), "sink_position": np.array([[2]])},
)


def test_a_file_takes_its_place_whole(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "new")
    assert path.read_text() == "new"
    write_text(path, "newer")
    assert path.read_text() == "newer"
    assert [f.name for f in path.parent.iterdir()] == ["a.txt"]


def test_a_crash_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def crash():
        with atomic_path(path) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crash()
    assert path.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_is_replaced_whole(tmp_path):
    for content in ("one", "two"):
        with atomic_path(tmp_path / "d") as new:
            new.mkdir()
            (new / content).touch()
    assert [f.name for f in (tmp_path / "d").iterdir()] == ["two"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left (os error 28)")]
)
def test_a_full_disk_is_one_line_with_the_file(tmp_path, error):
    with pytest.raises(RunError, match=r"a\.txt: no space left"), atomic_path(tmp_path / "a.txt"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_the_log_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"metrics\.jsonl: no space left"):
        append_metrics(tmp_path / "metrics.jsonl", 1, {"a": 1.0})


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


def test_a_damaged_snapshot_is_named(tmp_path):
    SNAPSHOT.write(tmp_path / "s")
    arrays, summary = tmp_path / "s" / "arrays.safetensors", tmp_path / "s" / "summary.json"
    arrays.write_bytes(arrays.read_bytes()[:40])
    with pytest.raises(RunError, match=r"arrays\.safetensors: damaged"):
        Snapshot.read(tmp_path / "s")
    arrays.unlink()
    with pytest.raises(RunError, match=r"arrays\.safetensors: missing"):
        Snapshot.read(tmp_path / "s")
    wrong_model = '{"step": 3, "bias": {}, "model": {"d_model": 16, "n_heads": [1]}}'
    # What was ranked has a number: null, which stands for NaN, is of scalars alone.
    unranked = (
        '{"step": 3, "bias": {}, "top_tokens": [{"rank": 1, "id": 1, "text": "a", "p": 1.0, "argmax_share": null}]}'
    )
    for text in ("{", "[]", '{"step": 1}', '{"bias": {}}', wrong_model, unranked):
        summary.write_text(text)
        with pytest.raises(RunError, match=r"summary\.json: damaged"):
            Snapshot.read(tmp_path / "s")


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "a.json", {"x": [float("nan"), 1.0], "y": float("inf")})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"x": [None, 1.0], "y": None}
    append_metrics(tmp_path / "m.jsonl", 1, {"a": float("nan")})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": None}]


def test_missing_and_damaged_json_is_named(tmp_path):
    with pytest.raises(RunError, match=r"x\.json: missing"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RunError, match=r"x\.json: damaged"):
        read_json(tmp_path / "x.json")


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


def test_truncation_drops_later_steps_and_the_cut_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 0.1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1, "a": 0.1}\n{"step": 2}\n'


def test_only_a_run_opens_as_one(tmp_path):
    with pytest.raises(UsageError, match="not a run"):
        RunDir.open(tmp_path)


def test_checkpoints_are_named_by_their_step(tmp_path):
    run = RunDir(tmp_path)
    assert run.checkpoints_by_step() == {}
    for step in (30, 4, 1200):
        run.checkpoint(step).mkdir(parents=True)
    assert list(run.checkpoints_by_step().items()) == [
        (4, tmp_path / "checkpoints/step-00000004"),
        (30, tmp_path / "checkpoints/step-00000030"),
        (1200, tmp_path / "checkpoints/step-00001200"),
    ]
