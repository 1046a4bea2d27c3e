import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from birthmark.data.cache import build_once, file_sha256, file_states
from birthmark.errors import RunError, UsageError

NAME = "shards-0123456789abcdef"


def builder(content=b"content" * 100, calls=None):
    def build(scratch):
        if calls is not None:
            calls.append(scratch)
        path = scratch / "a.bin"
        path.write_bytes(content)
        return {"note": 1, "files": {"a.bin": {"bytes": len(content), "sha256": file_sha256(path)}}}

    return build


def leftovers(folder):
    return [path for path in folder.iterdir() if ".tmp-" in path.name]


def test_a_file_is_named_by_its_place_behind_all_links(tmp_path, monkeypatch):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "one").write_text("one")
    (tmp_path / "folder").symlink_to("a/deep")
    (tmp_path / "two").symlink_to("folder/one")
    monkeypatch.chdir(tmp_path / "a")
    names = ("deep/one", "../folder/one", "../two", "../a/../two", str(tmp_path / "two"))
    found = [name for name, *_ in file_states(list(map(Path, names)))]
    assert found == [os.path.realpath(name) for name in names] == [os.path.realpath("deep/one")] * 5


def test_built_once(tmp_path):
    calls = []
    folder = tmp_path / "deep" / "cache" / NAME
    first = build_once(folder, builder(calls=calls))
    assert build_once(folder, builder(calls=calls)) == first
    assert first["note"] == 1
    assert len(calls) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "meta.json"]
    assert not leftovers(folder.parent)


@pytest.mark.parametrize("verify", ["checksum", "size"])
def test_damage_is_named(tmp_path, verify):
    folder = tmp_path / NAME
    build_once(folder, builder())
    victim = folder / "a.bin"
    content = bytearray(victim.read_bytes())
    content[50] ^= 1
    victim.write_bytes(content)
    if verify == "size":
        build_once(folder, builder(), verify)
    else:
        with pytest.raises(RunError, match=rf"{re.escape(str(victim))}: damaged .*delete this folder"):
            build_once(folder, builder(), verify)
    victim.write_bytes(content[:-1])
    with pytest.raises(RunError, match="699 bytes, not 700"):
        build_once(folder, builder(), verify)
    victim.unlink()
    with pytest.raises(RunError, match=r"a\.bin: missing"):
        build_once(folder, builder(), verify)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", None])
def test_damaged_meta(tmp_path, content):
    folder = tmp_path / NAME
    build_once(folder, builder())
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "note": 2}) if content is None else content)
    with pytest.raises(RunError, match=r"meta\.json: .*delete this folder"):
        build_once(folder, builder())


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(scratch):
        (scratch / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / NAME, fail)
    assert not leftovers(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_dead_builds_are_removed_and_live_ones_are_not(tmp_path):
    dead_same, dead_other = f"{NAME}.tmp-00000000", "tokenizer-00000000000000ff.tmp-00000000"
    live, foreign = "rows-00000000000000aa.tmp-00000000", "notes.tmp-old"
    for name in (dead_same, dead_other, live, foreign):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.bin").write_text("half")
    with FileLock(tmp_path / "rows-00000000000000aa.lock"):
        build_once(tmp_path / NAME, builder())
    assert {path.name for path in leftovers(tmp_path)} == {live, foreign}


def test_threads_wait_for_the_first(tmp_path):
    calls = []
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(build_once(tmp_path / NAME, builder(calls=calls))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [results[0]] * 8


def test_full_disk(python):
    """A limit on file sizes stands in for the disk's end: the same call fails in the same place."""
    code = f"""
import resource, sys, tempfile
from pathlib import Path
from birthmark.data.cache import build_once
from birthmark.errors import RunError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def build(scratch):
    (scratch / "a.bin").write_bytes(bytes(5000))
with tempfile.TemporaryDirectory() as folder:
    try:
        build_once(Path(folder) / "{NAME}", build)
    except RunError as error:
        print(error, [p.name for p in Path(folder).iterdir() if not p.name.endswith(".lock")])
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert "no room left to write" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_cache_dir_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UsageError, match=r"data\.cache_dir: cannot write to"):
        build_once(tmp_path / "file" / NAME, builder())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache(tmp_path):
    build_once(tmp_path / NAME, builder())
    tmp_path.chmod(0o500)
    try:
        assert build_once(tmp_path / NAME, builder())["note"] == 1
        with pytest.raises(UsageError, match=r"data\.cache_dir: cannot write"):
            build_once(tmp_path / NAME.replace("0", "1"), builder())
    finally:
        tmp_path.chmod(0o700)


def test_reuse_writes_nothing(tmp_path):
    """A cache may be shared read-only: reusing it takes no lock and touches no file."""
    build_once(tmp_path / NAME, builder())
    (tmp_path / f"{NAME}.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    build_once(tmp_path / NAME, builder())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
