"""`birthmark report --watch`: a real server, asked as a browser would and by a real one."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from birthmark.launch.cli import main
from birthmark.report.live import PORT, LivePage, LiveServer

FEW = ("mean_prob", "argmax_share")  # arrays; pages of few are drawn in no time


@pytest.fixture(scope="module")
def live(tmp_path_factory, make_run, python):
    """(address, run) of a page that is served; in the end Ctrl-C ends the server quietly."""
    run = make_run(tmp_path_factory.mktemp("live") / "run", steps=(0, 8), losses=False, only=FEW)
    command = [python, "-m", "birthmark.launch.cli", "report", str(run.path), "--watch", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a script starts in its background, tests too, is deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("live at http://127.0.0.1:"), process.stderr.read()
        yield line.split()[2], run
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()


def ask(address, path="", **headers):
    with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", headers=headers), timeout=60) as answer:
        return answer.read().decode()


def state(address):
    return json.loads(ask(address, "state"))


def test_a_run_being_written_is_read_as_far_as_it_is_there(live, make_snapshot):
    address, run = live
    before = state(address)
    with run.metrics.open("a") as file:
        file.write('{"step": 9, "train/lo')  # a line that is being written
    half = run.path / "snapshots" / ".step-00000009.x7"  # a snapshot that has no name yet
    half.mkdir()
    assert state(address) == {"version": before["version"], "problem": ""}
    damaged = run.snapshot(9)
    damaged.mkdir()
    (damaged / "summary.json").write_text("{")
    assert "summary.json: damaged" in state(address)["problem"]
    assert "birth" in ask(address)  # the page before it
    shutil.rmtree(damaged)
    assert state(address)["problem"] == ""
    away = run.path.rename(run.path.with_name("away"))  # deleted, and started anew
    assert f"{run.path}: not a run" in state(address)["problem"]
    assert "birth" in ask(address)
    away.rename(run.path)
    assert state(address)["problem"] == ""
    make_snapshot(9, np.random.default_rng(1), only=FEW).write(run.snapshot(9))
    after = state(address)
    assert after["version"] != before["version"]
    assert after["version"] in ask(address)


def test_nothing_but_the_page_is_served_and_to_this_machine_alone(live):
    address, run = live
    for path, headers in (("config.yaml", {}), ("../run/birth.json", {}), ("", {"Host": "example.org:80"})):
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(address, path, **headers)
        assert error.value.code == (403 if headers else 404)
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(address, data=b"x", timeout=60)
    link = re.search(r'href="([^"]+\.csv)"', ask(address))[1]  # the numbers that the page links to
    assert ask(address, link).startswith("run,")
    assert run.report.exists() is False


def test_a_browser_follows_and_keeps_its_view(live, browser, make_snapshot):
    address, run = live
    page = browser.new_page()
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{address}#view")
    page.wait_for_selector("#follow")
    first = page.locator("script[src='/follow.js']").get_attribute("data-version")
    make_snapshot(16, np.random.default_rng(2), only=FEW).write(run.snapshot(16))
    page.wait_for_selector(f"script[src='/follow.js']:not([data-version='{first}'])", state="attached")
    assert page.evaluate("location.hash") == "#view"
    assert errors == []
    page.close()


def test_a_port_in_use(make_run, tmp_path, capsys):
    page = LivePage([])
    with LiveServer(page, 0) as one, LiveServer(page, None) as two, LiveServer(page, None) as three:
        taken = one.server_port
        assert PORT <= two.server_port < three.server_port
        run = make_run(tmp_path / "run", steps=(0,))
        assert main(["report", str(run.path), "--watch", "--port", str(taken)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"birthmark: error: --port {taken}: ")
    assert line.endswith("; give another, or leave it out for one that is free\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "8000"], "--port 8000: only --watch has one"),
        (["--watch", "--out", "x.html"], "--out: --watch serves the page of whole runs"),
        (["--watch", "--port", "70000"], "--port 70000: give a number from 1 to 65535"),
    ],
)
def test_options_that_have_no_effect_are_refused(make_run, tmp_path, capsys, words, message):
    run = make_run(tmp_path / "run", steps=(0,))
    assert main(["report", str(run.path), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch):
    """The address of a server in this process, which gives a request half a second to arrive."""
    monkeypatch.setattr("birthmark.report.live._REQUEST_S", 0.5)
    with LiveServer(LivePage([]), 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_address
        server.shutdown()


def test_a_request_that_never_ends_is_cut_off(served):
    with socket.create_connection(served, timeout=30) as client:
        client.sendall(b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        start = time.monotonic()
        client.settimeout(0.05)
        while time.monotonic() - start < 20:
            try:
                client.sendall(b"X: y\r\n")  # a byte now and then keeps a limit on each read away
                if not client.recv(100):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert 0.4 < time.monotonic() - start < 15


@pytest.mark.parametrize("hosts", [(), ("127.0.0.1", "evil.example"), ("evil.example",)])
def test_a_request_names_this_machine_once(served, hosts):
    with socket.create_connection(served, timeout=30) as client:
        lines = [b"GET /state HTTP/1.1", *(f"Host: {host}".encode() for host in hosts), b"", b""]
        client.sendall(b"\r\n".join(lines))
        assert b" 403 " in client.recv(100)
