"""The page of one snapshot: every picture's numbers against the arrays that were measured."""

import csv
import dataclasses
import html
import json
import re

import numpy as np
import pytest
import scipy.stats
import torch
import yaml
from pages import values

from birthmark.data.probes import random_probe
from birthmark.errors import RunError
from birthmark.files import write_json, write_text
from birthmark.findings.formatting import format_value
from birthmark.launch.cli import main
from birthmark.measure.measurement import birth_reference, measure
from birthmark.measure.records import RunDir, Snapshot
from birthmark.metrics.neurons import RATIO_THRESHOLD, Z_THRESHOLD
from birthmark.metrics.quantities import MEASURED
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.report.run_page import build_pages
from birthmark.report.snapshot_page import build_snapshot_page

pytestmark = pytest.mark.heavy

CONFIG = ModelConfig(d_model=32, n_layers=3, n_heads=4, vocab_size=60, mlp="relu")
LENGTH = 16


@pytest.fixture(scope="module")
def measured():
    """A newborn model on random tokens, and as "text" on sequences that all start with one token."""
    torch.manual_seed(0)
    model = born(CONFIG, init_seed=0)
    probe = random_probe(CONFIG.vocab_size, 24, LENGTH, 0)
    text = probe.copy()
    text[:, 0] = 7
    birth = birth_reference(model, probe, 8)
    found = {name: measure(model, tokens, birth, batch_size=8) for name, tokens in (("", probe), ("text.", text))}
    p = found[""].arrays["mean_prob"]
    top = [
        {"rank": rank, "id": int(token), "text": f"<t\x07{token}>\n", "p": float(p[token]), "argmax_share": 0.1}
        for rank, token in enumerate(np.argsort(-p)[:12], start=1)
    ]
    summary = {
        "step": 40, "tokens": 4000, "vocab_size": CONFIG.vocab_size, "n_layers": 3, "n_heads": 4,
        "model": dataclasses.asdict(CONFIG), "probe": {"n_sequences": 24, "seq_len": LENGTH, "dtype": "float32"},
        "bias": found[""].scalars, "bias_text": found["text."].scalars, "top_tokens": top,
    }  # fmt: skip
    arrays = {prefix + name: array for prefix, m in found.items() for name, array in m.arrays.items()}
    return Snapshot(summary, arrays)


@pytest.fixture(scope="module")
def page(measured, tmp_path_factory):
    """Its folder and the text of its page."""
    folder = tmp_path_factory.mktemp("page") / "snapshot"
    measured.write(folder)
    return folder, build_snapshot_page(folder).read_text(encoding="utf-8")


def test_the_page_is_whole_and_every_picture_names_its_csv(page):
    folder, text = page
    assert text.endswith("</html>\n")
    assert "<script" not in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S)
    assert len(captions) == text.count("<figure") == 30 + 29  # on text there is no variance discrepancy
    links = set(re.findall(r'<a [^>]*href="([^"#]*)"', text))
    assert links == {f"report-data/{path.name}" for path in (folder / "report-data").iterdir()}
    assert all("<a " in caption for caption in captions)


