from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from birthmark.errors import RunError, UsageError
from birthmark.files import find_folder, parse_json, read_json, read_sealed_json, read_text, write_sealed_json
from birthmark.yaml_files import read_yaml


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
        ("[" * 200_000, "nested more than 50 deep (line 1)"),
        ("a: 1\nb: 2\na: 3", "a stands twice (line 1 and below)"),
        ("[1, 2]: 3", "a list or a group is a name (line 1)"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor for the tag"),
        ("a: 2001-99-99", "month must be in 1..12"),
    ],
)
def test_yaml_that_would_take_the_machine_is_refused_before_it_is_built(text, message, tmp_path):
    file = tmp_path / "it.yaml"
    file.write_text(text)
    start = time.monotonic()
    with pytest.raises(UsageError) as error:
        read_yaml(file)
    assert str(error.value).startswith(f"{file}: not YAML ({message}")
    assert time.monotonic() - start < 20


def test_aliases_and_merges_of_ordinary_size_are_yaml(tmp_path):
    file = tmp_path / "it.yaml"
    file.write_text("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\nsame: *base\n")
    base = {"a": 1, "b": 2}
    assert read_yaml(file) == {"base": base, "more": {"a": 1, "b": 3}, "same": base}
