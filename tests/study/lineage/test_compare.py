"""Lineage from the command line: models by every name, tables, JSON, pictures, and what cannot be compared."""

import csv
import html
import json
import re
import shutil

import numpy as np
import pytest
import yaml

import birthmark as bm
from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.launch.commands.identify import read_seeds
from birthmark.measure.hidden_states import FingerprintProbe, hidden_states
from birthmark.metrics.seedprint import compare
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.report.pictures.several_models import clustered
from birthmark.research.changes.change import decoder_of, weights_of
from birthmark.research.changes.coordinates import ChannelPermutation, Rotation, SignFlips
from birthmark.trainer.by_name.model_names import add_tokens, open_source

MODEL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 300, "max_seq_len": 16, "mlp": "swiglu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory, lineage_base, no_page):
    """Two runs on one text from births of two seeds, the first's export, and the config of their births."""
    folder = tmp_path_factory.mktemp("lineage")
    config = lineage_base(folder).rename(folder / "run.yaml")
    for seed in (7, 8):
        run = folder / f"run-{seed}"
        with no_page():
            assert main(["pretrain", "--config", str(config), f"--init_seed={seed}", f"--run_dir={run}"]) == 0
    assert main(["export", str(folder / "run-7"), str(folder / "exported")]) == 0
    return folder


@pytest.fixture
def lineage(place, tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder: exit status, JSON if there is any, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, json_too=True):
        capsys.readouterr()
        options = ["--n_inputs=200", f"--cache_dir={place / 'hidden'}", *(["--json"] if json_too else [])]
        status = main([*map(str, arguments), *options])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out and json_too else out, err

    return run


def write_config(file, **model):
    file.write_text(yaml.safe_dump({"model": MODEL | model, "snapshot": {"enabled": False}}))
    return file


# ── kin and strangers ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_trained_model_is_kin_of_its_own_birth_alone(lineage, place):
    status, out, _ = lineage("fingerprint", place / "run-7", f"{place}/run.yaml@7", f"{place}/run.yaml@8")
    assert status == 0
    own, other, births = out["pairs"]
    assert own["verdict"] == "kin"
    assert own["log10_p"] < -5
    assert own["a"].endswith("run-7")
    assert own["b"].endswith("run.yaml@7")
    assert (own["null"], own["k"], own["n_inputs"], own["warnings"]) == ("dimensions", 32, 200, [])
    assert other["verdict"] == births["verdict"] == "stranger"
    assert other["p"] == pytest.approx(10 ** other["log10_p"])
    assert out["probe"]["seq_len"] == 16


def test_runs_of_two_seeds_on_the_same_data_are_strangers_and_an_export_is_its_run(lineage, place):
    _, out, _ = lineage("fingerprint", place / "run-7", place / "run-8", place / "exported", "--seq-len", "8")
    verdicts = {(p["a"].split("/")[-1], p["b"].split("/")[-1]): p for p in out["pairs"]}
    assert verdicts["run-7", "run-8"]["verdict"] == "stranger"
    assert verdicts["run-8", "exported"]["verdict"] == "stranger"
    same = verdicts["run-7", "exported"]
    assert same["verdict"] == "kin"
    assert same["statistic"] == pytest.approx(1, abs=1e-6)


def test_an_export_whose_vocabulary_was_filled_up_is_still_its_run(lineage, place, tmp_path, monkeypatch, no_page):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    tokenizer = place / "run-7" / "tokenizer.json"
    n_tokens = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    arguments = [f"--data.tokenizer={tokenizer}", f"--model.vocab_size={n_tokens + 20}", "--trainer.max_steps=2"]
    with no_page():
        assert main(["pretrain", "--config", str(place / "run.yaml"), "--run_dir=padded", *arguments]) == 0
    assert main(["export", "padded", "gguf", "--gguf"]) == 0
    status, out, _ = lineage("fingerprint", "padded", "gguf/model.gguf")
    assert (status, out["pairs"][0]["verdict"]) == (0, "kin")
    size = ["--n_sequences=6", "--seq_len=8", "--minibatch=6", "--probe=random"]
    assert main(["compare", "padded", "gguf/model.gguf", "--json", *size]) == 0


