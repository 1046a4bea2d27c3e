"""Checkpoints in a store: whole or not there after a kill at any request, and nothing that the store does ends a run.

Stores: fsspec's memory, a folder, and an S3 server of moto's where it is installed.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from filelock import FileLock
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from quiet_runs import run, same_weights, weights

from birthmark.data import remote
from birthmark.data.fetching import localised
from birthmark.errors import RunError, UsageError
from birthmark.files import write_sealed_json
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.trainer.by_name.model_names import open_source_with_birth
from birthmark.trainer.checkpoints import upload
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.checkpoints.stored_run import fetch_checkpoint, fetch_run, run_here
from birthmark.trainer.checkpoints.upload import Uploader
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.initial_model import resolve_init_from

URL = "memory://bucket/runs/a"


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(remote, "_POLL_S", 0.001)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


def steps_of(memory):
    return sorted(int(key.split("/")[-2][5:]) for key in memory.store if key.endswith("state.json"))


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run that was trained into the store, and the names of the threads that asked the store while it trained."""
    asked, kept = {}, MemoryFileSystem._open
    fsspec.filesystem("memory").store.clear()
    with pytest.MonkeyPatch.context() as watched:

        def watch(self, path, *args, **more):
            asked.setdefault(threading.current_thread().name, []).append(path)
            return kept(self, path, *args, **more)

        watched.setattr(MemoryFileSystem, "_open", watch)
        watched.setattr(remote.Store, "_within", lambda self, work: work(lambda more=None: None))
        fields = {
            "trainer.checkpoint_to": URL,
            "trainer.keep_last": 2,
            "trainer.max_steps": 8,
            "optim.schedule": "constant",
        }
        done = run(tiny(fields), tmp_path_factory.mktemp("uploaded") / "a")
    return done, asked, dict(fsspec.filesystem("memory").store)


@pytest.fixture
def stored(trained, memory):
    """The run in the store."""
    memory.store.update(trained[2])
    return trained[0]


def test_a_run_is_in_its_store_whole_and_training_asks_it_nothing(stored, trained, memory):
    assert steps_of(memory) == [6, 8]
    copy = fetch_run(URL)
    for file in (stored.config, stored.birth, stored.metrics, stored.snapshot(8) / "summary.json"):
        assert (copy / file.relative_to(stored.path)).read_bytes() == file.read_bytes()
    loaded, whole = open_source_with_birth(f"{URL}@8").load().state_dict(), weights(stored, 8)
    assert all(torch.equal(loaded[name.removeprefix("model.")], whole[name]) for name in whole)
    # The training's thread writes the small files before the first step, and no checkpoint.
    asked = trained[1]
    assert any("checkpoints" in path for path in asked["upload"])
    assert not any("checkpoints" in path for path in asked["MainThread"])
    assert not any("checkpoint step" in name for name in asked)


def test_commands_read_it_and_a_run_goes_on_elsewhere(stored, tiny, memory, tmp_path, monkeypatch, capsys):
    assert main(["export", f"{URL}@6", str(tmp_path / "out")]) == 0
    copy = RunDir(fetch_run(URL))
    assert not (copy.checkpoint(8) / "state.json").exists()  # only what is needed
    assert main(["audit", URL]) in (0, 3)
    assert f"{copy.path.name}@8" in capsys.readouterr().out
    monkeypatch.setattr("birthmark.trainer.run._write_report", lambda run: None)
    assert main(["pretrain", "--resume", URL, "--run_dir", str(tmp_path / "b"), "--trainer.max_steps=10"]) == 0
    whole = run(tiny({"trainer.max_steps": 10, "optim.schedule": "constant"}), tmp_path / "whole")
    a, b = weights(whole, 10), weights(RunDir(tmp_path / "b"), 10)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert steps_of(memory) == [8, 10]
    # The first one is behind its store now.
    with pytest.raises(UsageError, match=r"has a checkpoint of step 10, later than 8.*--resume memory://bucket/runs/a"):
        run(tiny({"trainer.checkpoint_to": URL, "trainer.max_steps": 12}), stored.path, resume=True)


