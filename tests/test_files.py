"""What a process leaves that is killed while it writes, and what has reached the disk when a name appears.

One process writes the same things again and again, in forks. The n-th fork is killed before its n-th call that changes
a name or flushes something, for every n there is.
"""

import ast
import csv
import errno
import io
import json
import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import birthmark
from birthmark.errors import RunError, UsageError
from birthmark.files import check_no_holes, check_tensor_file, csv_text, make_folder, user_path, write_text
from birthmark.messages import for_terminal, reason_of

PROGRAM = """
import json, os, shutil, signal, sys, time
from pathlib import Path
import numpy as np
import torch
from birthmark.files import atomic_path
from birthmark.measure.records import RunDir, Snapshot
from birthmark.trainer.checkpoints.stored_tensors import CheckpointFolder, StoredTensor
from birthmark.trainer.checkpoints.writer import BackgroundWriter

folder = Path(sys.argv[1])
run = RunDir(folder / "run")
torch.set_num_threads(1)

def write_snapshot(value):
    run.write_snapshot(Snapshot({"step": 8, "bias": {"x": value}}, {"a": np.full(3, value)}))

def read_snapshot():
    (snapshot,) = run.snapshots()
    assert list(snapshot.arrays["a"]) == 3 * [snapshot.bias["x"]]
    return snapshot.bias["x"]

def write_checkpoint(value):
    run.remove_leftovers()
    state = {"global_step": 8, "v": value, "w": torch.full((3,), value)}
    BackgroundWriter().save(state, run.checkpoint(8), shared=False)

def read_checkpoint():
    ((step, path),) = run.checkpoints_by_step().items()
    checkpoint = CheckpointFolder(path)
    checkpoint.verify()
    found = checkpoint.tree(StoredTensor.whole)
    assert step == 8 and found["w"].eq(found["v"]).all()
    return found["v"]

def write_file(value):
    run.remove_leftovers()
    with atomic_path(run.config) as new:
        new.write_text(str(value))

KINDS = {
    "snapshot": (write_snapshot, read_snapshot, "snapshots"),
    "checkpoint": (write_checkpoint, read_checkpoint, "checkpoints"),
    "file": (write_file, lambda: float(run.config.read_text()), "."),
}
CALLS = ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink")
os.fsync = lambda descriptor: None  # what is asked for counts here; the disk's time does not
real = {name: getattr(os, name) for name in CALLS}

def in_fork(act, before):
    # The status of a fork that calls act, with before(name, arguments) ahead of each of the CALLS.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    for name in CALLS:
        setattr(os, name, lambda *a, _name=name, **k: (before(_name, a), real[_name](*a, **k))[1])
    act()
    os._exit(0)

def killer(n):
    left = [n]
    def before(name, arguments):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return before

def listed(place):
    return sorted(path.relative_to(run.path / place).as_posix() for path in (run.path / place).rglob("*"))

results = {}
for kind, (write, read, place) in KINDS.items():
    found = []
    for first in (True, False):
        n, status = 0, signal.SIGKILL
        while status == signal.SIGKILL:
            shutil.rmtree(run.path, ignore_errors=True)
            if not first:
                write(1.0)
            status = in_fork(lambda: write(2.0), killer(n))
            try:
                seen = read()
            except (ValueError, FileNotFoundError):  # nothing there
                seen = None
            write(3.0)
            found.append([first, status, seen, read(), listed(place)])
            n += 1
    results[kind] = found

# ── what is flushed, and when ──

calls = []
def note(name, arguments):
    if name == "fsync":
        calls.append(["fsync", os.fstat(arguments[0]).st_ino])
    elif name in ("rename", "replace"):
        old, new = map(Path, arguments)
        inside = [old, *old.rglob("*")] if old.is_dir() else [old]
        calls.append([name, str(new), new.parent.stat().st_ino, {path.name: path.stat().st_ino for path in inside}])

def noting(write):
    def act():
        write(4.0)
        (folder / "calls.json").write_text(json.dumps(calls))
    return act

flushed = {}
for kind, (write, read, place) in KINDS.items():
    assert in_fork(noting(write), note) == 0
    flushed[kind] = json.loads((folder / "calls.json").read_text())

# ── two that write at once ──

shutil.rmtree(run.path)
begun, go_on = os.pipe(), os.pipe()
if not (slow := os.fork()):
    def wait(descriptor):
        os.write(begun[1], b"x")
        os.read(go_on[0], 1)
        os.fsync = lambda descriptor: None
    run.write_snapshot(Snapshot({"step": 1, "bias": {}}, {}))
    os.fsync = wait
    run.write_snapshot(Snapshot({"step": 4, "bias": {}}, {"a": np.ones(3)}))
    os._exit(0)
os.read(begun[0], 1)
if not (other := os.fork()):
    write_snapshot(5.0)
    os._exit(0)
time.sleep(0.3)
halfway = listed("snapshots")
os.write(go_on[1], b"x")
statuses = [os.waitpid(child, 0)[1] for child in (slow, other)]
two = {"halfway": halfway, "statuses": statuses, "steps": [snapshot.step for snapshot in run.snapshots()]}

print(json.dumps({"killed": results, "flushed": flushed, "two": two}))
"""