def test_ids_that_several_tokenizers_have_mean_one_thing(tmp_path):
    def file(name, vocab, added=()):
        added_tokens = [{"id": index, "content": token} for token, index in added]
        (tmp_path / name).write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added_tokens}))
        return tmp_path / name

    known = {}
    add_tokens(known, "short", file("short", {"a": 0, "b": 1}), "mend")
    add_tokens(known, "filled", file("filled", {"a": 0, "b": 1, "[PAD2]": 2, "[PAD3]": 3}), "mend")
    add_tokens(known, "scored", file("scored", [["a", -1.0], ["b", -2.0]], [("c", 2)]), "mend")
    for vocab, line in (
        ({"b": 0, "a": 1}, "short and other have different tokenizers: id 0 is 'a' in one and 'b' in the other; mend"),
        ({"a": 0, "d": 2}, "scored and other have different tokenizers: id 2 is 'c' in one and 'd' in the other; mend"),
        # A filler at another id is a token.
        ({"a": 0, "[PAD3]": 2}, "id 2 is 'c' in one and '[PAD3]' in the other"),
    ):
        with pytest.raises(UsageError, match=re.escape(line)):
            add_tokens(dict(known), "other", file("other", vocab), "mend")


def test_streamed_models_are_compared_as_whole_ones(lineage, place):
    for command in (
        ["fingerprint", place / "run-7", place / "exported", f"{place}/run.yaml@8", "--strangers=1"],
        ["fingerprint", place / "run-7", place / "run-8", "--probe=embedding"],
        ["identify", place / "run-7", "--seeds=6..8"],
    ):
        _, whole, _ = lineage(*command)
        kept = set((place / "hidden").iterdir())
        status, streamed, _ = lineage(*command, "--stream")
        assert (status, set((place / "hidden").iterdir())) == (0, kept)
        for tests in ("pairs", "strangers", "seeds"):
            for one, other in zip(whole.get(tests, []), streamed.get(tests, []), strict=True):
                assert other["z"] == pytest.approx(one["z"], rel=1e-3, abs=1e-3)
                assert other["verdict"] == one["verdict"]
        assert whole.get("best") == streamed.get("best")
    assert "leave one of them out" in lineage("fingerprint", "--calibrate=demo", "--stream")[2]


def test_hidden_states_are_kept_for_the_next_time(lineage, place, monkeypatch):
    arguments = ["fingerprint", place / "run-7", place / "run-8", "--probe_seed=5"]
    first = lineage(*arguments)
    monkeypatch.setattr("birthmark.measure.hidden_states.hidden_states", lambda *a, **k: pytest.fail("ran again"))
    assert lineage(*arguments) == first


def test_people_get_a_table_a_picture_of_three_and_the_warnings(lineage, place, tmp_path):
    names = [place / "run-7", place / "run-8", f"{place}/run-7@0"]
    status, out, err = lineage("fingerprint", *names, "--out=three.png", json_too=False)
    assert status == 0
    assert "null dimensions, 200 sequences of 16 random tokens" in out
    assert out.startswith("A birth is shared by run-7 and run-7@0: kin have z ")
    assert "cannot tell which model came first" in " ".join(out.split())
    rows = [line.split() for line in out.splitlines() if line.split()[-1:] in (["kin"], ["stranger"])]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("run-7", "run-8", "stranger"), ("run-7", "run-7@0", "kin"), ("run-8", "run-7@0", "stranger"),
    ]  # fmt: skip
    assert str(place) not in out
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")
    assert "picture: three.png" in err
    (tmp_path / "three.png").unlink()
    _, out, _ = lineage("fingerprint", *names[:2], "--null=analytic", json_too=False)
    assert "takes columns for independent" in out
    assert "undefined: " in out
    assert not list(tmp_path.iterdir())


def test_the_answer_has_strangers_as_its_control(lineage, place):
    _, out, _ = lineage("fingerprint", place / "run-7", f"{place}/run.yaml@7", "--strangers=3")
    assert [test["verdict"] for test in out["strangers"]] == ["stranger"] * 6
    most = max(test["z"] for test in out["strangers"])
    assert out["sentence"].startswith("run.yaml@7 shares its birth with run-7: z ")
    assert float(re.search(r"strangers at most (-?[\d.]+)\.$", out["sentence"])[1]) == pytest.approx(most, abs=0.051)
    _, alone, _ = lineage("fingerprint", place / "run-7", f"{place}/run.yaml@7", "--strangers=0")
    assert alone["strangers"] == []
    assert "without strangers as a control" in alone["sentence"]
    assert alone["pairs"] == out["pairs"]


