import subprocess
import sys

import pytest

from birthmark.data.config import DataConfig


def test_defaults_have_no_problems():
    assert DataConfig().problems() == []


def test_all_problems_are_listed_at_once(tmp_path):
    fields = {
        "path": str(tmp_path / "nowhere"),
        "tokenizer": "missing.json",
        "val_fraction": 1.0,
        "text_field": "",
        "cache_dir": "",
        "max_bad_rows": -1,
        "timeout_s": 0,
        "n_workers": -1,
        "verify": "maybe",
    }
    problems = DataConfig(**fields).problems()
    assert [problem.split(":")[0] for problem in problems] == [f"data.{name}" for name in fields]
    assert all("\n" not in problem for problem in problems)


def test_paths(tmp_path):
    text, table, odd = tmp_path / "a.txt", tmp_path / "b.parquet", tmp_path / "c.pkl"
    for path in (text, table, odd):
        path.write_text("x")

    def problems(*entries):
        return DataConfig(path=list(entries)).problems()

    assert problems(str(text), str(tmp_path)) == []
    assert problems(str(table)) == []
    assert "c.pkl' is of no known kind" in problems(str(odd))[0]
    assert ".parquet, .txt" in problems(str(text), str(table))[0]
    assert "'stdlib' in a list" in problems("stdlib", str(text))[0]
    assert "empty" in problems()[0]
    assert "names no dataset" in DataConfig(path="hf:").problems()[0]
    assert DataConfig(path="hf:some/name:config").problems() == []


def test_backcopy_needs_no_tokenizer():
    assert DataConfig(path="backcopy", tokenizer="missing.json").problems() == []


def test_config_imports_nothing_heavy():
    code = (
        "import sys, birthmark.data.config as c; c.DataConfig().problems(); "
        "print([m for m in ('torch', 'datasets', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "field",
    [{"token_dtype": "uint16"}, {"end_token": 5}, {"val_path": "stdlib"}, {"text_field": "body"}, {"max_bad_rows": 3}],
)
def test_backcopy_takes_no_field_of_a_corpus(field):
    ((name, value),) = field.items()
    found = [one for one in DataConfig(path="backcopy", **field).problems() if "backcopy" in one and name in one]
    assert f"data.{name}: {value!r} is not read by backcopy, whose samples are computed; leave it out" in found
