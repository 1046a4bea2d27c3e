"""`birthmark audit` of a hub repository, against a server on this machine that answers what the hub's library asks."""

import hashlib
import json
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import torch

from birthmark.launch.cli import main
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained

CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=8)


def sha1(text):
    return hashlib.sha1(text.encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Revisions of ``org/name`` are folders; a file that is not there any more is answered as the hub does."""

    def answer(self, content=b"", status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self):
        self.server.look()
        match unquote(urlsplit(self.path).path).split("/")[1:]:
            case ["api", "models", "org", "name", kind, revision]:
                if (folder := self.folder(revision)) is None:
                    self.answer(status=404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
                    return
                names = sorted(file.name for file in folder.iterdir())
                told = {"id": "org/name", "sha": sha1(folder.name), "siblings": [{"rfilename": name} for name in names]}
                tree = [{"type": "file", "path": name, "size": 1, "oid": sha1(name)} for name in names]
                self.answer(json.dumps(tree if kind == "tree" else told).encode(), Content_Type="application/json")
            case ["org", "name", "resolve", revision, name]:
                file = self.folder(revision) / name
                if not file.is_file() or file.stat().st_size == 1:
                    self.answer(status=404, X_Error_Code="EntryNotFound")
                    return
                content = file.read_bytes()
                tag = hashlib.sha1(content).hexdigest()
                self.answer(content, X_Repo_Commit=sha1(file.parent.name), ETag=f'"{tag}"')
            case _:
                self.answer(status=404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def folder(self, revision):
        folders = self.server.root.iterdir()
        return next((one for one in folders if revision in (one.name, sha1(one.name))), None)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository of four revisions, one of which is a duplicate; how many were on the disk at a time."""
    root, held = tmp_path / "hub", tmp_path / "held"
    held.mkdir()
    model = born(CONFIG, 0)
    numbers = torch.Generator().manual_seed(0)
    for step in (0, 1, 2):
        save_pretrained(model, root / f"step{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=numbers))
    save_pretrained(born(CONFIG, 1), root / "step3")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    at_once = []
    server.root, server.look = root, lambda: at_once.append(len(list(held.glob("birthmark-hub-*"))))
    monkeypatch.setattr(tempfile, "tempdir", str(held))
    where = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": where, "HUGGINGFACE_CO_URL_TEMPLATE": where + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_PROGRESS_BARS": True,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield SimpleNamespace(root=root, held=held, at_once=at_once)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_revisions_are_fetched_one_at_a_time_and_one_that_vanished_is_a_row(hub, capsys):
    (hub.root / "step2" / "model.safetensors").write_bytes(b"x")  # listed, and gone when it is asked for
    assert main(["audit", "org/name@step0,step1,step2,step3,step4", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    kinds = {one["step"]: [finding["kind"] for finding in one["findings"]] for one in found["checkpoints"]}
    assert kinds == {0: [], 1: [], 2: ["damaged"], 3: ["stranger"], 4: ["damaged"]}
    told = {one["step"]: one["findings"][0]["what"] for one in found["checkpoints"] if one["findings"]}
    assert told[4] == "not from the hub (no such revision); check name and network"
    assert told[2] == "not from the hub (a file of it is gone); check name and network"
    assert max(hub.at_once) == 1
    assert list(hub.held.iterdir()) == []