@pytest.mark.parametrize(
    ("arguments", "heading", "rows"),
    [(("fingerprint", "run-7", "run-8", "run-7@0"), "kin", 3), (("identify", "run-7", "--seeds=5..9"), "seed 7", 5)],
)
def test_a_page_holds_the_answer_and_every_test(lineage, place, tmp_path, arguments, heading, rows):
    command, *names = arguments
    names = [name if name.startswith("--") else place / name for name in names]
    status, out, err = lineage(command, *names, f"--out={tmp_path / 'page.html'}")
    assert (status, err) == (0, f"page: {tmp_path / 'page.html'}\n")
    text = (tmp_path / "page.html").read_text()
    assert out["sentence"] in html.unescape(re.sub(r"</?abbr[^>]*>", "", text))
    assert heading in out["sentence"]
    (file,) = (tmp_path / "page-data").iterdir()
    found = list(csv.DictReader(file.open()))
    tests = out["pairs"] + out["strangers"] if command == "fingerprint" else out["seeds"]
    assert [row["verdict"] for row in found] == [test["verdict"] for test in tests]
    assert [float(row["z"]) for row in found] == [test["z"] for test in tests]
    assert len(tests) >= rows


def test_embedding_probes_compare_models_of_other_vocabularies_and_warn(lineage, place, tmp_path):
    other = write_config(tmp_path / "other.yaml", vocab_size=200)
    names = [f"{place / 'run-7'}", f"{other}@1"]
    _, out, _ = lineage("fingerprint", *names, "--probe", "embedding")
    (pair,) = out["pairs"]
    assert "leaks along the residual stream" in pair["warnings"][0]
    assert out["probe"]["kind"] == "embedding"
    # What is printed is what was used: it alone gives the same test, of the vectors of the first model's table.
    first, second = (open_source(name).load() for name in names)
    assert out["probe"]["sd"] == pytest.approx(first.embed.weight.std().item(), rel=1e-3) != 1
    shown = FingerprintProbe(**out["probe"])
    again = compare(hidden_states(first, shown), hidden_states(second, shown), probe="embedding", vocab_size=300)
    assert again.z == pair["z"]
    _, out, _ = lineage("identify", place / "run-7", "--seeds=7", "--probe=embedding")
    birth = open_source(f"{place / 'run-7'}@0").load()
    shown = FingerprintProbe(**out["probe"])
    again = compare(hidden_states(first, shown), hidden_states(birth, shown), probe="embedding", vocab_size=300)
    assert again.z == out["seeds"][0]["z"]


@pytest.mark.parametrize("null", ["dimensions_sampled", "inputs"])
def test_a_null_is_chosen_by_name(lineage, place, null):
    fewer = ["--draws=30"] if null == "inputs" else []
    names = place / "run-7", f"{place}/run-7@0"
    _, out, _ = lineage("fingerprint", *names, f"--null={null}", "--k=16", "--choice=base", *fewer)
    assert out["pairs"][0]["null"] == null
    assert out["pairs"][0]["verdict"] == "kin"
    assert out["pairs"][0]["k"] == (32 if null == "dimensions_sampled" else 16)


@pytest.mark.heavy
def test_the_null_matched_reads_weights_whatever_became_of_the_channels(lineage, place, tmp_path):
    run, birth = open_source(str(place / "run-7")), open_source(f"{place / 'run-7'}@0")
    weights = weights_of(run.load())
    save_pretrained(decoder_of(Rotation()(weights)), tmp_path / "rotated")
    save_pretrained(decoder_of(SignFlips(share=1)(ChannelPermutation()(weights))), tmp_path / "permuted")
    names = [f"{place / 'run-7'}@0", tmp_path / "rotated", tmp_path / "permuted", place / "run-8"]
    _, plain, _ = lineage("fingerprint", *names, "--strangers=0")
    assert [p["verdict"] for p in plain["pairs"]] == ["stranger"] * 6
    status, out, err = lineage("fingerprint", *names, "--null=matched", "--out=page.html")
    assert (status, err) == (0, "page: page.html\n")
    assert [p["verdict"] for p in out["pairs"]] == ["kin", "kin", "stranger", "kin", "stranger", "stranger"]
    assert [out["pairs"][i]["alignment"] for i in (0, 3)] == ["rotation", "rotation"]
    assert [test["verdict"] for test in out["strangers"]] == ["stranger"] * 8
    assert out["probe"] is None
    assert "k: units of blocks compared" in (tmp_path / "page.html").read_text()
    found = bm.fingerprint(birth.load(), str(tmp_path / "rotated"), null="matched")
    assert found.z == pytest.approx(out["pairs"][0]["z"])
    _, streamed, _ = lineage("fingerprint", *names[:2], "--null=matched", "--stream", "--strangers=1")
    assert streamed["pairs"][0]["z"] == pytest.approx(out["pairs"][0]["z"], rel=1e-4)
    assert streamed["strangers"][0]["z"] == pytest.approx(out["strangers"][0]["z"], rel=1e-4)
    arguments = ["identify", tmp_path / "rotated", "--seeds=5..9", f"--config={place / 'run.yaml'}", "--null=matched"]
    _, out, _ = lineage(*arguments)
    assert (out["best"], out["verdict"], out["seeds"][1]["verdict"]) == (7, "kin", "stranger")
    status, _, err = lineage(*arguments, "--probe=embedding")
    assert (status, err.count("\n")) == (2, 1)
    assert "--probe embedding: the null matched reads weights, no inputs; leave it out" in err


