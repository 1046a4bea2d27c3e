"""Groups of seeds, fields that differ, and paired differences, beside scipy's own test of pairs."""

from itertools import combinations

import pytest
from scipy import stats

from birthmark.errors import UsageError
from birthmark.findings.compared_runs import Comparison, compare_configs, comparison_in_words, paired_differences
from birthmark.findings.inactive_sections import why_inactive
from birthmark.findings.run_history import RunHistory
from birthmark.measure.metrics_log import MetricsLog
from birthmark.measure.records import RunDir, Snapshot
from birthmark.report.run_page import _paired, page_runs

VALIDATION = "files of data.val_path"


def history(path, index, name, seed, mlp, mass):
    summary = {"step": 9, "bias": {"sink_mass": mass, "sink_mass_max": mass, "sink_uniform": 0.05, "sink_rate": 0.0}}
    config = f"name: {name}\nrun_dir: {name}\ninit_seed: {seed}\nmodel: {{mlp: {mlp}, d: 4}}\nlog: {{wandb: 'off'}}\n"
    metrics, snapshots = MetricsLog([{"step": 9, "val/loss": 1.0 + mass}]), [Snapshot(summary, {})]
    return RunHistory(index, name, RunDir(path / name), {"init_seed": seed}, config, metrics, snapshots, [])


@pytest.fixture
def runs(tmp_path):
    rows = [("a", 0, "gelu", 0.1), ("a-1", 1, "gelu", 0.2)]
    rows += [("b", 0, "relu", 0.5), ("b-1", 1, "relu", 0.4), ("b-2", 2, "relu", 0.7)]
    return [history(tmp_path, i, *row) for i, row in enumerate(rows)]


def test_seeds_of_one_config_are_a_group_and_names_are_no_difference(runs):
    found = compare_configs(runs)
    assert found.groups == ["a (2 seeds)"] * 2 + ["b (3 seeds)"] * 3
    assert found.several_seeds == {"a (2 seeds)", "b (3 seeds)"}
    assert found.fields == ["init_seed", "model.mlp"]
    assert found.values[3] == ["1", "relu"]
    assert compare_configs(runs[:1]).fields == []


def test_differences_are_those_of_pairs_of_one_seed(runs):
    ((first, second, differences),) = paired_differences(runs, compare_configs(runs).groups)
    assert (first, second) == ("a (2 seeds)", "b (3 seeds)")
    mass = next(d for d in differences if d.quantity.name == "sink_mass")
    expected = stats.ttest_rel([0.5, 0.4], [0.1, 0.2]).confidence_interval(0.95)
    assert mass.n_pairs == 2  # seed 2 has no partner
    assert mass.mean == pytest.approx(0.3)
    assert mass.interval == pytest.approx((expected.low, expected.high))
    ((*_, one),) = paired_differences([runs[0], runs[2]], ["a", "b"])
    assert {(d.n_pairs, d.interval) for d in one} == {(1, None)}
    assert paired_differences([runs[0], runs[4]], ["a", "b"]) == []


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("q/seed-0", "q/seed-1"), "q (2 seeds)"), (("q-10", "q-11", "q-12"), "q (3 seeds)"),
        (("gpt2", "gpt2-1"), "gpt2 (2 seeds)"), (("0", "1"), "0 (2 seeds)"), (("fast", "q"), "q (2 seeds)"),
    ],
)  # fmt: skip
def test_a_group_of_several_seeds_is_not_named_as_one_of_its_runs(tmp_path, names, group):
    members = [history(tmp_path, i, name, i, "gelu", 0.1) for i, name in enumerate(names)]
    assert set(compare_configs([*members, history(tmp_path, 9, "other", 0, "relu", 0.1)]).groups) == {group, "other"}


def logged(path, name, seed, losses, masses=()):
    snapshots = [Snapshot({"step": step, "bias": {"sink_mass": mass}}, {}) for step, mass in masses]
    metrics = MetricsLog({"step": step, "val/loss": loss} for step, loss in losses)
    return RunHistory(0, name, RunDir(path / name), {"init_seed": seed}, "", metrics, snapshots, [])


