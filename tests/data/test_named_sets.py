"""Sets by short names: files of the same layout, in small, are read under every name."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.named_sets import SETS
from birthmark.data.row_corpora import HubCorpus
from birthmark.data.streaming import StreamedTable
from birthmark.launch import cli

TEXTS = ["Once upon a time", "there was a row", "and another λ"]


def parquet(path, **others):
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": TEXTS, **others}), path)


def lines(path, compress, **others):
    path.parent.mkdir(parents=True)
    rows = [{"text": text, **{key: values[i] for key, values in others.items()}} for i, text in enumerate(TEXTS)]
    path.write_bytes(compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def config(path, name, pattern):
    """Declare a config of the set, as its card does."""
    data = f"configs:\n- config_name: {name}\n  data_files:\n  - {{split: train, path: '{pattern}'}}\n"
    (path / "README.md").write_text(f"---\n{data}---\n")


def zstd(content):
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def write(name, root):
    """Write the files of a set as it lies on the hub."""
    match name:
        case "c4":
            days = ["2019-04-25T12:57:54Z", "2019-04-24T19:53:10Z", "2019-04-18T15:38:05Z"]
            lines(root / "en" / "c4-train.00000-of-01024.json.gz", gzip.compress, timestamp=days, url=["http://a"] * 3)
            config(root, "en", "en/c4-train.*.json.gz")
        case "fineweb-edu":
            facts = {"id": ["<urn>"] * 3, "language_score": [0.9] * 3, "token_count": [4] * 3, "int_score": [3] * 3}
            parquet(root / "data" / "CC-MAIN-2024-10" / "000_00000.parquet", **facts)
            config(root, "default", "data/*/*")
        case "slimpajama":
            meta = [{"redpajama_set_name": "RedPajamaC4"}, {"redpajama_set_name": "RedPajamaBook"}, None]
            lines(root / "train" / "chunk1" / "example_train_0.jsonl.zst", zstd, meta=meta)
        case "wikitext":
            parquet(root / "wikitext-103-raw-v1" / "train-00000-of-00002.parquet")
            config(root, "wikitext-103-raw-v1", "wikitext-103-raw-v1/train-*")
        case "openwebtext" | "tinystories":
            parquet(root / "data" / "train-00000-of-00004.parquet")


@pytest.mark.parametrize("name", SETS)
def test_files_of_its_layout_are_read_under_its_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "hub")
    write(name, tmp_path / "set")
    given = DataConfig(path=name, cache_dir=str(tmp_path / "cache"), n_workers=1)
    assert given.problems() == []
    hub, repository, *rest = str(given.path).split(":")
    assert (hub, repository, given.text_field) == ("hf", SETS[name].repository, SETS[name].column)
    # The folder stands for the repository, the rest is as given.
    local = replace(given, path=":".join([hub, str(tmp_path / "set"), *rest]))
    assert [document.text for document in HubCorpus(local).documents()] == TEXTS
    table = StreamedTable(local)
    assert [list(table.texts(i)) for i in range(table.n_files)] == [TEXTS]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("fineweb-edu", "hf:HuggingFaceFW/fineweb-edu"),
        ("fineweb-edu:sample-10BT", "hf:HuggingFaceFW/fineweb-edu:sample-10BT"),
        ("wikitext", "hf:Salesforce/wikitext:wikitext-103-raw-v1"),
        ("c4:realnewslike", "hf:allenai/c4:realnewslike"),
    ],
)
def test_names_and_variants(path, found):
    assert DataConfig(path=path).path == found
    source = SourceConfig(path)
    assert (source.path, source.label) == (found, path.partition(":")[0])
    assert SourceConfig(path, name="web").label == "web"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("fineweb-edo", "'fineweb-edo' does not exist; did you mean 'fineweb-edu'?"),
        ("TinyStories", "'TinyStories' does not exist; did you mean 'tinystories'?"),
        ("fineweb-edu:sample-10B", "did you mean 'fineweb-edu:sample-10BT'?"),
        ("openwebtext:small", "'small' is no variant of openwebtext, which has none; 'hf:Skylion007"),
    ],
)
def test_a_name_that_is_none_is_one_line(path, message):
    (problem,) = DataConfig(path=path).problems()
    assert problem.startswith("data.path: ")
    assert message in problem


def test_a_folder_of_such_a_name_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c4").mkdir()
    Path("c4/a.txt").write_text("words")
    assert DataConfig(path="c4").problems() == [
        "data.path: 'c4' is a file or folder and the name of a set; write './c4', or 'hf:allenai/c4'"
    ]
    assert DataConfig(path="./c4").problems() == []


def test_the_command_lists_them(capsys):
    assert cli.main(["data"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and found.repository in shown and found.licence in shown for name, found in SETS.items())
    assert cli.main(["data", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["variants"] == ["sample-10BT", "sample-100BT", "sample-350BT"]
    assert cli.main(["data", "--step", "3"]) == 2


def test_the_page_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for name, found in SETS.items():
        default = f", `{found.default}`" if found.default else ""
        line = next(
            line for line in page.splitlines() if line.startswith(f"| `{name}` | `{found.repository}`{default} |")
        )
        assert all(f"`{variant}`" in line for variant in found.variants)
        assert line.removesuffix(" |").rpartition("| ")[2] in found.licence
