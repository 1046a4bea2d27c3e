"""A Python that starts in a moment: ``forked_python.py FOLDER`` writes ``FOLDER/python`` and serves its starts.

A process that has imported what runs need forks itself for each start: importing torch, Lightning and DeepSpeed takes
longer than a small run does. ``FOLDER/python`` takes a Python's arguments, passes its own channels, folder and
environment on, passes on signals, and ends as the forked process does. Commands that lie beside the real Python lie
beside this one, and what they start by ``sys.executable`` is forked as well.

Not the same as a Python of its own: libraries are imported at the first start, under the environment of the server; the
page of a run is written without that of its newest snapshot, unless the environment has ``SNAPSHOT_PAGES`` (its sixty
pictures take many times longer than a small run); the process has the server's limits and is its child; SIGSTOP and
SIGKILL stop and kill the program that was started, and the forked process is killed a moment later.

The server ends when its standard input does; whoever starts it keeps the other end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Iterable
from pathlib import Path

#: Imported once. Nothing may compute in the server: a process with threads must not fork.
IMPORTED = (
    "torch.distributed.fsdp",
    "lightning.pytorch",
    "matplotlib.pyplot",
    "birthmark.api.run",
    "birthmark.launch.commands.pretrain",
    "birthmark.measure.measurement",
    "birthmark.report.run_page",
    "birthmark.report.snapshot_table",
    "birthmark.trainer.run",
    "birthmark.trainer.strategies.lightning_setup",
    "deepspeed",
    # What a first step, snapshot or restart loads, and all that DeepSpeed does when it is set up (an optimizer of its
    # own asks for the whole compiler): more time than the step itself.
    "attrs",
    "encodings.idna",
    "rich._emoji_codes",
    "birthmark.metrics.heads",
    "birthmark.metrics.experts",
    "birthmark.trainer.strategies.fsdp2",
    "birthmark.trainer.strategies.zero",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
)

#: Signals that a start passes on; until its program runs they wait.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

#: What a start runs: light, for it is paid each time.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
heard = {signals}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
start = json.dumps([{prefix!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(start).to_bytes(8, "little")], [0, 1, 2])
server.sendall(start)
answers = server.makefile()
pid = int(answers.readline())
for number in heard:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
for number in (0, 1, 2):
    os.close(number)
status = int(answers.readline() or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def _run(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` runs."""
    safe = bool(os.environ.get("PYTHONSAFEPATH"))
    while arguments and arguments[0] in ("-u", "-W", "-P"):
        if (flag := arguments.pop(0)) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        safe |= flag == "-P"
    kind, *rest = arguments
    del sys.path[0]  # this file's folder
    if kind == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path[:0] = [] if safe else [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.path[:0] = [] if safe else [str(Path.cwd())]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path[:0] = [] if safe else [str(Path(kind).parent.absolute())]
        runpy.run_path(kind, run_name="__main__")


def freeze_what_exists() -> None:
    """Let collections of garbage pass over all that exists now.

    Every run asks if something is frozen. A count of it all takes 80 ms, a sixth of a tiny run: it is taken once.
    """
    gc.collect()
    gc.freeze()
    if "triton" in sys.modules:
        # At the end of a process its bindings name, on standard error, all that the collector passes over.
        atexit.register(gc.unfreeze)
    counted = gc.get_freeze_count()
    gc.get_freeze_count = functools.wraps(gc.get_freeze_count)(lambda: counted)


def build_what_is_kept(commands: Iterable[str]) -> None:
    """Build what is slow to build and kept from its first use on: parsers of a run and of commands, templates."""
    importlib.import_module("birthmark.trainer.config_file").build_config({})
    for name in commands:
        importlib.import_module("birthmark.launch.command_table").command_parser(name)
    templates = importlib.import_module("birthmark.report.html_page")._environment()
    for name in templates.list_templates():
        templates.get_template(name)


def _import_once() -> None:
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    build_what_is_kept(["pretrain"])
    # Children that collect garbage need not look through all libraries.
    freeze_what_exists()


def _received(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """What a start asks for: arguments, folder, environment, and its three channels."""
    size, channels, _, _ = socket.recv_fds(connection, 8, 3)
    start = b""
    while len(start) < int.from_bytes(size, "little"):
        start += connection.recv(1 << 20)
    return *json.loads(start), channels


def _enter(folder: str, environment: dict[str, str], channels: list[int], executable: Path) -> None:
    """Become, in the forked process, what the start would have been."""
    for number, channel in enumerate(channels):
        os.dup2(channel, number)
        os.close(channel)
    # As Python opens them: those of the server are of its channels, which may be files where these are pipes.
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if os.isatty(1) else -1, "utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(executable)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    if "SNAPSHOT_PAGES" not in environment:
        sys.modules["birthmark.report.run_page"].build_snapshot_page = lambda folder: None  # type: ignore[attr-defined]
    import torch

    # Read by the library when it is loaded.
    if (threads := int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1))) != torch.get_num_threads():
        torch.set_num_threads(threads)


def serve(folder: Path) -> list[str] | None:
    """Fork a process for each start of ``folder/python`` until standard input ends.

    Returns:
        In a forked process, a Python's arguments; None in the server, at its end.
    """
    events = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    write_programs(folder, str(folder / "socket"))
    events.register(listener, selectors.EVENT_READ)
    events.register(0, selectors.EVENT_READ)
    imported = False
    #: By the connection of a start: process, and the descriptor that tells of its end.
    running: dict[socket.socket, tuple[int, int]] = {}
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                if not imported:
                    _import_once()
                    imported = True
                connection = listener.accept()[0]
                arguments, there, environment, channels = _received(connection)
                if not (pid := os.fork()):
                    events.close()
                    for other in (listener, connection, *running):
                        other.close()
                    for _, ending in running.values():
                        os.close(ending)
                    _enter(there, environment, channels, folder / "python")
                    return arguments
                for channel in channels:
                    os.close(channel)
                running[connection] = pid, os.pidfd_open(pid)
                connection.sendall(f"{pid}\n".encode())
                events.register(connection, selectors.EVENT_READ)
                events.register(running[connection][1], selectors.EVENT_READ, connection)
            elif isinstance(connection := key.data, socket.socket):
                pid, ending = running.pop(connection)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                events.unregister(ending)
                os.close(ending)
                if connection in events.get_map():
                    events.unregister(connection)
                    connection.sendall(f"{status}\n".encode())
                connection.close()
            else:
                # Who asked for it was killed.
                os.kill(running[key.fileobj][0], signal.SIGKILL)
                events.unregister(key.fileobj)


def write_programs(folder: Path, address: str) -> None:
    """Write ``python``, and what lies beside the one that runs: its scripts as starts, programs as links."""

    def write(name: str, prefix: list[str]) -> None:
        signals = [int(number) for number in PASSED_ON]
        text = _CLIENT.format(python=sys.executable, signals=signals, address=address, prefix=prefix)
        # Whoever waits for the file finds it whole.
        (folder / f".{name}").write_text(text)
        (folder / f".{name}").chmod(0o755)
        (folder / f".{name}").rename(folder / name)

    for file in Path(sys.executable).parent.iterdir():
        if file.is_file() and not file.name.startswith("python"):
            with file.open("rb") as opened:
                is_script = b"python" in opened.readline(200)
            if is_script:
                write(file.name, [str(file)])
            else:
                (folder / file.name).symlink_to(file)
    write("python", [])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    arguments = serve(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    if arguments is not None:
        _run(arguments)
