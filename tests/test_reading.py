from __future__ import annotations

import json
import math
import ntpath
import os
import posixpath
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from birthmark import files
from birthmark.errors import RunError, UsageError
from birthmark.files import (
    find_folder,
    parse_json,
    path_below,
    read_json,
    read_sealed_json,
    read_text,
    write_sealed_json,
)
from birthmark.trainer.config_file import read_config
from birthmark.yaml_files import ValueLoader, parse_yaml, read_yaml, yaml_text


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda file: None, "missing"),
        (lambda file: file.mkdir(), "is a folder, not a file"),
        (os.mkfifo, "is a pipe, not a file"),
        (lambda file: file.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda file: file.symlink_to(file), "cannot be read (Too many levels of symbolic links)"),
        (lambda file: file.write_bytes(b"\xff"), "not UTF-8 text (byte 0)"),
        (lambda file: file.write_bytes(b"12345"), "has 5 bytes, and 4 are read at most"),
    ],
)
def test_what_is_no_file_of_text_is_refused_by_name(place, message, tmp_path):
    place(tmp_path / "it")
    with pytest.raises(RunError) as error:
        read_text(tmp_path / "it", 4)
    assert str(error.value).startswith(f"{tmp_path / 'it'}: {message}")


def test_the_working_folder_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder(Path()) == Path()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 51 + "]" * 51,
        "[" * 100_000,
        '{"a":' * 100_000,
        "NaN",
        "1" * 5000,
        "{",
        "",
        r'{"a": ["\ud800"]}',
        r'{"\uDC00": 1}',
    ],
)
def test_json_is_strict_and_shallow(text):
    assert parse_json("[" * 50 + "]" * 50)
    assert parse_json(r'"\ud83d\ude00"') == "\N{GRINNING FACE}"
    with pytest.raises(ValueError):  # noqa: PT011, the reason is the parser's own
        parse_json(text)


def test_json_has_a_bound_of_values(monkeypatch):
    """Three bytes may hold a list of ninety: they are counted before they are built."""
    monkeypatch.setattr(files, "MOST_MARKS", 9)
    assert parse_json("[[],[],[],[{}]]") == [[], [], [], [{}]]
    for text in ("[[],[],[],[],[]]", '{"a": 1, "b": [2, 3, 4, 5, 6, 7, 8, 9, 10]}', "[[[[[[[[[[]]]]]]]]]]"):
        with pytest.raises(ValueError, match=r"^holds more than 9 commas and brackets$"):
            parse_json(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 1}', '[{"b": {"a": 1, "\\u0061": 2}}]'])
def test_json_says_a_name_once_where_readers_must_agree(text):
    assert parse_json(text)
    with pytest.raises(ValueError, match=r"^an object has the key 'a' twice$"):
        parse_json(text, unrepeated=True)


def test_a_sealed_file_says_when_it_was_changed(tmp_path):
    file = tmp_path / "it.json"
    write_sealed_json(file, {"b": 1.5, "a": {"ü": [float("nan"), 2]}})
    sound = {"b": 1.5, "a": {"ü": [None, 2]}}
    assert read_sealed_json(file, dict) == sound
    # An older file has no checksum.
    file.write_text(json.dumps(sound))
    assert read_sealed_json(file, dict) == sound
    write_sealed_json(file, sound)
    file.write_text(file.read_text().replace("1.5", "1.6"))
    with pytest.raises(RunError, match=r"it\.json: damaged \(its SHA-256 is not the one in it\); mend it"):
        read_sealed_json(file, dict, "mend it")


def test_a_schema_is_named_with_the_file(tmp_path):
    (tmp_path / "it.json").write_text("[1]")
    with pytest.raises(RunError, match=r"it\.json: damaged \(the whole is \[1\], not an object\); mend it"):
        read_json(tmp_path / "it.json", dict, "mend it")


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_BOMB, "more than 65,536 values (line 5)"),
        ("a: &a [*a]", "*a stands inside of itself"),
        ("[" * 900, "nested more than 50 deep (line 1)"),
        # The parser has a limit too, since PyYAML 6.0.4.
        ("[" * 200_000, ("nested more than 50 deep (line 1)", "exceeded maximum nesting depth, line 1")),
        ("a: 1\nb: 2\na: 3", "a stands twice (line 1 and below)"),
        ("[1, 2]: 3", "a list or a group is a name (line 1)"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor for the tag"),
        ("a: !!timestamp notes", "could not determine a constructor for the tag 'tag:yaml.org,2002:timestamp', line 1"),
        ("a: !!set {b}", "could not determine a constructor for the tag 'tag:yaml.org,2002:set', line 1"),
        ("b: 1\na: !!bool maybe", "'maybe' is no bool, line 2"),
        ('a: !!float ""', "'' is no float, line 1"),
        ("a: !!float '1:2'", "'1:2' is no float, line 1"),
        ("a: !!int 1_0", "'1_0' is no int, line 1"),
        ("a: !!null no", "'no' is no null, line 1"),
        ("a: !!map [1]", "expected a mapping node, but found sequence, line 1"),
        ("a: &a {k: 1}\nb: {<<: *a, <<: *a}", "<< stands twice (line 2 and below)"),
        ("a: &a {k: 1}\nb: {<<: *a, c: 1, c: 2}", "c stands twice (line 2 and below)"),
        ("b: {<<: [1]}", "<< takes a group, or a list of groups, line 1"),
    ],
)
def test_yaml_that_would_take_the_machine_is_refused_before_it_is_built(text, message, tmp_path):
    file = tmp_path / "it.yaml"
    file.write_text(text)
    start = time.monotonic()
    with pytest.raises(UsageError) as error:
        read_yaml(file)
    messages = (message,) if isinstance(message, str) else message
    assert str(error.value).startswith(tuple(f"{file}: not YAML ({one}" for one in messages))
    assert time.monotonic() - start < 20