def test_runs_that_diverged_or_stopped_are_left_out_by_name_and_not_compared_early(tmp_path):
    """Two seeds of b are NaN at step 1000, where no snapshot of them is written; a third stopped halfway."""
    a = [logged(tmp_path, f"a{s}", s, [(500, 3.0), (1000, 2.0 + s)], [(1000, 0.3)]) for s in range(4)]
    b = [logged(tmp_path, f"b{s}", s, [(500, 2.5), (1000, None)], [(500, 0.1), (700, 0.9)]) for s in range(2)]
    b += [logged(tmp_path, "b2", 2, [(500, 2.5)]), logged(tmp_path, "b3", 3, [(1000, 5.5)], [(1000, 0.5)])]
    ((_, _, (loss, mass)),) = paired_differences([*a, *b], ["a"] * 4 + ["b"] * 4)
    for found, first, second in ((loss, 5.0, 5.5), (mass, 0.3, 0.5)):
        assert (found.step, found.n_pairs, list(found.missing)) == (1000, 1, ["b0", "b1", "b2"])
        assert (found.first, found.second) == (first, second)
    # Not one pair is left: said, and no number.
    ((_, _, (loss,)),) = paired_differences([*a[:2], *b[:2]], ["a"] * 2 + ["b"] * 2)
    assert (loss.step, loss.n_pairs, list(loss.missing)) == (1000, 0, ["b0", "b1"])
    assert loss.interval is None
    assert loss.mean != loss.mean


def test_every_comparison_is_made_and_a_page_says_how_many_it_leaves_out(tmp_path):
    names = ["a", "b", "c", "d", "e"]
    runs = [logged(tmp_path, name, 0, [(9, 1.0), (10, None if name == "b" else 2.0)]) for name in names]
    assert [(first, second) for first, second, _ in paired_differences(runs, names)] == list(combinations(names, 2))
    (fold,) = _paired(runs, Comparison(names, [], [[]] * 5, [True] * 5))
    assert [block.kind for block in fold.blocks] == ["table"] * 6 + ["prose"]
    assert fold.blocks[-1].text == "4 of 10 comparisons are left out."
    assert "left out: val loss of b at step 10." in fold.blocks[0].caption
    assert fold.blocks[1].caption.endswith("one pair of runs of the same seed: no interval.")


def test_a_run_that_repeats_a_seed_is_no_further_seed(tmp_path, runs):
    again = history(tmp_path, 5, "a-again", 0, "gelu", 0.1)
    found = compare_configs([runs[0], again])
    assert found.groups == ["a", "a"]
    assert found.several_seeds == set()
    found = compare_configs([*runs[:2], again])
    assert found.several_seeds == {"a (2 seeds)"}
    assert [run.group for run in page_runs([*runs[:2], again], found)] == ["a (2 seeds)"] * 2 + [""]


def test_a_damaged_config_is_named(runs, tmp_path):
    broken = RunHistory(5, "c", RunDir(tmp_path / "c"), {}, "model: {", MetricsLog(), [], [])
    with pytest.raises(UsageError, match=r"c/config\.yaml"):
        compare_configs([*runs, broken])


def test_a_section_is_folded_only_where_it_never_left_its_control(tmp_path):
    quiet, loud = (history(tmp_path, 0, "x", 0, "gelu", mass) for mass in (0.06, 0.2))
    assert why_inactive([quiet], "sink") == "no head above 0.060; uniform attention gives 0.050"
    assert why_inactive([quiet, loud], "sink") == ""
    assert why_inactive([history(tmp_path, 0, "x", 0, "gelu", float("nan"))], "sink") == ""
    assert why_inactive([quiet], "direction") == ""


def test_one_sentence_compares_two_configs(runs):
    (sentence,) = comparison_in_words(runs, compare_configs(runs).groups)
    low, high = stats.ttest_rel([0.5, 0.4], [0.1, 0.2]).confidence_interval(0.95)
    pairs = f"+0.300, 95 % interval {low:.3f} to +{high:.3f}, which holds 0: 2 pairs cannot tell"
    assert sentence == (
        f"b (3 seeds) has more sink mass than a (2 seeds) (0.450 against 0.150; {pairs}) and a higher validation loss "
        f"(1.450 against 1.150; {pairs}) at step 9."
    )
    (alone,) = comparison_in_words([runs[0], runs[2]], ["a", "b"])
    assert alone == (
        "b has more sink mass than a (0.500 against 0.100) and a higher validation loss (1.500 against 1.100) at step "
        "9; one pair cannot tell an effect of the config from chance."
    )
    (seeds,) = comparison_in_words(runs[1::-1], ["a", "a"])
    assert seeds.startswith("a has less sink mass than a-1 (0.100 against 0.200)")
    assert seeds.endswith("they differ in no field but seeds, so that the difference is chance.")
    (strangers,) = comparison_in_words([runs[0], runs[4]], ["a", "b"])
    assert strangers.endswith("they share no seed, so that the difference may be the seed's.")
    assert comparison_in_words(runs[:1], ["a"]) == []


