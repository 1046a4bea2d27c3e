"""Cases of what surrounds a command: devices, folders and repositories of others, servers, rights, clocks."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import devices
from case import Case, Must
from file_cases import PROBE
from web_server import ANSWERS, LISTINGS

_PARTS = ("run", "theirs", "measured", "corpus", "cache", "tiny.yaml", "study.yaml", "stated.json")
_PRETRAIN = ("pretrain", "--config", "tiny.yaml", "--run_dir", "second", "--trainer.max_steps", "2")


def _again(arguments: tuple[str, ...]) -> Callable[[Path], tuple[str, ...]]:
    """The same command once more, as a person would who reads the message: a run that was born goes on."""

    def then(folder: Path) -> tuple[str, ...]:
        born = arguments is _PRETRAIN and (folder / "second" / "birth.json").exists()
        return ("pretrain", "--resume", "second") if born else arguments

    return then


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Commands that write, with what they write and how often each is drawn.
_WRITERS: tuple[tuple[tuple[str, ...], str, float], ...] = (
    (_PRETRAIN, "second", 2),
    (("export", "run", "new"), "new", 2),
    (("certify", "run", "--out", "new.json"), "new.json", 2),
    (("snapshot", "run", "--out", "new", *PROBE), "new", 2),
    (("report", "run", "--out", "new.html"), "new", 1),
    (("figure", "run", "loss", "--out", "new.png"), "new.png", 1),
    (("birth", "tiny.yaml", "--out", "new"), "new", 2),
    (("tokenise", "tiny.yaml", "--set", "data.cache_dir=new"), "new", 2),
    (("fingerprint", "run", "run@0", "--n_inputs", "20", "--cache_dir", "new"), "new", 1),
)


def device(rng: random.Random, example: Path) -> Case:
    """A device under a command's output that takes so many bytes and no more."""
    arguments, out, _ = rng.choices(_WRITERS, [weight for *_, weight in _WRITERS])[0]
    after, reason = int(2 ** rng.uniform(0, 18)) - 1, rng.choice([*devices.REASONS, "limit"])

    def begin() -> None:
        limit = reason == "limit"
        (devices.limits_files(max(after, 1 << 12)) if limit else devices.fails(reason, after, Path.cwd()))()

    def then(folder: Path) -> tuple[str, ...]:
        # Exports replace no folder; what was written whole stays.
        if arguments[0] in ("export", "birth", "snapshot", "certify") and (folder / out).exists():
            return ("describe", "tiny.yaml")
        return _again(arguments)(folder)

    words = (out, "second", "new", "cache", "data.cache_dir", "tmp", "certificate")
    about = f"{' '.join(arguments)[:60]}: {reason} after {after} bytes"
    return Case(about, _PARTS, lambda folder: "any", arguments, words, begin, then, _nothing_half)


def _nothing_half(folder: Path) -> list[str]:
    """Leftovers of writers that did not die: what fails takes away what it needed on the way."""
    left = [path for path in folder.rglob(".*") if path.is_dir() and path.name.endswith((".deleted", ".replaced"))]
    return [f"left over: {', '.join(str(path.relative_to(folder)) for path in left[:3])}"] if left else []


# ── folders and repositories of others ───────────────────────────────────────────────────────────────────────────────

_MODULES = ("resource", "torch", "safetensors", "numpy", "json", "yaml", "sitecustomize", "usercustomize", "matplotlib")
_IN_FOLDERS: tuple[tuple[str, ...], ...] = (
    _PRETRAIN,
    ("describe", "tiny.yaml"),
    ("report", "run", "--json"),
    ("snapshot", "run", "--json", *PROBE),
    ("export", "run", "new"),
    ("audit", "suite"),
    ("data", "tiny.yaml", "--step", "1", "--json"),
    ("certify", "run", "--out", "new.json"),
)


def hostile_folder(rng: random.Random, example: Path) -> Case:
    """A working folder that has modules with the names of installed ones, and is a repository with a monitor."""
    arguments = rng.choice(_IN_FOLDERS)
    # An audit starts several more, each of which imports all.
    fresh = rng.random() < 0.15 and arguments[0] not in ("audit", "pretrain")
    modules = rng.sample(_MODULES, 4)
    kind = rng.choice(["fsmonitor", "hooks", "filter", "none"])

    def prepare(folder: Path) -> Must:
        mark = f"{folder}/../watched/code"
        for name in modules:
            (folder / f"{name}.py").write_text(f"open({mark!r}, 'w').close()\nraise ImportError({name!r})\n")
            shutil.copyfile(folder / f"{name}.py", folder / "run" / f"{name}.py")
        _suite(folder)
        if kind != "none":
            _repository(folder, kind, mark)
        return "any" if arguments[0] in ("audit", "certify", "pretrain") else "well"

    about = f"{' '.join(arguments)[:60]} beside {', '.join(modules)}, {kind}{' in a new Python' if fresh else ''}"

    def check(folder: Path) -> list[str]:
        return ["no code of the folder, and yet it is run"] if (folder / "../watched/code").exists() else []

    return Case(about, _PARTS, prepare, arguments, ("run", "tiny.yaml"), check=check, fresh=fresh, then=_ends_well)