def test_numbers_of_the_chain_are_those_measured(page, measured):
    folder, _ = page
    for prefix, end in (("", ".csv"), ("text.", "-text.csv")):
        a = {name.removeprefix(prefix): array for name, array in measured.arrays.items() if name.startswith(prefix)}

        def held(name, end=end, **where):
            return values(folder, name + end, **where)

        sigma = a["positional_variance"]
        assert np.array_equal(held("aggregation-variance", quantity="positional_variance"), sigma.ravel())
        assert np.array_equal(held("aggregation-n-eff"), a["n_eff"].ravel())
        assert np.array_equal(held("dominance-position"), a["dominance"].ravel())
        assert np.array_equal(held("dominance-rank"), a["effective_rank"])
        assert np.array_equal(held("dominance-spectrum"), a["singular_values"].ravel())
        assert np.array_equal(held("dominance-massive"), a["massive_value"].ravel())
        assert np.array_equal(held("lock-map", quantity="qk_cosine"), a["qk_cosine"].ravel())
        assert np.array_equal(held("sink-map", quantity="sink_mass"), a["sink_mass"].ravel())
        assert np.array_equal(held("sink-map", quantity="sink_rate"), a["sink_rate"].ravel())
        assert np.array_equal(held("sink-keys"), a["importance"].ravel())
        assert np.allclose(held("sink-rate"), a["sink_rate_grid"].mean(2).ravel(), rtol=1e-15)
        assert np.array_equal(held("contraction-inter", quantity="inter_mlp"), a["inter_mlp"])
        assert np.array_equal(held("direction-alignment", quantity="drift"), a["drift"])
        for layer in range(3):
            assert np.array_equal(held("aggregation-n-eff", layer=layer + 1, head=2), a["n_eff"][layer, 2])
            drawn = held("neurons-units", layer=layer + 1, quantity="activation_first")
            assert 10 < len(drawn) <= a["activation_first"].shape[1]
            assert set(drawn) <= set(a["activation_first"][layer])


def test_the_prediction_is_the_first_variance_over_n_eff(page, measured):
    folder, text = page
    sigma, n_eff = measured.arrays["positional_variance"], measured.arrays["n_eff"]
    expected = [np.mean([sigma[0, h, 0] * n_eff[0, h, 0] / n_eff[0, h, t] for h in range(4)]) for t in range(LENGTH)]
    predicted = values(folder, "aggregation-variance.csv", layer=1, quantity="predicted")
    assert predicted == pytest.approx(expected, rel=1e-12)
    # Where all sequences start with one token there is no variance to predict from, nor to compare with.
    assert len(values(folder, "aggregation-variance-text.csv", layer=1, quantity="predicted")) == 0
    assert "All sequences of the text probe start with the same token" in text
    assert not (folder / "report-data" / "aggregation-discrepancy-text.csv").exists()