EXPECTED = {
    "snapshot": ["step-00000008", "step-00000008/arrays.safetensors", "step-00000008/summary.json"],
    "checkpoint": ["step-00000008", "step-00000008/state.json", "step-00000008/tensors.safetensors"],
    "file": ["config.yaml"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, python):
    command = [python, "-c", PROGRAM, str(tmp_path_factory.mktemp("killed"))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("kind", EXPECTED)
def test_killed_at_any_moment_a_reader_finds_all_of_the_old_or_all_of_the_new(results, kind):
    killed = results["killed"][kind]
    assert sum(status == 9 for _, status, *_ in killed) > 8  # kills that happened
    for first in (True, False):
        seen = [value for its_first, _, value, *_ in killed if its_first == first]
        switch = seen.index(2.0)
        assert seen == switch * [None if first else 1.0] + (len(seen) - switch) * [2.0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_killed_at_any_moment_the_next_write_works_and_leaves_nothing_else(results, kind):
    for *_, value, listed in results["killed"][kind]:
        assert value == 3.0
        assert listed == EXPECTED[kind]


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_name_appears_when_its_content_is_on_the_disk_and_is_itself_flushed(results, kind):
    calls, published = results["flushed"][kind], []
    for at, (name, *facts) in enumerate(calls):
        if name == "fsync" or "/." in facts[0]:  # of hidden names nobody asks
            continue
        _, parent, inodes = facts
        synced = [inode for other, inode, *_ in calls[:at] if other == "fsync"]
        assert [name for name, inode in inodes.items() if inode not in synced] == []
        later = [facts[0] for other, *facts in calls[at:] if other == "fsync"]
        assert parent in later
        published.append(facts[0].rpartition("/")[2])
    assert published == [name for name in EXPECTED[kind] if name in ("step-00000008", "config.yaml")]


def test_what_a_living_process_is_writing_is_no_leftover(results):
    two = results["two"]
    assert any(name.endswith("/new/arrays.safetensors") for name in two["halfway"])
    assert two["statuses"] == [0, 0]
    assert two["steps"] == [1, 4, 8]


def test_what_a_library_says_is_passed_on_without_names_of_classes():
    error = OSError("Couldn't deserialize thrift: TProtocolException: Invalid\n data in http.client.IncompleteRead")
    assert reason_of(error) == "Couldn't deserialize thrift: Invalid data in http.client.IncompleteRead"
    assert reason_of(ValueError("")) == reason_of(ValueError("builtins.ValueError")) == "its library says no more"


def test_a_file_never_takes_the_place_of_a_folder(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "kept").write_text("of the user")
    with pytest.raises(UsageError, match=r"results: is a folder, where a file is to be written; name a file"):
        write_text(folder, "a page")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert (folder / "kept").read_text() == "of the user"


def test_a_spreadsheet_computes_no_cell_and_numbers_stay_numbers():
    computed = ["=1+1", '=HYPERLINK("http://x","y")', "+1+1", "-1+1", "@SUM(A1)", "\t=1", "＝1+1", "-"]
    plain = ["a=1", "", "'=1", "step-1", "a,b", 'say "x"', "two\nlines"]
    numbers = ["-0.5", "+1e-05", "-3", "-inf", "-.5", -0.5, -3, float("-inf"), 1e-7, True]
    rows = [computed, plain, numbers, [None]]
    read = list(csv.reader(io.StringIO(csv_text(rows), newline="")))
    assert read == [[f"'{text}" for text in computed], plain, [str(number) for number in numbers], [""]]
    assert csv_text([["\r=1+1"]]) == "\\r=1+1\n"
    # Cells that were read from such a file and are written again stay as they are.
    assert csv_text(read) == csv_text(rows)


def test_every_csv_is_written_by_one_function():
    root = Path(__file__).parent.parent
    rooms = [path for path in root.iterdir() if path.is_dir() and path.name not in ("tests", ".venv")]
    writers = [
        file.relative_to(root).as_posix()
        for file in [*root.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("csv", "writer"), ("csv", "DictWriter")}
    ]
    assert writers == ["files.py"]


def test_every_safetensors_file_is_written_by_the_one_function_that_heeds_the_umask():
    root = Path(birthmark.__file__).resolve().parent
    others = ("tests", "benchmarks", "research", ".venv", "build")
    found = []
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] in others:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "save_file":
                found.append(f"{file.relative_to(root)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("use", [user_path, make_folder, lambda path: write_text(path, "x")])
def test_a_path_with_a_nul_character_is_refused_in_one_line(tmp_path, use):
    with pytest.raises(UsageError, match=r"a\\x00b: a path cannot hold a NUL character"):
        use(tmp_path / "a\0b")


#: Bytes that a file says that it has, and that no disk has to hold.
_GIANT = 16 << 30


def _end_in_a_hole(path):
    with path.open("r+b") as file:
        file.truncate(_GIANT)


@pytest.mark.parametrize("begin", [b"text", b"text" * (1 << 18)])
def test_a_file_of_a_corpus_that_is_a_hole_is_refused_before_it_is_read(tmp_path, begin):
    path = tmp_path / "a.txt"
    path.write_bytes(begin)
    check_no_holes(path)
    _end_in_a_hole(path)
    with path.open("r+b") as file:
        file.seek(_GIANT // 2)
        file.write(b"more")
    with pytest.raises(UsageError, match=r"a\.txt: has 17,179,869,184 bytes, of which [0-9,]+ or more are a hole"):
        check_no_holes(path, UsageError)


def test_zeros_that_were_written_and_short_holes_are_no_hole(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(4 << 20))
    with path.open("ab") as file:
        for _ in range(8):
            file.seek(1 << 16, 1)
            file.write(b"x")
    check_no_holes(path)


def test_tensors_are_as_long_as_their_header_and_the_file_beside_it_say(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.int64)}, path)
    check_tensor_file(path, 3 * 4 + 4 * 8)
    with pytest.raises(RunError, match=r"a\.safetensors: damaged \(it has 44 bytes of tensors, not 43\); mend"):
        check_tensor_file(path, 43, "mend")
    size = path.stat().st_size
    _end_in_a_hole(path)
    with pytest.raises(RunError, match=rf"damaged \(it has 17,179,869,184 bytes, and its header says {size}\)"):
        check_tensor_file(path)
    # A header as long as the file, and one that is no JSON.
    for length, words in ((_GIANT - 8, "17,179,869,176 bytes"), (8, "damaged"), (0, "0 bytes")):
        with path.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))
        with pytest.raises(RunError, match=rf"damaged \(its header: .*{words}" if length != 8 else words):
            check_tensor_file(path)


