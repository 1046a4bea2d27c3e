"""Credentials of a corpus's URL: they let a run in, and stay in no file and no line of it."""

import json
import os
import subprocess
from base64 import b64encode
from dataclasses import asdict
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

PASSWORD, SIGNATURE = "S3cr3t-w0rd", "S3cr3t+s1g"
TEXT = " ".join(f"word{i % 7} and{i % 11}" for i in range(3000)).encode()
#: A word of the whole as it may be written: the plain one, and in a header.
SECRETS = (b"S3cr3t", b64encode(f"me:{PASSWORD}".encode())[3:-3])


def answer(path, headers):
    """A corpus that is given to one user with a signature alone."""
    right = f"Basic {b64encode(f'me:{PASSWORD}'.encode()).decode()}"
    signed = parse_qs(urlsplit(path).query).get("X-Amz-Signature") == [SIGNATURE]
    return (200, {}, TEXT) if headers["Authorization"] == right and signed else (401, {}, b"")


def files_with_a_secret(*folders):
    """Files below the folders whose name or content has one."""
    files = [path for folder in folders for path in folder.rglob("*")]
    assert files
    return [
        path
        for path in files
        if any(s in os.fsencode(path) or (path.is_file() and s in path.read_bytes()) for s in SECRETS)
    ]


@pytest.fixture
def start(python, tmp_path):
    """``start(*words, **variables)``: a command in a process of its own; its exit status and all that it printed."""

    def run(*words, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        command = [python, "-m", "birthmark.launch.cli", *map(str, words)]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        assert not [s for s in SECRETS if s in said.encode()], said
        return done.returncode, said

    return run


def test_a_run_leaves_no_credentials_and_goes_on_with_the_environment(tiny, tmp_path, serve, start):
    host = serve(answer)
    asked = asdict(
        tiny({"trainer.max_steps": 2, "model.vocab_size": 280, "log.wandb": "offline", "snapshot.enabled": False})
    )
    asked["data"] |= {"path": "stdlib", "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.1}
    (tmp_path / "config").mkdir()
    file = tmp_path / "config/run.yaml"
    file.write_text(yaml.safe_dump(asked))
    url = f"{host.replace('//', f'//me:{PASSWORD}@')}/notes.txt?v=3&X-Amz-Signature={SIGNATURE.replace('+', '%2B')}"
    bare = f"{host}/notes.txt?v=3"

    run = tmp_path / "run"
    status, said = start("pretrain", "--config", file, "--data.path", url, "--run_dir", run)
    assert status == 0, said
    assert list((run / "wandb").rglob("*.wandb"))
    assert files_with_a_secret(run, tmp_path / "cache") == []
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["path"] == bare

    # The bare address alone is refused by the server, with and without a run; the line says what is missing.
    status, said = start("pretrain", "--resume", run, "--trainer.max_steps", 4)
    assert status == 2
    assert "notes.txt?v=3: is forbidden (401)" in said
    assert "BIRTHMARK_URL_CREDENTIALS" in said

    status, said = start("pretrain", "--resume", run, "--trainer.max_steps", 4, BIRTHMARK_URL_CREDENTIALS=url)
    assert status == 0, said
    assert files_with_a_secret(run, tmp_path / "cache") == []

    # The corpus is the same one, whoever reads it.
    other = tmp_path / "other"
    words = ("pretrain", "--config", file, "--data.path", bare, "--run_dir", other, "--log.wandb=off")
    assert start(*words, BIRTHMARK_URL_CREDENTIALS=url)[0] == 0
    data = [json.loads((folder / "birth.json").read_text())["data"] for folder in (run, other)]
    assert data[0] == data[1]
    assert len(list((tmp_path / "cache").glob("remote-*"))) == 2  # and the lock of one copy


def test_no_line_shows_them(serve, start):
    host = serve(lambda path, headers: (500, {}, b""))
    signed = host.replace("//", f"//me:{PASSWORD}@")
    for words in (
        ["pretrain", "--data.path", f"{signed}/a.txt"],
        ["pretrain", "--data.path", f"{signed}/a.exe?sig={SIGNATURE}"],
        ["pretrain", "--data.paht", f"{signed}/a.txt"],
        ["pretrain", "--data.path", f"[{signed}/a.txt,{signed}/b.exe]"],
        ["pretrain", "--data.n_workers", f"{signed}/a.txt"],
        ["pretrain", "--init_from", f"{signed}/a.txt"],
        ["plan", "demo", "--set", f"data.path={signed}/a.txt", "data.n_workers=x"],
        ["snapshot", f"{signed}/model"],
        ["audit", f"{signed}/model"],
    ):
        status, said = start(*words)
        assert status in (1, 2), said
        assert said.count("birthmark: error: ") == 1