def test_a_share_of_rows_that_do_not_sum_to_one_is_compared_with_a_true_share(tmp_path):
    """Raw masses .004 against .051 are less; as shares of their rows, .159 against .051, they are more."""
    plain, squared = (
        history(tmp_path, i, name, 0, name, mass) for i, (name, mass) in enumerate([("p", 0.051), ("q", 0.004)])
    )
    squared.snapshots[0].summary["bias"] |= {"sink_mass_normalised": 0.159, "sink_mass_normalised_max": 0.2}
    for runs, sign, means in (([plain, squared], 1, (0.051, 0.159)), ([squared, plain], -1, (0.159, 0.051))):
        ((_, _, (_, mass)),) = paired_differences(runs, [run.name for run in runs])
        assert (mass.first, mass.second) == means
        assert mass.mean == pytest.approx(sign * 0.108)
        (fold,) = _paired(runs, compare_configs(runs))
        assert fold.blocks[0].rows[1][0] == "sink mass (share of the row)"
        (sentence,) = comparison_in_words(runs, [run.name for run in runs])
        more, (first, second) = "more" if sign > 0 else "less", means
        assert f"has {more} sink mass (share of the row) than {runs[0].name} ({second} against {first})" in sentence


def test_values_that_are_no_measure_of_one_another_say_why(tmp_path):
    """Shorter probes have larger uniform shares, losses per token are of the tokens, and documents hide position 0."""
    a, b = (history(tmp_path, i, name, 0, name, mass) for i, (name, mass) in enumerate([("a", 0.05), ("b", 0.1)]))

    def said():
        (sentence,) = comparison_in_words([a, b], ["a", "b"])
        return sentence.removesuffix(" at step 9; one pair cannot tell an effect of the config from chance.")

    assert said().endswith(
        "more sink mass than a (0.100 against 0.050) and a higher validation loss (1.100 against 1.050)"
    )
    b.snapshots[0].summary["bias"]["sink_uniform"] = 0.1
    assert "(0.100 against 0.050; uniform attention gives 0.100 against 0.050)" in said()
    (fold,) = _paired([a, b], compare_configs([a, b]))
    mass = "Sink mass: uniform attention gives 0.100 against 0.050."
    assert fold.blocks[0].caption.endswith(mass)
    for run, size in ((a, 64), (b, 128)):
        run.birth["data"] = {"vocab_size": size}
    assert said().endswith("(1.100 against 1.050; nats per token of other tokens, which cannot be compared)")
    b.birth["data"] = {"vocab_size": 64, "tokenizer_hash": "b"}  # a's is not recorded
    assert said().endswith("(1.100 against 1.050)")
    a.birth["data"]["tokenizer_hash"] = "a"
    assert said().endswith("other tokens, which cannot be compared)")
    (fold,) = _paired([a, b], compare_configs([a, b]))
    loss = "Val loss: nats per token of other tokens, which cannot be compared."
    assert fold.blocks[0].caption.endswith(f" {loss} {mass}")
    # Tokens of one set of files are the same, however many rows a model has.
    for run, size in ((a, 64), (b, 128)):
        run.birth["data"] = {"kind": "tokens", "content_hash": "f", "vocab_size": size}
    assert said().endswith("(1.100 against 1.050)")
    b.birth["data"]["content_hash"] = "g"
    assert said().endswith("other tokens, which cannot be compared)")
    # One reason of several quantities stands once.
    for run, uniform in ((a, 0.05), (b, 0.1)):
        run.snapshots[0].summary["bias_text"] = {"sink_mass": 0.02, "sink_uniform": uniform}
        run.snapshots[0].summary.pop("model", None)
    (fold,) = _paired([a, b], compare_configs([a, b]))
    assert "Sink mass, text probe; sink mass, random probe: uniform" in fold.blocks[0].caption