def test_a_terminal_gets_all_of_a_text_but_what_it_would_obey():
    """Persian has zero-width joints, French a narrow space before signs, Japanese a wide one; a file may have CRLF."""
    text = "می\u200cخواهم 1\u202f000 € 語\u3000語 soft\xadhyphen 👨\u200d👩\u200d👧\r\n"
    assert for_terminal(text) == text
    obeyed = "\x1b]52;c;QQ\x07 \x9b2J \u202e \u2066 \r \t \x7f \ud800 \u2028"
    assert for_terminal(obeyed) == obeyed.encode("unicode_escape", "surrogatepass").decode()
    assert for_terminal("a\tb\n", "\n\t") == "a\tb\n"


#: A filter of system calls answers ``flock`` with an error, as a file system without locks does.
NO_LOCKS = """
import ctypes, json, platform, struct, sys
from pathlib import Path

from birthmark.errors import RunError
from birthmark.locks import hold_lock
from birthmark.measure.records import RunDir

def refuse(number):
    flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    load, equals, give = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equals, 0, 1, flock), (give, 0, 0, 0x50000 | number), (give, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()

folder, *numbers = sys.argv[1:]
for number in map(int, numbers):
    refuse(number)
    for holding in (hold_lock(Path(folder) / "a.lock"), RunDir(Path(folder) / "run").claimed()):
        try:
            with holding:
                print("held")
        except RunError as error:
            print(error)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="number of the system call is not known")
def test_a_file_system_without_locks_is_named(tmp_path, python):
    numbers = [errno.EOPNOTSUPP, errno.ENOLCK]
    command = [python, "-c", NO_LOCKS, str(tmp_path), *map(str, numbers)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert said == [
        f"{tmp_path / lock}: cannot be locked ({os.strerror(number)}); mount its file system with locks, or name "
        "another folder"
        for number in numbers
        for lock in ("a.lock", "run/.lock")
    ]