def test_models_of_one_birth_stand_side_by_side():
    z = np.array([[0, 0.5, 40, -1], [0.5, 0, np.nan, 30], [40, np.nan, 0, 1], [-1, 30, 1, 0]])
    order = clustered(z).tolist()
    assert abs(order.index(0) - order.index(2)) == 1
    assert abs(order.index(1) - order.index(3)) == 1


# ── which seed ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_seed_that_a_model_was_born_from_is_found(lineage, place, tmp_path):
    status, out, _ = lineage("identify", place / "run-7", "--seeds", "0..20")
    assert status == 0
    assert (out["best"], out["verdict"], out["n_candidates"]) == (7, "kin", 21)
    assert [s["verdict"] for s in out["seeds"]].count("kin") == 1
    # Weights of no known birth need the config of the candidates.
    status, out, _ = lineage("identify", place / "exported", "--seeds=5..9", f"--config={place / 'run.yaml'}")
    assert (status, out["best"], out["verdict"]) == (0, 7, "kin")
    status, _, err = lineage("identify", place / "exported", "--seeds=5..9")
    assert (status, err.count("\n")) == (2, 1)
    assert "give --config" in err
    _, out, _ = lineage("identify", place / "run-7", "--seeds=20..30", json_too=False)
    assert out.startswith("None of 11 seeds is seen in ")


def test_every_candidate_counts(lineage, place):
    _, few, _ = lineage("identify", place / "run-7", "--seeds=8,9")
    _, more, _ = lineage("identify", place / "run-7", "--seeds=8..17")
    p = {s["seed"]: s["p"] for s in few["seeds"]}[8]
    assert {s["seed"]: s["p"] for s in more["seeds"]}[8] == pytest.approx(min(1, 5 * p)) or p == 1


def test_so_few_sampled_pairings_that_no_test_can_count_are_refused_before_a_pass(lineage, place, monkeypatch):
    """p is at least 1/(draws + 1), here of as many draws as the candidates just need, and of one candidate more."""
    how = ("--null=dimensions_sampled", "--draws=1000")
    _, out, _ = lineage("identify", place / "run-7", "--seeds=0..9", *how)
    assert (out["best"], out["verdict"], out["seeds"][0]["p"]) == (7, "kin", pytest.approx(10 / 1001))
    births = [f"{place / 'run.yaml'}@{seed}" for seed in range(6)]
    assert lineage("fingerprint", *births[:5], "--strangers=0", *how)[0] == 0
    monkeypatch.setattr("birthmark.measure.hidden_states.hidden_states", lambda *a, **k: pytest.fail("a pass"))
    for arguments, message in (
        (("identify", place / "run-7", "--seeds=0..10", *how), "--draws 1000: p counts all 11 candidates"),
        (("identify", place / "run-7", "--seeds=0..120", how[0]), "give at least 12100, or --null dimensions"),
        (("fingerprint", *births, "--strangers=0", *how), "all 15 pairs, and so few draws leave none below 0.01; give"),
    ):
        status, _, err = lineage(*arguments, json_too=False)
        assert (status, err.count("\n")) == (2, 1)
        assert message in err


