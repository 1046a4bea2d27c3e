"""Runs and snapshots that are made, not trained, and a reader of pages that is none of ours."""

from html.parser import HTMLParser

import numpy as np
import pytest

from birthmark.files import write_json, write_text
from birthmark.measure.metrics_log import append_metrics
from birthmark.measure.records import RunDir, Snapshot

ATTACK = "<script>alert(1)</script>"
TEXTS = [ATTACK, " the", "$x^2$", "_y", "日本", "\u202eabc", "a\\nb"]
SCALARS = (
    "alignment", "drift", "preference_ratio", "top1_share", "rank_persistence", "kendall_tau", "overlap_10",
    "overlap_100", "overlap_1000", "sink_mass", "sink_mass_max", "sink_uniform", "sink_rate", "super_neurons",
)  # fmt: skip
STRANGERS = ("alignment_stranger", "rank_persistence_stranger")


def _make_snapshot(step, rng, *, n_layers=3, n_heads=2, vocab=120, length=16, strangers=True, only=None, **bias):
    """Random but plausible: what a snapshot holds, as far as reports read it; of its arrays ``only`` some, if given."""
    p = rng.dirichlet(np.ones(vocab)).astype(np.float32)
    arrays = {
        "mean_prob": p,
        "argmax_share": rng.dirichlet(np.ones(vocab)),
        "inter_mlp": rng.random(n_layers + 1),
        "intra_mlp": rng.random(n_layers + 1),
        "inter_attention": rng.random(n_layers),
        "intra_attention": rng.random(n_layers),
        "sink_mass": rng.random((n_layers, n_heads)),
        "importance": rng.random((n_layers, n_heads, length)),
        "positional_variance": rng.random((n_layers, n_heads, length)),
        "variance_discrepancy": 1 + rng.random(n_layers),
        "n_eff": 1 + rng.random((n_layers, n_heads, length)),
        "neuron_z": np.sort(1 + rng.random((n_layers, 4)))[:, ::-1],
        "dominance": 1 + rng.random((n_layers + 1, length)),
        "massive_value": np.sort(1 + rng.random((n_layers + 1, 5)))[:, ::-1],
        "effective_rank": 1 + rng.random(n_layers + 1),
        "qk_cosine": rng.random((n_layers, n_heads)),
        "qk_positive": rng.random((n_layers, n_heads)),
    }
    scalars = {name: float(rng.random()) for name in (*SCALARS, *(STRANGERS if strangers else ()))}
    order = np.argsort(-p, kind="stable")[:15]
    top = [
        {"rank": i + 1, "id": int(t), "text": TEXTS[i % len(TEXTS)], "p": float(p[t]), "argmax_share": 0.01}
        for i, t in enumerate(order)
    ]
    summary = {
        "step": step, "tokens": step * 100, "init_seed": 0, "vocab_size": vocab, "bias": scalars | bias,
        "top_tokens": top,
    }  # fmt: skip
    return Snapshot(summary, {name: array for name, array in arrays.items() if only is None or name in only})


def _make_run(path, *, seed=0, steps=(0, 1, 8, 64), losses=True, **shape):
    """A run on disk, as `pretrain` leaves it."""
    rng = np.random.default_rng(seed)
    run = RunDir(path)
    path.mkdir(parents=True)
    write_text(run.config, f"name: {path.name}\nnote: '{ATTACK}'\n")
    birth = {
        "digest": rng.bytes(32).hex(), "init_seed": seed, "data_seed": 1, "probe_seed": 2, "n_params": 1234567,
        "model": {"n_layers": 3}, "data": {"path": "http://example.org/corpus", "unigram_entropy": 4.321},
        "versions": {"birthmark": "0.1.0"},
    }  # fmt: skip
    write_json(run.birth, birth)
    for step in range(1, steps[-1] + 1) if losses else ():
        line = {"train/loss": 5 - step / 100}
        if step % 4 == 0:
            line |= {"train/step_p50_s": 0.25, "train/step_p99_s": 0.5, "train/data_wait": 0.01}
        append_metrics(run.metrics, step, line | ({"val/loss": 5.1 - step / 100} if step in steps else {}))
    for step in steps:
        _make_snapshot(step, rng, **shape).write(run.snapshot(step))
    return run


class _Page(HTMLParser):
    """An oracle of its own: balance of tags, attributes, ids, text and table cells."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.attributes, self.tags, self.rows, self.text, self.links = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if (tag, name) == ("a", "href")]
        self.attributes += [(name, value) for name, value in attrs if (tag, name) != ("a", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.stack:
            self.rows[-1][-1] += data

    def table(self, n_columns):
        return [row for row in self.rows if len(row) == n_columns]


@pytest.fixture(scope="session")
def attack():
    """Text that a page must not take for markup; it stands in every made run's config and tokens."""
    return ATTACK


@pytest.fixture(scope="session")
def make_snapshot():
    """``make_snapshot(step, rng, *, n_layers, n_heads, vocab, length, strangers, **bias)``."""
    return _make_snapshot


@pytest.fixture(scope="session")
def make_run():
    """``make_run(path, *, seed, steps, losses, **shape)``: a run on disk."""
    return _make_run


@pytest.fixture(scope="session")
def parse():
    """``parse(text)``: a page's tags, attributes, links, table cells and text; fails where tags do not balance."""
    return _Page