@pytest.mark.parametrize("future", ["another", "none"])
def test_a_step_means_what_its_store_has_now(stored, memory, tmp_path, future):
    """The run went on from step 6, to another step 8 or not that far yet, after step 8 had been read."""
    copy = RunDir(fetch_run(URL))
    fetch_run(URL, tmp_path / "resumed")
    for step in (6, 8):
        fetch_checkpoint(copy.checkpoint(step))
    (copy.checkpoint(6) / "read").touch()
    own = RunDir(tmp_path / "resumed").checkpoint(8)
    shutil.rmtree(own)
    shutil.copytree(stored.checkpoint(8), own)
    for key in [key for key in memory.store if "step-00000008" in key]:
        del memory.store[key]
    if future == "another":
        there = RunDir(tmp_path / "there")
        shutil.copytree(stored.path, there.path)
        shutil.rmtree(there.checkpoint(8))
        shutil.copytree(there.checkpoint(6), there.checkpoint(8))
        seal(there.checkpoint(8), json.loads((there.checkpoint(6) / "state.json").read_text()) | {"step": 8})
        Uploader(there, URL).update()
    loaded, now = open_source_with_birth(URL).load().state_dict(), weights(stored, 6)
    assert all(torch.equal(loaded[name.removeprefix("model.")], now[name]) for name in now)
    assert list(copy.checkpoints_by_step()) == ([6, 8] if future == "another" else [6])
    assert (copy.checkpoint(6) / "read").exists()  # and nothing is copied twice
    fetch_run(URL, tmp_path / "resumed")
    assert (own / "state.json").read_bytes() == (stored.checkpoint(8) / "state.json").read_bytes()


@pytest.mark.parametrize("url", [URL, "memory://user:secret@vault/runs/a"])
def test_a_run_that_starts_from_a_store_names_the_store(stored, memory, tiny, tmp_path, url):
    """On another machine, or without the cache, it must go on: config and certificate name no copy, and no secret."""
    folder = url.removeprefix("memory:/")
    memory.store.update({key.replace("/bucket/runs/a", folder): file for key, file in memory.store.items()})
    bare = url.replace("user:secret@", "")
    config = resolve_init_from(tiny({"init_from": url, "trainer.max_steps": 2}))
    started = run(replace(config, trainer=replace(config.trainer, max_steps=1)), tmp_path / "started")
    assert config.init_from == started.read_birth()["init_from"] == f"{bare}@8"
    shutil.rmtree(tmp_path / "home")
    # A command line reads the run's config, and its names, once more.
    again = resolve_init_from(read_config(started.config, {"trainer.max_steps": 2}))
    run(again, started.path, resume=True)
    assert same_weights(run(config, tmp_path / "whole"), started, 2)

    text = memory.store[f"{folder}/tokenizer.json"] = MemoryFile(data=b'{"of": "text"}')
    for name in (url, f"{url}@8", f"{url}@0"):
        data = resolve_init_from(tiny({"init_from": name, "data.path": "stdlib"})).data
        assert data.tokenizer == f"{bare}/tokenizer.json"
        assert localised(data).tokenizer.startswith(str(tmp_path))
        assert Path(localised(data).tokenizer).read_bytes() == text.getvalue()


def contents(run):
    return {file: file.read_bytes() for file in sorted(run.path.rglob("*")) if file.is_file() and file.name[0] != "."}


@pytest.mark.parametrize("beyond", [(), (5,)], ids=["as far", "farther"])
def test_a_run_that_is_as_far_as_its_store_keeps_what_it_logged(local, memory, beyond):
    """It died before its last files were copied; a launcher starts it again with the same command."""
    Uploader(local, URL).update()
    with local.metrics.open("a") as log:
        log.write('{"step": 9, "train/loss": 1.0}\n')
    (local.snapshot(2) / "summary.json").write_text("{}")
    local.config.write_text("name: renamed\n")
    for step in beyond:
        shutil.copytree(local.checkpoint(4), local.checkpoint(step))
    before, lost = contents(local), local.snapshot(4) / "summary.json"
    lost.unlink()
    fetch_run(URL, local.path)
    assert contents(local) == before
    # Where the store has a later checkpoint, the log that belongs to it comes with it.
    shutil.rmtree(local.checkpoint(4))
    if not beyond:
        fetch_run(URL, local.path)
        assert local.metrics.read_bytes() == memory.cat_file("/bucket/runs/a/metrics.jsonl") != before[local.metrics]


def test_a_second_start_changes_no_file_of_a_run_that_trains(local, tmp_path, python):
    url = (tmp_path / "store").as_uri()
    Uploader(local, url).update()
    with local.metrics.open("a") as log:
        log.write('{"step": 9, "train/loss": 1.0}\n')
    shutil.rmtree(local.checkpoint(4))
    before = contents(local)
    command = [python, "-m", "birthmark.launch.cli", "pretrain", f"--resume={url}", f"--run_dir={local.path}"]
    with FileLock(local.path / ".lock"):
        second = subprocess.run(command, check=False, capture_output=True, text=True)
        assert contents(local) == before
    assert (second.returncode, len(second.stderr.splitlines())) == (2, 1)
    assert "another process is writing this run" in second.stderr