def test_lists_show_units_massive_activations_and_tokens(page, measured):
    _, text = page
    cells = [
        [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(<td.*?)</tr>", text)
    ]
    a = measured.arrays
    layer, place = np.unravel_index(a["neuron_z"].argmax(), a["neuron_z"].shape)
    unit = next(row for row in cells if len(row) == 10)
    assert unit[:2] == [str(layer + 1), str(a["neuron_index"][layer, place])]
    assert unit[5] == f"{a['neuron_z'].max():.1f}"
    layer, place = np.unravel_index(a["massive_value"].argmax(), a["massive_value"].shape)
    position, channel = (int(a[f"massive_{name}"][layer, place]) for name in ("position", "channel"))
    rows = [row for row in cells if len(row) == 5 and row[:2] == [str(position), str(channel)]]
    # Each pair stands once in a probe's list, however many blocks have it.
    assert len(rows) in (1, 2)
    assert rows[0][2:4] == [f"{a['massive_value'].max():.2f}", str(layer)]
    is_it = (a["massive_position"] == position) & (a["massive_channel"] == channel)
    assert re.findall(r"\d+", rows[0][4])[0] == str(np.flatnonzero(is_it.any(1)).clip(1)[0])
    token = measured.summary["top_tokens"][1]
    row = next(row for row in cells if len(row) == 5 and row[::2][:2] == ["2", str(token["id"])])
    assert row[1] == f"<t\\x07{token['id']}>\\n"
    assert row[3] == f"{60 * token['p']:.2f}"


def test_heads_are_counted_by_keys_that_enough_queries_see(measured, tmp_path):
    """Of 16 keys the first 13 are judged: what heads give the last ones is a mean of few weights."""
    importance = np.full((3, 4, LENGTH), 0.05)
    importance[:2, :, 0], importance[:2, :, -1], importance[1, 3, 5] = 0.6, 0.9, 0.7
    importance[2, :, -1] = 0.9
    Snapshot(measured.summary, {"importance": importance}).write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8")
    note = next(note for note in re.findall(r'<p class="note">(.*?)</p>', text) if "their sink" in note)
    assert "position 0 (7), position 5 (1), 4 of 12 heads have none" in note
    assert "the first 13 keys" in note


def test_super_neurons_are_marked_and_counted(measured, tmp_path):
    assert (MEASURED["neuron_z"].control, MEASURED["neuron_ratio"].control) == (Z_THRESHOLD, RATIO_THRESHOLD)
    own = ("activation_", "neuron_", "super_neurons")
    arrays = {name: array.copy() for name, array in measured.arrays.items() if name.startswith(own)}
    first, others = arrays["activation_first"], arrays["activation_others"]
    first[1, 5], others[1, 5] = 50.0, 0.5
    arrays["super_neurons"][:] = [0, 1, 0]
    arrays["neuron_index"][1, 0] = 5
    arrays["neuron_is_super"][:] = False
    arrays["neuron_is_super"][1, 0] = True
    Snapshot(measured.summary, arrays).write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8")
    assert re.findall(r">(block \d: \d+ super)<", text) == ["block 2: 1 super"]
    held = values(tmp_path / "s", "neurons-units.csv", unit=5, layer=2)
    assert held == [50.0, 0.5]


def test_the_same_snapshot_gives_the_same_bytes(page, measured, tmp_path):
    folder, text = page
    measured.write(tmp_path / "snapshot")
    assert build_snapshot_page(tmp_path / "snapshot").read_text(encoding="utf-8") == text
    for path in (folder / "report-data").iterdir():
        assert (tmp_path / "snapshot" / "report-data" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_snapshot_of_nothing_but_zeros_or_nan_has_a_page(measured, tmp_path, value):
    arrays = {name: array.copy() for name, array in measured.arrays.items() if not name.startswith("text.")}
    for array in arrays.values():
        array[...] = value if array.dtype.kind == "f" else 0
    bias = dict.fromkeys(measured.bias, value if value == 0 else None)
    Snapshot(measured.summary | {"bias": bias, "bias_text": {}}, arrays).write(tmp_path / "s")
    assert build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8").endswith("</html>\n")


def test_an_array_of_another_shape_is_named(measured, tmp_path):
    Snapshot(measured.summary, {"text.qk_cosine": np.zeros(3)}).write(tmp_path / "s")
    with pytest.raises(RunError, match=r"arrays.safetensors: damaged \(text.qk_cosine has 1 dimensions instead of 2"):
        build_snapshot_page(tmp_path / "s")
    assert not (tmp_path / "s" / "report.html").exists()


@pytest.fixture
def few(measured):
    """The snapshot with a few of its arrays, where it is not the pictures that count."""
    names = ("inter_mlp", "intra_mlp", "inter_attention", "intra_attention", "sink_mass", "sink_rate", "effective_rank")
    return Snapshot(measured.summary, {name: measured.arrays[name] for name in names})


@pytest.fixture
def run(few, tmp_path):
    """A run with two snapshots."""
    run = RunDir(tmp_path / "run")
    write_text(run.config, "name: run\n")
    write_json(run.birth, {"digest": "0" * 64, "init_seed": 0, "n_params": 1})
    for step in (0, 40):
        Snapshot(few.summary | {"step": step}, few.arrays).write(run.snapshot(step))
    return run


@pytest.mark.parametrize("linked", ["snapshots/step-00000040", "snapshots"])
def test_no_page_is_written_through_a_link_out_of_the_run(run, linked, tmp_path, capsys):
    (run.path / linked).rename(tmp_path / "elsewhere")
    (run.path / linked).symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    assert main(["report", f"{run.path}@40"]) == 2
    assert re.search(r"step-00000040: leads out of its run, to .*; give --out$", capsys.readouterr().err.strip())
    assert main(["report", str(run.path)]) == 0  # it is read
    assert "report.html" in {path.name for path in run.path.iterdir()}
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert main(["report", f"{run.path}@40", "--out", str(tmp_path / "page.html")]) == 0
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_the_newest_snapshot_has_its_page_beside_the_report(run):
    (run.path.parent / "link").symlink_to(run.path)  # to a run: it is what was named
    linked = RunDir(run.path.parent / "link")
    build_pages([linked], linked.report)
    link = re.search(r'<a href="(snapshots/step-00000040/report.html)">step 40</a>', run.report.read_text())[1]
    text = (run.path / link).read_text(encoding="utf-8")
    assert "<h1><small>Birthmark snapshot</small>run · step 40</h1>" in text
    assert 'href="../../report.html"' in text
    assert not (run.snapshot(0) / "report.html").exists()


def test_pages_of_snapshots_from_the_command_line(run, few, tmp_path, capsys):
    def said(*arguments):
        status = main(["report", *map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    assert said(run.path, "--step", 0) == (0, f"{run.snapshot(0) / 'report.html'}\n")
    few.write(tmp_path / "alone")
    assert said(tmp_path / "alone", "--out", tmp_path / "other.html") == (0, f"{tmp_path / 'other.html'}\n")
    assert (tmp_path / "other-data" / "sink-map.csv").is_file()
    assert "over training" not in (tmp_path / "other.html").read_text(encoding="utf-8")
    status, text = said(tmp_path / "alone", "--json")
    assert status == 0
    assert json.loads(text)["scalars"] == few.bias
    assert [row["layer"] for row in json.loads(text)["layers"]] == [0, 1, 2, 3]
    for arguments, complaint in (
        ((run.path, "--step", 3), f"--step 3: {run.path} has no snapshot of that step; there are: 0, 40"),
        ((run.path, run.path, "--step", 0), "--step 0: a page shows one snapshot; give one run"),
        ((tmp_path / "alone", "--step", 0), f"--step 0: {tmp_path / 'alone'} is one snapshot; leave --step out"),
        ((run.path, tmp_path / "alone"), f"{tmp_path / 'alone'}: a snapshot has a page of its own; give it alone"),
    ):
        status, text = said(*arguments)
        assert status == 2
        assert text.startswith(f"birthmark: error: {complaint}"), text


# ── what both pages draw with ────────────────────────────────────────────────────────────────────────────────────────


def test_names_are_moved_apart_as_little_as_possible():
    from birthmark.report.pictures.point_labels import spread_apart

    rng = np.random.default_rng(0)
    for _ in range(20):
        places, gap = rng.random(5), 0.15
        found = spread_apart(places, gap, 0.0, 1.0)
        order = np.argsort(places)
        assert (np.diff(found[order]) >= gap - 1e-9).all()
        assert found.min() >= -1e-9
        assert found.max() <= 1 + 1e-9
        # The least squares under the same constraints, by a general solver.
        between = scipy.optimize.LinearConstraint(np.diff(np.eye(5)[order], axis=0), gap, np.inf)
        best = scipy.optimize.minimize(
            lambda y, places=places: ((y - places) ** 2).sum(), np.linspace(0, 1, 5)[np.argsort(order)],
            bounds=[(0, 1)] * 5, constraints=between, options={"ftol": 1e-12},
        )  # fmt: skip
        assert ((found - places) ** 2).sum() == pytest.approx(best.fun, abs=1e-6)
    crowded = spread_apart(np.zeros(5), 0.5, 0.0, 1.0)
    assert crowded.tolist() == [0, 0.25, 0.5, 0.75, 1]


# ── the picture of an intervention ───────────────────────────────────────────────────────────────────────────────────


def test_an_intervention_leaves_a_picture_and_its_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"d_model": 16, "n_layers": 3, "n_heads": 2, "vocab_size": 30, "max_seq_len": 16}
    config = {"model": model, "data": {"path": "backcopy"}, "snapshot": {"seq_len": 8}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    options = ["--layers", "1", "--position", "5", "--n_sequences", "4", "--seq_len", "12"]
    amplify = ["--kind", "amplify", "--lambda", "1,4"]
    assert main(["intervene", "c.yaml@3", *amplify, *options]) == 0
    # Nobody asked for a file.
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
    capsys.readouterr()
    assert main(["intervene", "c.yaml@3", *amplify, *options, "--out", "intervene.png"]) == 0
    told = capsys.readouterr().err
    assert "picture: intervene.png" in told
    assert "numbers: intervene.csv" in told
    picture = (tmp_path / "intervene.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["intervene", "c.yaml@3", *amplify, *options, "--json"]) == 0
    passes = json.loads(capsys.readouterr().out)["passes"]
    with (tmp_path / "intervene.csv").open() as f:
        rows = list(csv.DictReader(f))
    for name in ("attention", "attention_to_first"):
        expected = [
            ("c.yaml@3", "random", dose, str(layer + 1), str(head), "5", name, passes[i][name][layer][head][0])
            for i, dose in enumerate(("", "1", "4"))
            for layer in range(3)
            for head in range(2)
        ]
        found = [row for row in rows if row["quantity"] == name]
        assert [(*list(row.values())[:-1], float(row["value"])) for row in found] == expected
    norms = {(row["lambda"], row["layer"]): row["value"] for row in rows if row["quantity"] == "norm_after"}
    assert float(norms["4", "1"]) == passes[2]["norm_after"][0][0] > float(norms["", "1"])
    assert norms["4", "2"] == ""  # a block that is left alone
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "intervene.csv", "intervene.png"}
    assert main(["intervene", "c.yaml@3", "--kind", "mask", *options, "--out", "mask.png"]) == 0
    assert (tmp_path / "mask.png").is_file()
    assert main(["intervene", "c.yaml@3", "--kind", "mask", *options, "--out", "mask.csv"]) == 2
    assert "--out mask.csv: is no picture; give a name that ends in .png" in capsys.readouterr().err


def test_the_page_says_how_weights_are_stored_what_was_drawn_and_what_marks_mean(make_snapshot, tmp_path):
    snapshot = make_snapshot(3, np.random.default_rng(0), only=("sink_mass", "importance", "variance_discrepancy"))
    snapshot.bias["variance_discrepancy"] = 0.9
    snapshot.summary.update({
        "source": "models/small.gguf", "stored_kinds": {"Q4_1": 210, "F32": 61}, "n_layers": 3, "n_heads": 2,
        "probe": {"n_sequences": 8, "seq_len": 16, "dtype": "bfloat16", "n_tokens": 100},
    })  # fmt: skip
    snapshot.write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8")
    assert (
        "models/small.gguf; blocks 3, heads 2; vocabulary 120; stored as Q4_1: 210 tensors, F32: 61; 8 sequences of 16 "
        "random tokens from the 100 of its tokenizer; measured in bfloat16"
    ) in text
    # The scalar of a few blocks is named with the block where it stands out.
    ratios = snapshot.arrays["variance_discrepancy"]
    peak = rf"<dd>0\.9 \({format_value(float(ratios.max()), '.6g')} in block {int(ratios.argmax()) + 1}\)</dd>"
    assert re.search(rf"<dt>bias/variance_discrepancy</dt>{peak}", text)
    (legend,) = re.findall(r'<p class="note legend">(.*)</p>', text)
    shown = set(re.findall(r'<li class="(present|weak|absent|unclear)">', text))
    assert shown
    assert len(legend.split(" · ")) == len(shown)
    # No number of the page begins with its point.
    assert not re.findall(r">[^<]*(?<![\w.])\.\d", re.sub(r"<(svg|style).*?</\1>", "", text, flags=re.DOTALL))
