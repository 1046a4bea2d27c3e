"""The page of a run: whole, closed to the outside, true to the files, the same every time."""

import base64
import builtins
import hashlib
import html
import json
import os
import re

import numpy as np
import pytest
import scipy.stats
from pages import rows, values

from birthmark.errors import RunError, UsageError
from birthmark.files import atomic_path, read_json, read_sealed_json, write_sealed_json
from birthmark.launch.cli import main
from birthmark.measure.metrics_log import append_metrics
from birthmark.measure.records import RunDir, Snapshot
from birthmark.messages import printable
from birthmark.report.figure import save_figure
from birthmark.report.run_page import build_pages, build_report, summarise
from birthmark.report.sections.preference import ranks

pytestmark = pytest.mark.heavy


def build(runs, folder):
    build_report(runs, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, make_run):
    """Two runs of different shapes, and the page of both."""
    root = tmp_path_factory.mktemp("pair")
    runs = [
        make_run(root / "_one$", seed=0),
        make_run(root / "two", seed=1, n_layers=5, n_heads=7, vocab=300, length=700, steps=(0, 10, 20, 30)),
    ]
    return runs, build(runs, root)


def test_the_page_is_well_formed_and_fetches_nothing(pair, parse):
    _, text = pair
    page = parse(text)
    assert {"link", "iframe", "img", "object"}.isdisjoint(page.tags)
    # The data, which is no script, and ours: the one that the page's policy lets run.
    assert re.findall(r"<script([^>]*)>", text) == [' type="application/json" id="charts"', ""]
    digest = hashlib.sha256(re.search(r"<script>(.*?)</script>", text, re.S)[1].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'\"" in text
    assert not re.search(r"@import|expression\(|javascript:", text)
    assert all(target.startswith(("#", "data:")) for target in re.findall(r"url\(['\"]?([^)]*)\)", text))
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith(("#", "data:image/png")), value
    assert any(name == "content" and "default-src 'none'" in value for name, value in page.attributes)


def test_links_lead_into_the_page_or_to_files_beside_it(pair, parse):
    runs, text = pair
    links = parse(text).links
    assert len(links) > 20
    for link in links:
        assert link.startswith("#") or (runs[0].path.parent / link).is_file(), link
        assert not link.startswith(("/", ".", "http", "file", "javascript")), link


@pytest.mark.parametrize(
    "shape",
    [
        {"n_layers": 1, "n_heads": 1},
        {"n_layers": 2, "n_heads": 1},
        {"steps": (0,)},
        {"n_layers": 1, "n_heads": 1, "steps": (0,), "losses": False},
    ],
)
def test_files_that_a_page_links_exist(shape, tmp_path, make_run, parse):
    text = build([make_run(tmp_path / "run", qk_cosine=0.9, **shape)], tmp_path)
    files = {link for link in parse(text).links if not link.startswith("#")}
    assert files == {f"report-data/{file.name}" for file in data(tmp_path)}
    # The panel of the lock, and of the sink's map, name numbers where the page has some.
    panels = re.findall(r'<figure class="panel.*?</figure>', text, re.S)
    named = {link for panel in panels for link in re.findall(r'href="report-data/([^"]*)"', panel)}
    one_head, one_step = shape.get("n_layers") == 1, len(shape.get("steps", "all")) == 1
    assert ("lock-cosine.csv" in named) == (one_head and not one_step)
    assert ("sink-map.csv" in named) == (one_step and not one_head)


def test_every_id_is_unique_and_every_reference_finds_its_own(pair, parse):
    page = parse(pair[1])
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for name, value in page.attributes if name == "href" and value.startswith("#")}
    wanted |= {link[1:] for link in page.links if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", pair[1]))
    assert wanted
    assert wanted <= set(ids)


def test_text_of_tokens_names_and_config_is_escaped(pair, parse, attack):
    runs, text = pair
    assert attack not in text
    assert html.escape(attack) in text
    shown = "".join(parse(text).text)
    assert attack in shown  # the reader still sees it as it is
    assert "_one$" in shown
    assert "\u202e" not in text  # would turn the rest of its line around
    for run in runs:
        assert read_json(run.birth)["digest"] in shown


def test_the_table_shows_what_the_files_hold(pair, parse):
    runs, text = pair
    # Written out by hand, not by the code under test.
    cells = parse(text).table(12)
    expected = []
    for run in runs:
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        for snapshot in run.snapshots():
            b, step = snapshot.bias, snapshot.step
            loss = next((line for line in lines if line["step"] == step), {})
            kind = "birth" if step == 0 else "end" if step == lines[-1]["step"] else ""
            expected.append([
                f"{kind}{step}",
                f"{loss['val/loss']:.3f}" if loss else "–",
                f"{loss['train/loss']:.3f}" if loss else "–",
                f"{b['alignment']:.3f} ({b['alignment_stranger']:.3f})",
                f"{b['drift']:.3f}",
                f"{b['preference_ratio']:.2f}",
                f"{100 * b['top1_share']:.1f} %",
                f"{b['rank_persistence']:.3f} ({b['rank_persistence_stranger']:.3f})",
                f"{b['kendall_tau']:.3f}",
                f"{b['overlap_100']:.2f}",
                f"{b['sink_mass']:.3f} ({b['sink_uniform']:.3f})",
                f"{b['sink_rate']:.1f}",
            ])  # fmt: skip
    assert cells == expected


def test_ranked_lists_show_where_each_favourite_went(pair, parse):
    runs, text = pair
    lists = parse(re.search(r'<section id="preference">.*?</section>', text, re.S)[0]).table(5)
    assert len(lists) == 2 * 2 * 10
    first, last = runs[0].snapshots()[0], runs[0].snapshots()[-1]
    token = first.summary["top_tokens"][3]
    p_now = last.arrays["mean_prob"]
    rank_now = 1 + int((p_now > p_now[token["id"]]).sum())
    assert lists[3] == ["4", token["text"], f"{token['p'] * 120:.2f}", "1.0 %", str(rank_now)]


def test_summary_equals_the_files(pair):
    runs, _ = pair
    summary = json.loads(json.dumps(summarise(runs), allow_nan=False))["runs"]
    for run, entry in zip(runs, summary, strict=True):
        birth, snapshots = read_json(run.birth), run.snapshots()
        assert entry["path"] == str(run.path)
        assert {k: entry[k] for k in ("digest", "init_seed", "data_seed", "probe_seed", "n_params")} == {
            k: birth[k] for k in ("digest", "init_seed", "data_seed", "probe_seed", "n_params")
        }
        assert entry["corpus"] == birth["data"]
        assert entry["final_step"] == snapshots[-1].step
        assert [row["label"] for row in entry["rows"]] == ["birth", "step", "step", "end"]
        for row, snapshot in zip(entry["rows"], snapshots, strict=True):
            assert {name: row[name] for name in snapshot.bias} == snapshot.bias
    assert [entry["name"] for entry in summary] == ["_one$", "two"]


def test_the_same_runs_give_the_same_bytes(pair, tmp_path):
    runs, text = pair
    assert build(runs, tmp_path) == text
    first, second = ({p.name: p.read_bytes() for p in data(folder)} for folder in (runs[0].path.parent, tmp_path))
    assert first == second


def data(folder):
    """The CSV files of a page."""
    return sorted((folder / "report-data").iterdir())


def test_every_picture_names_its_csv_and_every_csv_has_a_picture(pair):
    runs, text = pair
    panels = re.findall(r'<figure class="panel.*?</figure>', text, re.S)
    chain = re.sub(r'<figure class="panel.*?</figure>', "", text, flags=re.S)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", chain, re.S)
    named = [re.findall(r'<a class="data" href="report-data/([^"]*)">\1</a>', caption) for caption in captions]
    assert len(captions) == chain.count("<figure>")
    assert len(panels) > 8
    shown = set(re.findall(r'href="report-data/([^"]*)"', "".join(panels)))
    assert shown <= {path.name for path in data(runs[0].path.parent)}
    assert all(len(names) == 1 for names in named)
    assert {name for names in named for name in names} == {path.name for path in data(runs[0].path.parent)}


def test_csv_files_are_tidy_and_hold_what_was_measured(pair):
    runs, _ = pair
    folder = runs[0].path.parent
    order = [
        "run", "probe", "step", "lambda", "layer", "head", "position", "epsilon", "rank", "unit", "channel", "token",
        "text", "stranger", "index", "quantity", "value",
    ]  # fmt: skip
    for path in data(folder):
        header = path.read_text(encoding="utf-8").splitlines()[0].split(",")
        assert header == [name for name in order if name in header], path.name
        assert {"quantity", "value"} <= set(header)
        held_rows = rows(folder, path.name)
        keys = [tuple(value for name, value in row.items() if name != "value") for row in held_rows]
        assert len(keys) == len(set(keys)) > 0, path.name

    for run, label in zip(runs, ("_one$", "two"), strict=True):
        for s in run.snapshots():
            of = {"run": label, "step": s.step}
            a = s.arrays
            assert values(folder, "aggregation-discrepancy.csv", **of) == a["variance_discrepancy"].tolist()
            assert values(folder, "aggregation-n-eff.csv", **of) == [heads[:, -1].mean() for heads in a["n_eff"]]
            assert values(folder, "neurons-z.csv", **of) == a["neuron_z"].max(1).tolist()
            assert values(folder, "dominance-massive.csv", **of) == a["massive_value"].max(1).tolist()
            assert values(folder, "dominance-rank.csv", **of) == a["effective_rank"].tolist()
            for quantity, of_blocks in (
                ("dominance_first", a["dominance"][:, 0]),
                ("dominance_median", [np.median(of_block) for of_block in a["dominance"]]),
            ):
                assert values(folder, "dominance-ratio.csv", **of, quantity=quantity) == list(of_blocks)
            assert values(folder, "lock-cosine-heads.csv", **of) == a["qk_cosine"].ravel().tolist()
            assert values(folder, "sink-mass-heads.csv", **of) == a["sink_mass"].ravel().tolist()
            variance = a["positional_variance"]
            length = variance.shape[2]
            ratios = [
                heads[0] / (sum(heads[t] for t in range(length) if t >= length / 2) / (length // 2))
                for heads in variance.reshape(-1, length)
            ]
            assert values(folder, "aggregation-discrepancy-heads.csv", **of) == pytest.approx(ratios)
            assert values(folder, "sink-mass.csv", **of, quantity="bias/sink_mass") == [s.bias["sink_mass"]]


def test_the_flow_of_ranks_names_every_favourite_at_both_ends(pair):
    runs, text = pair
    svg = re.search(r'<svg[^>]*aria-label="two. Rank in p̄.*?</svg>', text, re.S)[0]
    shown = [html.unescape(t) for t in re.findall(r">([^<]*‹[^<]*›[^<]*)<", svg)]
    first, *_, last = runs[1].snapshots()
    favourites = {t["id"] for s in (first, last) for t in s.summary["top_tokens"][:10]}
    assert len(shown) == 2 * len(favourites)
    drawn_rows = rows(runs[0].path.parent, "preference-ranks.csv", run="two")
    assert {int(row["token"]) for row in drawn_rows} == favourites
    for snapshot in (first, last):
        ranked = scipy.stats.rankdata(-snapshot.arrays["mean_prob"].astype(float), "ordinal")
        drawn = {int(row["token"]): float(row["value"]) for row in drawn_rows if row["step"] == str(snapshot.step)}
        assert drawn == {token: ranked[token] for token in favourites}


def test_the_lineage_test_has_a_section_where_it_was_taken(tmp_path, make_run):
    run = make_run(tmp_path / "run", only=())
    assert 'id="lineage"' not in build([run], tmp_path)
    for step, z in ((0, 50.0), (64, 20.5)):
        values = {"seedprint/z": z, "seedprint/z_stranger": 1.5, "seedprint/log10_p": -z}
        append_metrics(run.metrics, step, values)
    assert 'id="lineage"' in build([run], tmp_path)
    assert [(row["step"], row["quantity"], row["value"]) for row in rows(tmp_path, "lineage-z.csv")] == [
        ("0", "seedprint/z", "50"),
        ("64", "seedprint/z", "20.5"),
        ("0", "seedprint/z_stranger", "1.5"),
        ("64", "seedprint/z_stranger", "1.5"),
    ]


def test_numbers_of_an_older_page_are_replaced_and_nothing_else_is(tmp_path, make_run, make_snapshot):
    run = make_run(tmp_path / "run", steps=(0, 1), only=("sink_mass",))
    folder = tmp_path / "report-data"
    folder.mkdir()
    (folder / "gone.csv").write_text("a\n1\n")
    build([run], tmp_path)
    assert "gone.csv" not in [path.name for path in data(tmp_path)]
    (folder / "notes.txt").write_text("mine")
    before = (tmp_path / "report.html").read_bytes()
    make_snapshot(2, np.random.default_rng(0)).write(run.snapshot(2))
    with pytest.raises(UsageError, match=r"notes\.txt: in the way"):
        build_report([run], tmp_path / "report.html")
    assert (folder / "notes.txt").read_text() == "mine"
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_snapshot_of_an_unknown_step_alone_has_a_page(tmp_path, make_run, make_snapshot, parse):
    run = make_run(tmp_path / "run", steps=(0,), only=("sink_mass", "effective_rank"))
    run.snapshot(0).rename(run.snapshot(-1))
    summary = run.snapshot(-1) / "summary.json"
    write_sealed_json(summary, read_sealed_json(summary, dict) | {"step": -1})
    text = build([run], tmp_path)
    assert parse(text).table(10)[0][0] == "unknown"
    assert "step -1" not in text
    assert "sink-map.csv" in text
    # Beside dated ones it takes no place in time.
    make_snapshot(0, np.random.default_rng(0)).write(run.snapshot(0))
    make_snapshot(5, np.random.default_rng(1)).write(run.snapshot(5))
    assert ", step 5</span>" in build([run], tmp_path)
    assert {row["step"] for row in rows(tmp_path, "dominance-rank.csv")} == {"0", "5"}


def test_snapshots_of_a_training_elsewhere_have_a_page_over_it(tmp_path, capsys, make_run):
    whole = make_run(tmp_path / "run", strangers=False, only=("sink_mass", "mean_prob"))
    (tmp_path / "bias").mkdir()
    (whole.path / "snapshots").rename(tmp_path / "bias" / "snapshots")
    assert main(["report", str(tmp_path / "bias")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "bias" / "report.html")
    page = (tmp_path / "bias" / "report.html").read_text()
    ids = re.findall(r'<section id="(\w+)"', page)
    assert "sink" in ids
    assert "preference" in ids
    assert "loss" not in ids
    assert "Birth certificate" not in page
    assert "Validation loss" not in page
    assert main(["report", str(tmp_path / "bias"), "--step=8"]) == 0
    with pytest.raises(UsageError, match="not a run"):
        RunDir.open_measured(tmp_path)


def test_one_run_has_no_headings_of_runs(tmp_path, make_run):
    text = build([make_run(tmp_path / "run")], tmp_path)
    assert '<span class="swatch"' not in text
    # loss 1, aggregation 3, neurons 2, dominance 3, lock 3, sink 5, 2 each of the seed's mark, speed 2
    assert text.count("<figure>") == 17 + 4 * 2 + 2
    assert text.count('<figure class="panel') == 10  # those of the story, and what it has nothing to say of


def test_losses_without_snapshots_after_birth(tmp_path, make_run):
    run = make_run(tmp_path / "run", steps=(0,))
    append_metrics(run.metrics, 7, {"train/loss": 3.5})
    append_metrics(run.metrics, 9, {"train/loss": 3.25, "train/tokens": 900})
    build([run], tmp_path)
    found = [(r["step"], r["label"], r["train_loss"], r["tokens"]) for r in summarise([run])["runs"][0]["rows"]]
    assert found == [(0, "birth", None, 0), (9, "end", 3.25, 900)]


def test_a_run_without_strangers_and_without_arrays(tmp_path, make_run):
    run = make_run(tmp_path / "run", strangers=False)
    for snapshot in run.snapshots():
        Snapshot(snapshot.summary, {"argmax_share": snapshot.arrays["argmax_share"]}).write(run.snapshot(snapshot.step))
    text = build([run], tmp_path)
    assert "strangers, largest" not in text
    assert "(–)" in text
    assert text.count("The snapshots do not hold it.") == 4  # aggregation, dominance, lock, contraction


def test_what_is_not_a_number_is_shown_as_missing(tmp_path, make_run, make_snapshot, parse):
    run = make_run(tmp_path / "run")
    with run.metrics.open("a") as f:  # as a foreign writer may put it: ours writes null
        f.write('{"step": 65, "train/loss": NaN, "val/loss": Infinity}\n')
    rng = np.random.default_rng(0)
    broken = make_snapshot(65, rng, alignment=float("nan"), drift=None, preference_ratio=float("inf"))
    for array in broken.arrays.values():
        array[...] = np.nan
    broken.write(run.snapshot(65))
    text = build([run], tmp_path)
    row = parse(text).table(12)[-1]
    assert row[:3] == ["end65", "∞", "–"]
    assert row[3].startswith("– (")
    assert row[4:6] == ["–", "–"]
    assert "train/loss is not a number in 1 lines, first at step 65" in text
    last = json.loads(json.dumps(summarise([run]), allow_nan=False))["runs"][0]["rows"][-1]
    assert (last["alignment"], last["train_loss"], last["val_loss"], last["preference_ratio"]) == (None,) * 4


def test_a_long_log_does_not_make_a_large_page(tmp_path, make_run):
    run = make_run(tmp_path / "run", only=("sink_mass", "mean_prob"))
    with run.metrics.open("a") as f:
        f.writelines(f'{{"step": {step}, "train/loss": 4.0}}\n' for step in range(65, 20_000))
    assert len(build([run], tmp_path)) < 500_000


@pytest.mark.parametrize("damage", ["torn", "shape"])
def test_a_damaged_snapshot_is_named_and_the_old_page_stays(tmp_path, damage, make_run):
    run = make_run(tmp_path / "run")
    file, out = run.snapshot(8) / "arrays.safetensors", tmp_path / "report.html"
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        Snapshot(read_sealed_json(file.with_name("summary.json"), dict), {"sink_mass": np.zeros(3)}).write(file.parent)
    out.write_text("before")
    with pytest.raises(RunError, match=re.escape(str(file))):
        build_report([run], out)
    assert out.read_text() == "before"


def test_a_log_line_without_a_step_is_named(tmp_path, make_run):
    run = make_run(tmp_path / "run")
    with run.metrics.open("a") as f:
        f.write('{"train/loss": 1.0}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl: line 65 is damaged \(it has no step\)"):
        summarise([run])


def test_the_file_is_replaced_whole(tmp_path, make_run):
    run = make_run(tmp_path / "run", only=())
    run.report.write_text("old")
    old = run.report.open()  # still the old file, whole, for its reader of now
    build_report([run], run.report)
    assert old.read() == "old"
    old.close()
    assert run.report.read_text(encoding="utf-8").endswith("</html>\n")
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == [".report.lock"]


def test_what_a_writer_that_was_killed_has_left_is_removed(tmp_path, make_run):
    run = make_run(tmp_path / "run", steps=(0,), only=("sink_mass",))
    for path in (run.report, run.path / "report-data", run.snapshot(0) / "report.html"):
        if (child := os.fork()) == 0:
            with atomic_path(path):
                os._exit(9)
        os.waitpid(child, 0)
    assert len([p for p in run.path.rglob(".*") if p.is_dir()]) == 3
    build_pages([run], run.report)
    assert [p for p in run.path.rglob(".*") if p.is_dir()] == []


def test_runs_of_one_name_get_names_that_differ(tmp_path, make_run):
    runs = [make_run(tmp_path / "a" / "run", steps=(0,)), make_run(tmp_path / "b" / "run", steps=(0,))]
    assert [entry["name"] for entry in summarise(runs)["runs"]] == ["a/run", "b/run"]
    assert [entry["name"] for entry in summarise([runs[0]] * 2)["runs"]] == ["run", "run (2)"]


def test_no_run_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="at least one run"):
        build_report([], tmp_path / "report.html")


def test_pages_need_no_matplotlib_and_a_figure_names_its_install_line(tmp_path, monkeypatch, make_run):
    run = make_run(tmp_path / "run")
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    build_pages([run], run.report)
    assert run.report.is_file()
    with pytest.raises(UsageError, match=re.escape("pip install matplotlib")):
        save_figure([run], "sink", tmp_path / "sink.pdf")
    assert summarise([run])["runs"]


def test_ranks_and_printable_by_hand():
    assert ranks(np.array([0.1, 0.5, 0.1, 0.3])).tolist() == [3, 1, 4, 2]
    assert np.isnan(ranks(np.array([0.1, np.nan]))).all()
    assert printable("a\x00\u202e\ud800 é日") == "a\\x00\\u202e\\ud800 é日"


def test_the_link_to_the_sink_shows_what_was_found_on_text(tmp_path, make_run, parse):
    run = make_run(tmp_path / "run", steps=(0, 8))
    on_random = [f"{snapshot.bias['sink_mass']:.3f}" for snapshot in run.snapshots()]
    assert f"mass {' → '.join(on_random)}" in "".join(parse(build([run], tmp_path)).text)
    for folder, mass in zip(run.snapshot_folders(), (0.06, 0.872), strict=True):
        old = Snapshot.read(folder)
        Snapshot(old.summary | {"bias_text": old.bias | {"sink_mass": mass}}, old.arrays).write(folder)
    assert "mass 0.060 → 0.872 on text" in "".join(parse(build([run], tmp_path)).text)


def test_the_link_to_aggregation_names_both_blocks_where_they_differ(tmp_path, make_run, parse):
    run = make_run(tmp_path / "run", steps=(0, 8), n_layers=2)
    for peaks, words in (
        (((10.11, 1), (9.95, 2)), "10.11 in block 1 → 9.95 in block 2"),
        (((10.11, 2), (9.95, 2)), "10.11 → 9.95 in block 2"),
    ):
        for folder, (value, block) in zip(run.snapshot_folders(), peaks, strict=True):
            old = Snapshot.read(folder)
            values = np.where(np.arange(1, 3) == block, value, 1.5)
            arrays = {**old.arrays, "variance_discrepancy": values, "sink_mass": np.full((2, 2), 0.01)}
            Snapshot(old.summary | {"bias": old.bias | {"sink_uniform": 0.06}}, arrays).write(folder)
        assert f"σ²(0)/σ² {words}" in parse(build([run], tmp_path)).text


def test_the_head_and_the_findings_count_the_steps_that_were_skipped(tmp_path, make_run):
    run = make_run(tmp_path / "run", steps=(0, 8))
    assert "skipped" not in html.unescape(build([run], tmp_path)).partition("<script")[0]
    for step, skipped in ((4, 1), (8, 3)):
        append_metrics(run.metrics, step, {"train/skipped_steps": skipped})
    text = html.unescape(build([run], tmp_path))
    assert "8 steps, 800 tokens seen · 3 of 8 steps skipped (loss or gradient not finite)" in text
    (found,) = [v for v in summarise([run])["runs"][0]["verdicts"] if v["key"] == "skipped_steps"]
    assert found["sentence"] == "Training skipped 3 of 8 steps: their loss or gradient was not finite."
    assert (found["steps"], found["values"]) == ([4, 8], [1, 3])
    assert found["sentence"] in text


def test_a_snapshot_without_a_quantity_is_no_gap_and_one_without_its_number_is(tmp_path, make_run):
    run = make_run(tmp_path / "run", steps=(0, 4, 8, 12))
    lacks, not_finite = run.snapshot_folders()[1:3]
    for folder, change in ((lacks, lambda bias: bias.pop("alignment")), (not_finite, _no_alignment)):
        old = Snapshot.read(folder)
        bias = dict(old.bias)
        change(bias)
        Snapshot(old.summary | {"bias": bias}, old.arrays).write(folder)
    data = json.loads(re.search(r'id="charts">(.*?)</script>', build([run], tmp_path), re.S)[1])
    (line,) = [s for s in data["panels"]["alignment"]["series"] if "look" not in s]
    assert line["axes"] == [["step", [0, 8, 12]]]
    assert [value is None for value in line["v"]] == [False, True, False]


def _no_alignment(bias):
    bias["alignment"] = float("nan")