def test_seeds_are_ranges_and_lists():
    assert read_seeds("3, 5..7,5") == [3, 5, 6, 7]
    assert read_seeds(str((1 << 64) - 1)) == [(1 << 64) - 1]
    for text, said in (
        ("0..99999999999999", "more than 1,000,000 births"),
        ("0..999999,7..8", "more than 1,000,000 births"),
        ("9" * 5000, "give whole numbers"),
        (str(1 << 64), "no seed; give a whole number from"),
        (f"{(1 << 64) - 1}..{1 << 64}", "no seed; give a whole number from"),
        ("7..3", "give whole numbers"),
    ):
        with pytest.raises(UsageError, match=f"--seeds .*: {said}"):
            read_seeds(text)


# ── calibration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_calibration_counts_strangers_and_kin_under_every_null(lineage, place, tmp_path):
    config = write_config(tmp_path / "small.yaml", d_model=16, n_layers=1)
    arguments = ["--calibrate", config, "--pairs=6", "--kin_pairs=2", "--seq_len=4", "--k=12"]
    more = ["--null=dimensions_sampled", "--draws=1000", "--out=one.png"]
    status, out, _ = lineage("fingerprint", *arguments, *more)
    assert status == 0
    assert list(out["nulls"]) == ["dimensions_sampled"]
    found = out["nulls"]["dimensions_sampled"]
    assert found["strangers"]["n"] == 6
    assert found["kin"]["rate"] == 1
    assert found["kin"]["low"] == pytest.approx(0.025 ** (1 / 2))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    _, out, _ = lineage("fingerprint", *arguments, "--draws=20", json_too=False)
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("dim", "mat", "ana", "emp", "inp"))]
    assert rows == ["dimensions", "dimensions_sampled", "matched", "analytic", "empirical", "empirical_full", "inputs"]
    kin = ["--kin", place / "run-7"]
    _, out, _ = lineage("fingerprint", "--calibrate", place / "run.yaml", "--pairs=2", "--null=dimensions", *kin)
    assert out["nulls"]["dimensions"]["kin"]["n"] == 2
    assert out["nulls"]["dimensions"]["kin"]["rate"] == 1


# ── what cannot be compared ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_compared_is_one_line(lineage, place, tmp_path):
    run, config = place / "run-7", place / "run.yaml"
    wide, words = write_config(tmp_path / "a.yaml", d_model=64), write_config(tmp_path / "b.yaml", vocab_size=200)
    shutil.copytree(place / "exported", tmp_path / "foreign")
    tokenizer = json.loads((tmp_path / "foreign" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for arguments, message in (
        (["fingerprint", run], "at least two models"),
        (["fingerprint", run, f"{run}@15"], "has no checkpoint of step 15; there are: 10, 20"),
        (["fingerprint", run, "nobody/has-such-a-model"], "not from the hub either"),
        (["fingerprint", run, f"{wide}@0"], "has width 32"),
        (["fingerprint", run, f"{words}@0"], "or --probe embedding"),
        (["fingerprint", run, tmp_path / "foreign"], "different tokenizers"),
        (["fingerprint", run, config, "--seq_len=17"], "--seq_len 17: give 1 to 16"),
        (["fingerprint", run, config, "--k=1.5"], "--k is 1.5"),
        (["fingerprint", run, config, "--null=luck"], "null"),
        (["fingerprint", run, config, "--strangers=-1"], "--strangers -1"),
        (["fingerprint", run, config, "--out=a.pdf"], "a.pdf: is no page and no picture"),
        (["identify", run, "--seeds=1", "--out=a.png"], "a.png: is no page; give a name that ends in .html"),
        (["identify", run, "--seeds=9..3"], "--seeds 9..3"),
        (["identify", run, "--seeds=1", f"--config={wide}"], "width"),
        (["fingerprint", run, "--calibrate", config], "leave out"),
        (["fingerprint", "--calibrate", config, "--pairs=0"], "--pairs 0"),
        (["fingerprint", "--calibrate", config, "--kin", tmp_path], "not a run"),
    ):
        status, out, err = lineage(*arguments)
        assert (status, out) == (2, ""), arguments
        assert err.count("\n") == 1
        assert message in err
    for n_inputs in (5, 10**18):
        assert main(["fingerprint", str(run), str(config), f"--n_inputs={n_inputs}"]) == 2
    # Half a model is no model.
    weights = tmp_path / "foreign" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    status, _, err = lineage("fingerprint", run, tmp_path / "foreign", "--probe=embedding")
    assert (status, err.count("\n")) == (1, 1)
    assert str(weights) in err