def test_a_sink_is_compared_where_the_sentences_of_its_run_judge_it(tmp_path):
    """Documents that see themselves alone hide position 0 from later ones: their sinks are at their first tokens."""
    a, b = (history(tmp_path, i, name, 0, name, 0.1) for i, name in enumerate(("a", "b")))
    for run, mass in ((a, 0.2), (b, 0.6)):
        text = {"sink_mass": 0.02, "sink_uniform": 0.05}
        text |= {"document_sink_mass": mass, "document_sink_uniform": 0.15}
        run.snapshots[0].summary.update({"bias_text": text, "model": {"attention": {"documents": True}}})
    (sentence,) = comparison_in_words([a, b], ["a", "b"])
    assert sentence.startswith("b has more document sink mass on text than a (0.600 against 0.200)")
    (fold,) = _paired([a, b], compare_configs([a, b]))
    assert ["document sink mass, text probe", "0.200", "0.600", "+0.400"] in fold.blocks[0].rows
    assert "sink mass, text probe" not in [row[0] for row in fold.blocks[0].rows]
    # Each run keeps the place that its sentence names.
    a.snapshots[0].summary["model"]["attention"]["documents"] = False
    (sentence,) = comparison_in_words([a, b], ["a", "b"])
    places = "on the first token of a document against the first position"
    assert sentence.startswith(f"b has more sink mass on text than a (0.600 against 0.020; {places})")
    b.snapshots[0].summary["model"]["attention"]["documents"] = False
    (sentence,) = comparison_in_words([a, b], ["a", "b"])
    assert sentence.startswith("b has the same sink mass on text as a (0.020)")


@pytest.mark.parametrize(
    ("first", "second", "is_unlike"),
    [
        ({"content_hash": "f"}, {"content_hash": "g"}, True),
        ({"content_hash": "f"}, {"content_hash": "f"}, False),
        ({"content_hash": "f"}, {}, False),
        ({"content_hash": "f", "split": VALIDATION}, {"content_hash": "g", "split": VALIDATION}, False),
        ({"sources": {"x": ("f", 0.5), "y": ("g", 0.5)}}, {"sources": {"y": ("g", 0.5), "z": ("f", 0.5)}}, False),
        ({"sources": {"x": ("f", 0.5), "y": ("g", 0.5)}}, {"sources": {"x": ("f", 0.9), "y": ("g", 0.1)}}, True),
    ],
)
def test_losses_on_unlike_text_of_one_vocabulary_say_so(tmp_path, first, second, is_unlike):
    runs = [history(tmp_path, i, name, 0, name, 0.1) for i, name in enumerate(("a", "b"))]
    for run, data in zip(runs, (first, second), strict=True):
        sources = {n: {"content_hash": h, "share": share} for n, (h, share) in data.get("sources", {}).items()}
        run.birth["data"] = {"vocab_size": 64, **data, **({"sources": sources} if sources else {})}
    (sentence,) = comparison_in_words(runs, ["a", "b"])
    assert ("on data of another hash or in other shares, which may be other text" in sentence) == is_unlike


@pytest.mark.parametrize("apart", [0, 1e-5])
def test_pairs_that_print_alike_are_said_to_be_the_same_without_an_interval(tmp_path, apart):
    rows = [
        (f"{name}{seed}", seed, 0.1 + 0.1 * seed + off) for name, off in (("a", 0), ("b", apart)) for seed in (0, 1)
    ]
    runs = [history(tmp_path, i, name, seed, "gelu", mass) for i, (name, seed, mass) in enumerate(rows)]
    (sentence,) = comparison_in_words(runs, ["a", "a", "b", "b"])
    same = "; the same in every pair, to the digits shown"
    assert sentence == (
        f"b has the same sink mass as a (0.150{same}) and the same validation loss (1.150{same}) at step 9."
    )
    # Means that print alike of pairs that do not: an interval.
    runs[2:] = [history(tmp_path, i, f"b{i}", i, "gelu", mass) for i, mass in enumerate((0.2, 0.1))]
    assert "(0.150; " in comparison_in_words(runs, ["a", "a", "b", "b"])[0]
    assert "2 pairs cannot tell" in comparison_in_words(runs, ["a", "a", "b", "b"])[0]


def test_one_pair_has_no_column_of_intervals(runs):
    (fold,) = _paired([runs[0], runs[2]], compare_configs([runs[0], runs[2]]))
    (table,) = fold.blocks
    assert [column.title for column in table.columns] == ["at step 9", "a", "b", "difference"]
    assert {len(row) for row in table.rows} == {4}
    assert table.caption == "b minus a, one pair of runs of the same seed: no interval."