def _ends_well(folder: Path) -> tuple[str, ...]:
    return ("describe", "tiny.yaml")


def _suite(folder: Path) -> None:
    """A suite of pickled weights, which are read by a Python of its own."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(folder / "theirs" / "model.safetensors")
    for step in (1, 2):
        place = folder / "suite" / f"step-{step}"
        place.mkdir(parents=True)
        shutil.copyfile(folder / "theirs" / "config.json", place / "config.json")
        torch.save(weights, place / "pytorch_model.bin")


def _repository(folder: Path, kind: str, mark: str) -> None:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ntouch '{mark}'\ncat\n")
    program.chmod(0o755)
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    calls = [["init", "-q"], ["add", "tiny.yaml", "corpus"], ["commit", "-qm", "first"]]
    configured = {
        "fsmonitor": [["config", "core.fsmonitor", str(program)]],
        "hooks": [["config", "core.hooksPath", str(folder)]],
        "filter": [["config", "filter.x.clean", str(program)], ["config", "filter.x.process", str(program)]],
    }
    for words in [*calls, *configured[kind]]:
        subprocess.run([*git, *words], check=True, capture_output=True)
    if kind == "hooks":
        for name in ("post-index-change", "pre-commit", "post-checkout", "fsmonitor-watchman"):
            shutil.copy(program, folder / name)
    if kind == "filter":
        (folder / ".gitattributes").write_text("* filter=x\n")
    # Files look changed, so that their content must be compared.
    for file in (folder / "corpus").iterdir():
        os.utime(file, (1, 1))


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def web(rng: random.Random, example: Path) -> Case:
    """A corpus on a web server whose listing, redirects, lengths or bodies are strange."""
    way = rng.choice([*LISTINGS, *ANSWERS])
    port = (example / "port").read_text()
    place = way.replace(" ", "_") + ("/" if way in LISTINGS or rng.random() < 0.5 else "/a.txt")
    url = f"http://127.0.0.1:{port}/{place}"
    fields = [f"data.path={url}", "data.timeout_s=2"]

    def around() -> None:
        from birthmark.data import remote

        # As a gigabyte that comes from a network, but sooner.
        remote.MOST_UNSTATED, remote._BACK_OFF_S = 1 << 22, 0.01

    def prepare(folder: Path) -> Must:
        return "any" if way in (*LISTINGS, "too long", "nothing at all") else "refuse"

    arguments = ("data", "tiny.yaml", "--set", *fields, "--step", "1", "--json")
    return Case(f"a server: {way}", ("tiny.yaml",), prepare, arguments, ("data.path", "a.txt"), around, check=_below)


def _below(folder: Path) -> list[str]:
    """Links of a cache that lead out of it."""
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    out = [path for path in links if not path.resolve().is_relative_to(folder.resolve())]
    return [f"a link out of the folder: {path}" for path in out[:3]]


# ── files that change, rights and clocks ─────────────────────────────────────────────────────────────────────────────

_READERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("report", "run", "--json"), "run/metrics.jsonl"),
    (("report", "measured", "--json"), "measured/arrays.safetensors"),
    (("snapshot", "theirs", "--json", *PROBE), "theirs/model.safetensors"),
    (("snapshot", "run", "--json", *PROBE), "run/checkpoints/step-00000004/tensors.safetensors"),
    (("data", "tiny.yaml", "--step", "1", "--json"), "corpus/0.txt"),
    (("verify", "stated.json", "run"), "run/checkpoints/step-00000004/tensors.safetensors"),
    (("export", "run", "new"), "run/tokenizer.json"),
)


def growing(rng: random.Random, example: Path) -> Case:
    """A file that another process makes longer, or shorter and longer, while it is read."""
    arguments, name = rng.choice(_READERS)
    shrinks, content = rng.random() < 0.3, rng.choice([b"a line of text\n", b"\0" * 64, b'{"step": 9}\n'])

    def around() -> None:
        if os.fork():
            return
        end = time.monotonic() + 8
        try:
            with Path(name).open("r+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                while time.monotonic() < end:
                    file.write(content * 100)
                    if shrinks and file.tell() > size + 10_000:
                        file.truncate(size // 2)
                        file.seek(0, os.SEEK_END)
                    time.sleep(0.0005)
        finally:
            os._exit(0)

    about = f"{name} {'shrinks and grows' if shrinks else 'grows'} by {content[:8]!r}"
    words = (Path(name).name, Path(name).parent.name, "data.path", "run")
    return Case(about, _PARTS, lambda folder: "any", arguments, words, around)


_NOBODY = 65534
_ONLY_READ: tuple[tuple[str, ...], ...] = (
    ("report", "run", "--json"),
    ("snapshot", "run", "--json", *PROBE),
    ("sample", "run", "--prompt", "the"),
    ("describe", "run/config.yaml", "--json"),
    ("compare", "run", "run@0", "--json", *PROBE),
    ("report", "measured", "--json"),
)


def read_only(rng: random.Random, example: Path) -> Case:
    """Folders that this user may only read, as a colleague's on a cluster: what only reads does what it always does."""
    arguments = rng.choice(_ONLY_READ)

    def prepare(folder: Path) -> Must:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return "well"

    words = (*arguments[1:2], "cache")
    about = f"{' '.join(arguments)[:60]} of folders that are read-only"
    return Case(about, _PARTS, prepare, arguments, words, _become_nobody, check=_writable_again)