def _as_options(text, where):
    del where
    return yaml.load(text, Loader=ValueLoader)


#: By the rules of merges: a mapping's own keys win, and of a list the earlier mapping.
MERGES = {
    "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nsame: *base": {
        "base": {"a": 1, "b": 2},
        "more": {"a": 1, "b": 3},
        "same": {"a": 1, "b": 2},
    },
    "base: &b {rate: 0}\nx:\n  y: &a {<<: *b, rate: 1}\nc: {<<: *a}": {
        "base": {"rate": 0},
        "x": {"y": {"rate": 1}},
        "c": {"rate": 1},
    },
    "b: &b {k: 0}\na: &a {<<: *b, k: 1}\nz: {<<: *a}": {"b": {"k": 0}, "a": {"k": 1}, "z": {"k": 1}},
    "a: &a {k: 0}\nb: &b {k: 1, l: 1}\nc: {<<: [*a, *b], m: 2}": {
        "a": {"k": 0},
        "b": {"k": 1, "l": 1},
        "c": {"k": 0, "l": 1, "m": 2},
    },
}


@pytest.mark.parametrize("read", [parse_yaml, _as_options])
@pytest.mark.parametrize("text", MERGES)
def test_aliases_and_merges_of_ordinary_size_are_yaml(text, read):
    assert read(text, "it") == MERGES[text]


def test_values_with_the_tags_of_the_core_schema_are_yaml():
    text = "{a: !!str 3, b: !!int 3, c: !!float 3, d: !!bool true, e: !!null '', f: !!seq [1], g: !!map {b: 1}}"
    found = parse_yaml(text, "it")
    assert found == {"a": "3", "b": 3, "c": 3.0, "d": True, "e": None, "f": [1], "g": {"b": 1}}
    assert isinstance(found["c"], float)


# ── names from outside ───────────────────────────────────────────────────────────────────────────────────────────────

#: Pieces of names that lead elsewhere, and of ones that do not.
_PIECES = st.sampled_from(
    ["a", "b.txt", "..", ".", "", "/", "\\", "C:", "\0", "\n", "\x7f", "\ud800", "é", "x" * 256, "a" * 90]
)


@given(pieces=st.lists(_PIECES, min_size=1, max_size=60), joint=st.sampled_from(["/", "", "\\"]), nested=st.booleans())
def test_a_name_from_outside_stays_below_its_folder_or_is_refused(pieces, joint, nested):
    key, folder = joint.join(pieces), Path("/srv/folder")
    try:
        found = path_below(folder, key, ValueError, nested=nested)
    except ValueError as error:
        said = str(error)
        assert said.endswith(("outside of this folder", "which cannot be a file's name"))
        assert said.isprintable()
        return
    # As the system and Windows resolve it, without a look at the disk.
    assert posixpath.normpath(f"{folder}/{key}") == str(found)
    windows = ntpath.normpath(ntpath.join("D:\\srv\\folder", key))
    assert windows == "D:\\srv\\folder\\" + key.replace("/", "\\")
    assert nested or "/" not in key
    found.relative_to(folder).as_posix().encode()
    assert key.isprintable()
    assert all(0 < len(part.encode()) <= 255 for part in key.split("/"))


@pytest.mark.parametrize("key", ["a.txt", "model-00001-of-00002.safetensors", "é.txt", "a b", ".hidden", "x" * 255])
def test_the_name_of_a_file_is_taken(key):
    assert path_below(Path("f"), key, ValueError) == Path("f") / key
    assert path_below(Path("f"), f"g/{key}", ValueError, nested=True) == Path("f/g") / key


#: Plain values by the core schema of YAML 1.2, from its specification (§10.3.2), where YAML 1.1 says otherwise.
CORE = {
    "1:30:00": "1:30:00",
    "010": 10,
    "no": "no",
    "yes": "yes",
    "1e-3": 0.001,
    "12e03": 12000.0,
    "2001-01-01": "2001-01-01",
    "0x1F": 31,
    "0o17": 15,
    "-0x1F": "-0x1F",
    "1_000": "1_000",
    "0b11": "0b11",
    "+12": 12,
    ".5": 0.5,
    "-.inf": -math.inf,
    "TRUE": True,
    "~": None,
    "": None,
}


@pytest.mark.parametrize("text", CORE)
def test_plain_values_are_those_of_yaml_1_2(text):
    assert parse_yaml(f"a: {text}", "it") == {"a": CORE[text]}
    found = yaml.load(text, Loader=ValueLoader)
    assert (found, type(found)) == (CORE[text], type(CORE[text]))


def test_written_yaml_reads_alike_by_either_schema():
    value = {text: text for text in CORE} | {"numbers": [1, 1e-5, 1e16, math.inf, True, None, 0.1]}
    text = yaml_text(value)
    assert parse_yaml(text, "it") == yaml.safe_load(text) == value


def test_a_seed_in_base_60_is_refused_in_files_and_options(tmp_path):
    for in_file, options in (("1:30:00", {}), ("3", {"init_seed": "1:30:00"})):
        file = tmp_path / "it.yaml"
        file.write_text(f"init_seed: {in_file}\n")
        with pytest.raises(UsageError, match="init_seed: '1:30:00' is not a whole number"):
            read_config(file, options)