def test_the_secret_of_a_certificate_stays_where_it_is(local, memory, tmp_path):
    assert main(["certify", str(local.path)]) == 0
    Uploader(local, URL).update()
    assert "/bucket/runs/a/certificate.json" in memory.store
    assert not any("secret" in key for key in memory.store)
    memory.pipe_file("/bucket/runs/a/certificate.secret.json", b"of an earlier version")
    names = {file.name for file in fetch_run(URL, tmp_path / "copy").iterdir()}
    assert "certificate.json" in names
    assert "certificate.secret.json" not in names


# ---------------------------------------------------------------- kills


class Killed(BaseException):
    """Death of a process, which no handler of an error sees."""


@contextlib.contextmanager
def killed_after(n, monkeypatch):
    """Kill the process, as it were, before its request n + 1 that changes the store."""
    left = n
    with monkeypatch.context() as patched:
        for name in ("put", "remove"):
            kept = getattr(remote.Store, name)

            def count(self, *args, kept=kept):
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                kept(self, *args)

            patched.setattr(remote.Store, name, count)
        with contextlib.suppress(Killed):
            yield


def seal(folder, state):
    """Write a checkpoint's ``state.json`` of this content."""
    write_sealed_json(folder / "state.json", {name: value for name, value in state.items() if name != "sha256"})


@pytest.fixture
def local(trained, tmp_path):
    """A copy of the run on the disk, with checkpoints of four steps."""
    path = tmp_path / "local"
    shutil.copytree(trained[0].path, path)
    run, source = RunDir(path), trained[0].checkpoint(8)
    state = json.loads((source / "state.json").read_text())
    for step in (1, 2, 3, 4):
        shutil.copytree(source, run.checkpoint(step))
        seal(run.checkpoint(step), state | {"step": step})
    for step in (6, 8):
        shutil.rmtree(run.checkpoint(step))
    return run


def check_whole(url, folder):
    """Every checkpoint that the store shows is whole; returns their steps."""
    shutil.rmtree(folder, ignore_errors=True)
    if fetch_run(url, folder) is None:
        return []
    for checkpoint in RunDir(folder).checkpoints():
        fetch_checkpoint(checkpoint)
        FolderCheckpointIO().load_checkpoint(checkpoint)
    return list(RunDir(folder).checkpoints_by_step())


def test_a_kill_at_any_request_loses_nothing_and_leaves_nothing_half(local, memory, monkeypatch, tmp_path):
    """Also where a checkpoint of other content is replaced, old ones are deleted, and kills follow one another."""
    n, most = 0, 0
    while True:
        uploader = Uploader(local, URL, keep_last=2)
        finished = False
        with killed_after(n, monkeypatch):
            uploader.update()
            finished = True
        found = check_whole(URL, tmp_path / "read")
        assert len(found) >= most  # what was whole stays, until later ones are
        most = min(2, max(most, len(found)))
        if finished:
            break
        n += 5
    assert found == [3, 4]
    assert n >= 20
    # Another future of step 4 takes the place of the first.
    state = json.loads((local.checkpoint(4) / "state.json").read_text())
    seal(local.checkpoint(4), state | {"note": "another future"})
    for cut in (1, 2, 12, 13, 100):
        with killed_after(cut, monkeypatch):
            Uploader(local, URL, keep_last=2).update()
        assert 3 in check_whole(URL, tmp_path / "read")
    assert b"another future" in memory.cat_file("/bucket/runs/a/checkpoints/step-00000004/state.json")


UPLOADING = """
import os, sys
from pathlib import Path
from birthmark.measure.records import RunDir
from birthmark.trainer.checkpoints.upload import Uploader
print("begins", flush=True)
Uploader(RunDir(Path(sys.argv[1])), sys.argv[2], keep_last=2).update()
"""


@pytest.mark.slow
def test_a_hundred_processes_are_killed_while_they_copy(local, python, tmp_path):
    """Into a folder, whose writes are not atomic. Outcome of 100 kills: nothing half read, nothing lost."""
    rng, n_killed = random.Random(0), 0
    big = safetensors.torch.save({"big": torch.zeros(1 << 21)})
    pieces = [{"file": "more.safetensors", "start": 0, "n": 1 << 21}]
    for step in local.checkpoints_by_step():
        folder = local.checkpoint(step)
        (folder / "more.safetensors").write_bytes(big)
        state = json.loads((folder / "state.json").read_text())
        state["files"]["more.safetensors"] = hashlib.sha256(big).hexdigest()
        state["tensors"]["big"] = {"shape": [1 << 21], "dtype": "float32", "pieces": pieces}
        seal(folder, state)
    while n_killed < 100:
        store = tmp_path / f"store-{n_killed % 7}"
        child = subprocess.Popen([python, "-c", UPLOADING, str(local.path), f"file://{store}"], stdout=-1)
        child.stdout.readline()
        time.sleep(rng.random() * 0.4)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            n_killed += 1
        child.wait()
        found = check_whole(f"file://{store}", tmp_path / "read")
        assert set(found) <= {1, 2, 3, 4}
        if n_killed % 7 == 0:
            Uploader(local, f"file://{store}", keep_last=2).update()
            assert check_whole(f"file://{store}", tmp_path / "read") == [3, 4]
            shutil.rmtree(store)


