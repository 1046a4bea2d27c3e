"""An export to a hub on this machine that speaks the hub's upload API."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from birthmark.launch.cli import main
from birthmark.launch.commands import export

TOKEN = "hf_" + "s" * 34


@pytest.fixture
def hub(monkeypatch):
    """The hub: questions asked of it, files that came in commits, and a status to answer commits with."""
    found = SimpleNamespace(asked=[], files={}, made=[], status=200)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content, status=200):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            found.asked.append((self.command, self.path, self.headers.get("Authorization")))
            self.answer({"type": "user", "name": "me", "orgs": []} if "whoami" in self.path else {"siblings": []})

        def do_POST(self):
            found.asked.append((self.command, self.path, self.headers.get("Authorization")))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            where = f"http://127.0.0.1:{self.server.server_address[1]}/me/model"
            if self.path.endswith("/repos/create"):
                found.made.append(json.loads(body))
                self.answer({"url": where, "id": "me/model"})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                self.answer({"files": modes})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        found.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = {"commitUrl": f"{where}/commit/1", "commitOid": "1" * 40, "success": True}
                self.answer(commit, found.status)
            else:
                self.answer({"errors": [], "warnings": []})

        def log_message(self, format, *args):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    found.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield found
    server.shutdown()
    server.server_close()


def test_an_export_goes_to_the_hub_with_its_card_and_without_a_token(hub, tmp_path, capfd, caplog):
    out = tmp_path / "out"
    assert main(["export", "tiny_demo@0", str(out), "--push", "me/model"]) == 0
    assert hub.files == {
        file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*") if file.is_file()
    }
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files.keys()
    (made,) = hub.made
    assert (made["name"], made["organization"]) == ("model", "me")
    assert made.get("private") or made["visibility"] == "private"  # by the library's version
    about_it = [authorization for _, path, authorization in hub.asked if "/me/model/" in path]
    assert set(about_it) == {f"Bearer {TOKEN}"}
    said = capfd.readouterr()
    assert f"{hub.address}/me/model" in said.out
    assert TOKEN not in said.out + said.err + caplog.text
    assert not any(TOKEN.encode() in content for content in hub.files.values())


@pytest.mark.parametrize(("status", "code", "line"), [(403, 2, "refuses your token (403)"), (422, 1, "answers 422")])
def test_a_hub_that_refuses_is_one_line(status, code, line, hub, tmp_path, capsys):
    (tmp_path / "README.md").write_text("a card")
    hub.status = status
    with pytest.raises(Exception, match=r"^--push me/model: the hub ") as error:
        export.push(tmp_path, "me/model")
    assert line in str(error.value)
    assert f"{tmp_path} is complete" in str(error.value)
    assert "\n" not in str(error.value)
    assert TOKEN not in str(error.value) + capsys.readouterr().out
    assert {2: "UsageError", 1: "RunError"}[code] == type(error.value).__name__


@pytest.mark.parametrize(("name", "line"), [("model", "names no owner"), ("a/b/c", "give ORG/NAME")])
def test_a_wrong_name_is_said_before_anything_is_written(name, line, hub, tmp_path, refused):
    assert line in refused("export", "tiny_demo@0", tmp_path / "out", "--push", name)
    assert not (tmp_path / "out").exists()
    assert hub.asked == []


def test_without_a_login(hub, tmp_path, monkeypatch, refused):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    said = refused("export", "tiny_demo@0", tmp_path / "out", "--push", "me/model")
    assert "you are not logged in; hf auth login, or set HF_TOKEN" in said
    assert hub.asked == []
