"""Names of models where no folder is: a path is never looked up on the hub, and a hub that is silent soon given up."""

import json
import socket
from threading import Thread
from urllib.parse import urlsplit

import pytest

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.models.exchange.hub import downloaded, pretrained_folder


@pytest.fixture
def ask_at(monkeypatch, tmp_path):
    """``ask_at(port)``: the hub is there, and has a tenth of a second to answer; nothing is in its cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("birthmark.models.exchange.hub._ANSWER_S", 0.1)
    monkeypatch.chdir(tmp_path)
    return lambda port: monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.fixture
def silent_hub(ask_at):
    """A server that takes questions about models and never answers; the questions so far."""
    asked, held = [], []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take():
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:  # closed
                    return
                question = connection.recv(4096).partition(b"\r\n")[0].decode()
                if "/api/models/" in question:
                    asked.append(question)
                    held.append(connection)
                else:  # the library's own, about itself
                    connection.close()

        waiting = Thread(target=take)
        waiting.start()
        ask_at(server.getsockname()[1])
        yield asked
        server.shutdown(socket.SHUT_RDWR)
        waiting.join()
    for connection in held:
        connection.close()


def test_a_hub_that_does_not_answer_is_asked_twice(silent_hub):
    with pytest.raises(UsageError) as error:
        pretrained_folder("nobody/nothing")
    line = "nobody/nothing: no such folder, and not from the hub either (the hub does not answer: "
    assert str(error.value).startswith(line)
    assert len(silent_hub) == 2


def test_a_hub_that_is_not_there_is_said_so_at_once(ask_at, free_port):
    ask_at(free_port())
    with pytest.raises(UsageError, match=r"not from the hub either \(the hub does not answer: .*refused"):
        pretrained_folder("nothing")


@pytest.mark.parametrize("name", ["runs/nothing", "runs/nothing@4", "./nothing", "../x/y", "~/nothing", "a/b/c", "a/"])
def test_what_reads_as_a_path_is_not_looked_up(name, silent_hub, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for command in (["identify", name, "--seeds", "0..1"], ["snapshot", name], ["fingerprint", name, name]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert f"{name}: neither a run, RUN@STEP, a checkpoint, CONFIG@SEED nor a folder of transformers (no" in line
        assert ("runs is a folder here, so it is not looked up on the hub" in line) == name.startswith("runs/")
    assert silent_hub == []


def test_a_copy_in_the_cache_is_taken_where_the_hub_is_silent(silent_hub, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--someone--small"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    assert pretrained_folder("someone/small") == repository / "snapshots" / commit
    assert len(silent_hub) == 2


def test_a_repository_whose_files_lie_elsewhere_is_refused(ask_at, serve, monkeypatch, tmp_path):
    """Also by ``audit``, which fetches into a folder of its own."""
    monkeypatch.setattr("birthmark.models.exchange.hub._ANSWER_S", 10.0)
    asked = []
    told = {"id": "org/name", "sha": "f" * 40, "siblings": [{"rfilename": "model/../../../planted.safetensors"}]}

    def answer(path, headers):
        asked.append(path)
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()

    ask_at(urlsplit(serve(answer)).port)
    refused = r"not from the hub .*it names a file 'model/\.\./\.\./\.\./planted\.safetensors', outside of this folder"
    with pytest.raises(UsageError, match=refused):
        pretrained_folder("org/name")
    with pytest.raises(UsageError, match=refused), downloaded("org/name"):
        pass
    assert not [path for path in asked if "/api/models/" not in path]
    assert not list(tmp_path.rglob("planted*"))