# ---------------------------------------------------------------- stores that fail


def fails(self, path, *args, **more):
    raise OSError("the disk of the store is broken")


def hangs(self, path, *args, **more):
    time.sleep(60)


def lies(self, path, **more):
    return {"name": path, "size": 1, "type": "file"}


@pytest.mark.parametrize(
    ("method", "fault", "expected"),
    [
        ("pipe_file", fails, "cannot be written after 3 tries (the disk of the store is broken)"),
        ("put_file", hangs, "no answer for 0.05 s; check the network"),
        ("info", lies, "and the store says 1"),
    ],
)
def test_a_store_that_fails_hangs_or_lies_costs_a_line_and_a_retry(local, method, fault, expected, monkeypatch, memory):
    monkeypatch.setattr(upload, "_SOON_S", 0.01)
    monkeypatch.setattr(upload, "SILENCE_S", 0.05)
    said = []
    uploader = Uploader(local, URL, keep_last=2, say=said.append)
    uploader.begin(4)
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, method, fault)
        (local.path / "metrics.csv").write_text("step\n1\n")
        uploader._whole.clear()
        uploader.wake()
        ends = time.monotonic() + 20
        # A store that lies of a file that it has not got yet is first one that cannot be read.
        while not any(expected in line for line in said) and time.monotonic() < ends:
            time.sleep(0.01)
    uploader.finish()
    assert any(expected in line for line in said), said
    assert all(line.endswith("the checkpoints are on the disk, the run goes on and tries again") for line in said)
    assert steps_of(memory) == [3, 4]


def test_what_is_missing_at_the_end_is_named(local, monkeypatch):
    said = []
    uploader = Uploader(local, URL, keep_last=2, say=said.append)
    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    uploader.begin(4)
    uploader.finish()
    assert "lacks the checkpoints of steps 3, 4, which are in" in said[-1]


def test_a_store_of_another_run_is_refused_before_the_first_step(stored, tiny, tmp_path):
    with pytest.raises(UsageError, match=r"trainer\.checkpoint_to: memory://bucket/runs/a holds another run"):
        run(tiny({"trainer.checkpoint_to": URL}), tmp_path / "other")


def test_an_index_that_names_missing_files_is_one_line(stored, memory):
    del memory.store["/bucket/runs/a/checkpoints/step-00000008/tensors.safetensors"]
    with pytest.raises(RunError, match=r"step-00000008/state\.json: names tensors\.safetensors, which is not there"):
        run_here(URL)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("runs/x", "trainer.checkpoint_to is runs/x, no URL: give one"),
        ("https://host/x", "trainer.checkpoint_to is https://host/x, which takes no files"),
    ],
)
def test_what_is_no_store_is_refused(url, expected):
    (found,) = TrainerConfig(device="cpu", checkpoint_to=url).problems()
    assert found.startswith(expected)


def test_credentials_of_a_store_are_in_no_config():
    config = TrainerConfig(device="cpu", checkpoint_to="sftp://me:s3cr3t@host/runs/a")
    assert config.checkpoint_to == "sftp://host/runs/a"


# ---------------------------------------------------------------- a server of S3


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("s3fs", reason="s3fs and moto are not installed: pip install s3fs 'moto[server]'")
    pytest.importorskip("moto", reason="s3fs and moto are not installed: pip install s3fs 'moto[server]'")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield boto3.client("s3")
    server.stop()


def test_a_server_of_s3_holds_a_run_and_its_bucket_may_vanish(s3, local, tmp_path, monkeypatch):
    url, said = "s3://bucket/runs/a", []
    for n in (3, 8, 13):
        with killed_after(n, monkeypatch):
            Uploader(local, url, keep_last=2).update()
        check_whole(url, tmp_path / "read")
    uploader = Uploader(local, url, keep_last=2, say=said.append)
    uploader.begin(4)
    uploader.finish()
    assert not said
    assert check_whole(url, tmp_path / "read") == [3, 4]
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    for key in keys:
        s3.delete_object(Bucket="bucket", Key=key)
    s3.delete_bucket(Bucket="bucket")
    with pytest.raises((UsageError, RunError), match=r"trainer\.checkpoint_to: s3://bucket.*bucket does not exist"):
        Uploader(local, url).begin(4)
    assert "bucket" not in [one["Name"] for one in s3.list_buckets()["Buckets"]]