def _writable_again(folder: Path) -> list[str]:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return []


def _become_nobody() -> None:
    if os.getuid() == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def modes(rng: random.Random, example: Path) -> Case:
    """One file or folder that this user may not read, or a umask; what is written has the umask's mode, everywhere."""
    if rng.random() < 0.5:
        return _umask(rng)
    arguments, name = rng.choice(_READERS)
    place = rng.choice([name, str(Path(name).parent)])

    def prepare(folder: Path) -> Must:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        (folder / place).chmod(0)
        return "any"

    def check(folder: Path) -> list[str]:
        (folder / place).chmod(0o755)
        return []

    words = (Path(name).name, Path(name).parent.name, Path(place).name, "run", "data.path")
    about = f"{' '.join(arguments)[:60]}, {place} cannot be read"
    return Case(about, _PARTS, prepare, arguments, words, _become_nobody, check=check)


def _umask(rng: random.Random) -> Case:
    arguments, out, _ = rng.choice(_WRITERS)
    mask = rng.choice([0o022, 0o002, 0o077, 0o027])

    def check(folder: Path) -> list[str]:
        found = [path for path in folder.glob(f"{out}*/**/*") if path.is_file() and not path.is_symlink()]
        found += [path for path in folder.glob(f"{out}*") if path.is_file()]
        seen = {path: stat.S_IMODE(path.stat().st_mode) for path in found if not path.name.endswith(".lock")}
        private = [path for path in seen if path.name == "certificate.secret.json" or ".secret." in path.name]
        wrong = {path: mode for path, mode in seen.items() if mode | 0o111 != (0o666 & ~mask) | 0o111}
        return [
            f"mode {mode:o} of {path.relative_to(folder)} under umask {mask:o}"
            for path, mode in wrong.items()
            if path not in private
        ][:3]

    about = f"{' '.join(arguments)[:60]} under umask {mask:o}"
    return Case(about, _PARTS, lambda folder: "any", arguments, (out,), lambda: _set_umask(mask), check=check)


def _set_umask(mask: int) -> None:
    os.umask(mask)


def clock(rng: random.Random, example: Path) -> Case:
    """A wall clock or times of files that are far off, or run backwards: what is said is the same."""
    arguments, name = rng.choice(_READERS)
    at, backwards = rng.choice([0.0, 1.0, 4e9, 1e10, 2.5e11]), rng.random() < 0.3
    of_files = rng.random() < 0.5

    def prepare(folder: Path) -> Must:
        if of_files:
            for path in folder.rglob("*"):
                os.utime(path, (at, at))
        return "well"

    def around() -> None:
        if of_files:
            return
        real, start = time.time, time.time()
        sign = -1 if backwards else 1
        time.time = lambda: at + sign * (real() - start) * (1000 if backwards else 1)

    what = "times of files" if of_files else "a clock that runs backwards from" if backwards else "a clock at"
    words = (Path(name).name, "run")
    return Case(f"{' '.join(arguments)[:60]}, {what} {at:g}", _PARTS, prepare, arguments, words, around)
