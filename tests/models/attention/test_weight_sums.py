"""Sums over attention weights by two walks on a GPU, without a block of weights: against the whole matrix in float64,
and against the way by blocks.

Without a GPU the kernels run under Triton's interpreter (``make kernels``).
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from oracles import Operators, Traffic
from torch.utils._pytree import tree_leaves
from triton_kernels import DEVICES, IS_INTERPRETED

from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.measurement import birth_reference, measure
from birthmark.measure.records import RunDir
from birthmark.metrics.sinks import KeySummer, entropy_queries
from birthmark.models.attention import weight_reader
from birthmark.models.attention.document_mask import Documents
from birthmark.models.attention.fused import weight_sums
from birthmark.models.attention.normalisers import FusedSoftmax
from birthmark.models.attention.positions import Placement
from birthmark.models.attention.scores import ExtraKey, Scores
from birthmark.models.attention.weight_reader import gives_sums, read_weights, walks
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.plan.rehearsal import as_on
from birthmark.trainer.run import pretrain


@pytest.fixture(autouse=True, scope="module")
def tiles(request):
    if IS_INTERPRETED:
        request.getfixturevalue("small_tiles")


#: Positions, query and key/value heads, channels of keys and of values, and what else there is.
CASES = {
    "17": (17, 4, 4, 32, 32, {}),
    "33, shared keys": (33, 4, 2, 32, 32, {}),
    "64, one key for all": (64, 4, 1, 64, 64, {}),
    "65, a sink": (65, 2, 2, 128, 128, {"sink": True}),
    "257": (257, 2, 1, 32, 32, {}),
    "257, a window, a sink": (257, 2, 1, 32, 32, {"window": 70, "sink": True}),
    "40, a window of one": (40, 2, 2, 20, 20, {"window": 1}),
    "65, documents apart": (65, 4, 2, 40, 24, {"documents": True}),
    "65, documents apart, a window, a sink": (65, 2, 1, 32, 32, {"documents": True, "window": 9, "sink": True}),
    "65, first tokens of documents, a window": (65, 2, 1, 32, 32, {"first": True, "window": 20}),
    "65, first tokens of documents, a sink": (65, 2, 2, 64, 64, {"first": True, "sink": True}),
    "257, distances": (257, 2, 1, 32, 32, {"slopes": True}),
    "65, distances, documents apart, a sink": (65, 2, 2, 32, 32, {"slopes": True, "documents": True, "sink": True}),
    "40, distances, first tokens of documents": (40, 2, 1, 16, 16, {"slopes": True, "first": True}),
    "65, bf16": (65, 4, 2, 64, 64, {"dtype": torch.bfloat16, "sink": True, "first": True}),
    "33, fp16": (33, 2, 2, 32, 32, {"dtype": torch.float16}),
    "1": (1, 2, 2, 32, 32, {}),
}


class Given:
    """Inputs of one attention."""

    def __init__(self, name, device):
        self.length, n_heads, n_shared, width, of_values, self.more = CASES[name]
        generator, dtype = torch.Generator().manual_seed(0), self.more.get("dtype", torch.float32)
        shapes = [(n_heads, width), (n_shared, width), (n_shared, of_values)]
        # The heads of a position lie side by side, as projections leave them.
        self.q, self.k, self.v = (
            torch.randn(2, self.length, *shape, generator=generator).to(dtype).transpose(1, 2).to(device)
            for shape in shapes
        )
        self.sink = torch.randn(2, n_heads, self.length, generator=generator).to(device)
        numbers = torch.stack([torch.arange(self.length) // 30, (torch.arange(self.length) + 13) // 26]).to(device)
        self.documents = Documents.of(numbers)
        self.slopes = 2.0 ** -torch.arange(1, n_heads + 1).to(device) if "slopes" in self.more else None
        self.first = self.documents.first_positions() if {"first", "documents"} & {*self.more} else None

    def by(self, walk):
        """The attention with its reader."""
        place = Placement(slopes_H=self.slopes, documents=self.documents if "documents" in self.more else None)
        scores = Scores(self.q, self.k, 0.3, place, window=self.more.get("window"))
        extra = [ExtraKey(self.sink[..., None])] if "sink" in self.more else []
        with torch.no_grad(), read_weights(partial(KeySummer, first_BT=self.first), by_walk=walk):
            assert walks(scores, self.v) is walk
            return FusedSoftmax(scores, self.v, extra, needs_weights=True, needs_squares=True)

    def whole(self):
        """Sums, output and Σa² from the whole matrix, in float64."""
        q, k, v = (x.double().cpu() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        query, key = torch.arange(self.length)[:, None], torch.arange(self.length)
        seen = (key <= query) & (key > query - self.more.get("window", self.length))
        scores = q @ k.mT * 0.3
        if self.slopes is not None:
            scores = scores - self.slopes.double().cpu()[:, None, None] * (query - key)
        if "documents" in self.more:
            seen = seen & (key >= self.first.cpu()[:, None, :, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        alone = scores.softmax(-1)
        total = scores.exp().sum(-1, keepdim=True)
        share = total / (total + self.sink.double().cpu().exp()[..., None]) if "sink" in self.more else 1.0
        kinds = torch.stack([alone * share, alone])
        queries = list(entropy_queries(self.length))
        found = {
            "importance_2BHT": kinds.sum(3) / torch.arange(self.length, 0, -1),
            "mass_2BH": kinds[..., 1:, 0].sum(-1) / max(self.length - 1, 1),
            "squares_2BHT": kinds.square().sum(-1),
            "entropy_BH": torch.special.entr(alone).sum(-1)[..., queries].mean(-1),
            "largest_BH": scores.amax((2, 3)),
        }
        if self.first is not None:
            at = self.first.cpu()[None, :, None, :, None].expand(*kinds.shape[:4], 1)
            found["on_first_2BHT"] = kinds.gather(-1, at)[..., 0]
        return found, kinds[0] @ v, kinds[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_all_sums_are_those_of_the_whole_matrix_and_of_blocks(name, device):
    given = Given(name, device)
    wanted, out, weights = given.whole()
    walked, blocks = given.by(walk=True), given.by(walk=False)
    sums, by_blocks = walked.reader.sums(), blocks.reader.sums()
    assert (sums.on_first_2BHT is None) == ("on_first_2BHT" not in wanted)
    for (field, exact), (way, found) in product(wanted.items(), {"walk": sums, "blocks": by_blocks}.items()):
        torch.testing.assert_close(
            getattr(found, field).cpu().double(), exact, rtol=4e-6, atol=2e-6,
            msg=lambda m, field=field, way=way: f"{field} by {way}: {m}",
        )  # fmt: skip
    low = given.q.dtype != torch.float32
    # A GPU's exponential is wrong by two of its last place, and outputs are as large as 3.
    tolerance = 1e-2 if low else 2e-6 if device == "cpu" else 8e-6
    torch.testing.assert_close(walked.o_BHTK.cpu().double(), out, rtol=tolerance, atol=tolerance)
    assert walked.o_BHTK.stride() == blocks.o_BHTK.stride()
    # What is read later is the same.
    squares = walked.sum_squares().cpu().double()
    torch.testing.assert_close(squares, weights.square().sum(-1), rtol=4e-6, atol=2e-6)
    rows = walked.rows(0, given.length).cpu().double()
    torch.testing.assert_close(rows, weights, rtol=1e-5, atol=2e-6)
    share = walked.row_sum()
    assert (share is None) == ("sink" not in given.more)
    if share is not None:
        torch.testing.assert_close(share.cpu().double(), weights.sum(-1), rtol=4e-6, atol=2e-6)


def by_walk(q, k, v):
    return weight_sums.weight_sums(q, k, v, 1.0)


def by_blocks(q, k, v):
    return weight_reader._sums_of_blocks(Scores(q, k, 1.0, Placement()), v, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums_of", [by_walk, by_blocks])
def test_scores_of_thousands_overflow_nothing_and_nan_stays_in_its_row(sums_of, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, generator=generator).to(device) for _ in range(3))
    found = sums_of(300 * q, 10 * k, v)
    assert float(found.largest_BHT.max()) > 1e3
    assert all(bool(x.isfinite().all()) for x in found if x is not None)
    exact = (3000 * (q.double() @ k.double().mT)).masked_fill(
        torch.ones(40, 40, device=device).triu(1) > 0, -torch.inf
    ).softmax(-1)  # fmt: skip
    torch.testing.assert_close(found.entropy_BHT.double(), torch.special.entr(exact).sum(-1), rtol=1e-2, atol=2e-3)
    q[0, 1, 33, 3] = torch.nan
    found = sums_of(q, k, v)
    for x in (found.o_BHTV.sum(-1), found.lse_BHT, found.squares_BHT, found.entropy_BHT):
        assert torch.nonzero(x.isnan()).tolist() == [[0, 1, 33]]
    # All keys that the query sees.
    assert torch.nonzero(found.received_CBHT.isnan()).tolist() == [[0, 0, 1, j] for j in range(34)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 12), (2, [2] * 6), (9, [8, 4])])
@pytest.mark.parametrize("n_rows", [17, 40])
def test_blocks_of_any_size_have_the_same_sums(n_rows, most, sizes, device, monkeypatch):
    """A head, two heads or two sequences at a time; queries in three blocks, or in one of two programs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 4, 40, 16, generator=generator).to(device) for _ in range(3))
    for name, value in {"_HEADS": 1, "_ROWS": 32, "_CACHED": most * 32 * 40, "_WEIGHTS": most * 32 * 40}.items():
        monkeypatch.setattr(weight_reader, name, value)
    parts = weight_reader._blocks(q)[1]
    assert [q[part].shape[:2].numel() for part in parts] == sizes
    monkeypatch.setattr(weight_reader, "_blocks", lambda q: (n_rows, parts))
    for found, walked in zip(by_blocks(q, k, v), by_walk(q, k, v), strict=True):
        if walked is not None:
            torch.testing.assert_close(found, walked, rtol=4e-6, atol=2e-6)


PLAIN = AttentionConfig()


def model_of(attention=PLAIN, **more):
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 50, "max_seq_len": 40}
    shape |= {} if attention.normaliser == "differential" else {"n_kv_heads": 2}
    model, generator = born(ModelConfig(**shape | more, attention=attention), 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


PROBE = random_probe(50, 3, 40, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "documents", "a sink, a window", "alibi"])
def test_a_snapshot_is_that_by_blocks(name, device):
    attention = {
        "documents": AttentionConfig(documents=True),
        "a sink, a window": AttentionConfig(normaliser="softmax_sink", window=9),
    }.get(name, AttentionConfig())
    model = model_of(attention, n_layers=1, positions="alibi" if name == "alibi" else "rope").to(device)
    numbers = np.broadcast_to(np.arange(40) // 15, PROBE.shape) if name in ("documents", "plain") else None
    by = {}
    for way in ("blocks", "walk"):
        birth = birth_reference(model, PROBE, 2, way)
        by[way] = measure(model, PROBE, birth, batch_size=2, documents_NT=numbers, attention_weights=way)
        # The reference of a birth reads its probe as one document.
        assert np.array_equal(birth.mean_prob, by[way].arrays["mean_prob"]) or name == "documents"
    assert by["walk"].scalars.keys() == by["blocks"].scalars.keys()
    for array in ("importance", "sink_mass", "n_eff", "attention_entropy", "largest_logit", "mean_prob"):
        found, wanted = (by[way].arrays[array] for way in ("walk", "blocks"))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, err_msg=array)
    if numbers is not None:
        np.testing.assert_allclose(*(by[way].scalars["document_sink_mass"] for way in by), rtol=1e-5)
    assert not np.array_equal(*(by[way].arrays["importance"] for way in by)), "the same way twice"


OTHERS = {
    "sigmoid": AttentionConfig(normaliser="sigmoid"),
    "softpick": AttentionConfig(normaliser="softpick"),
    "differential": AttentionConfig(normaliser="differential"),
    "prefix": AttentionConfig(prefix=9),
    "t5": AttentionConfig(),
    "float64": AttentionConfig(),
    "wide heads": AttentionConfig(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_the_kernels_do_not_take_keeps_the_blocks(name, device, monkeypatch):
    monkeypatch.setattr(weight_sums, "weight_sums", lambda *_: pytest.fail("the kernels run"))
    more = {"t5": {"positions": "t5"}, "wide heads": {"d_model": 544}}.get(name, {})
    model = model_of(OTHERS[name], **more).to(device, torch.float64 if name == "float64" else None)
    measured = partial(measure, model, PROBE, batch_size=2)
    by_blocks, by_walk = (measured(attention_weights=way).arrays for way in ("blocks", "walk"))
    for array in ("importance", "sink_mass", "n_eff", "attention_entropy", "largest_logit"):
        np.testing.assert_array_equal(by_walk[array], by_blocks[array], err_msg=array)


@contextmanager
def reading(by_walk):
    with torch.no_grad(), torch.device("meta"), as_on("cuda"), read_weights(KeySummer, by_walk=by_walk):
        yield


def test_one_rule_chooses_the_walk():
    with reading(by_walk=True):
        q, v = torch.empty(2, 4, 20, 64), torch.empty(2, 2, 20, 64)
        plain = Scores(q, v, 0.3, Placement())
        slopes = Placement(slopes_H=torch.empty(4))
        wide = torch.empty(2, 4, 20, 128)
        taken = [
            (plain, v),
            (replace(plain, window=5, place=slopes), v),
            (replace(plain, q_BHTK=q.bfloat16(), k_BGSK=v.bfloat16()), v.bfloat16()),
            (replace(plain, q_BHTK=wide, k_BGSK=wide), wide),
        ]
        left = [
            (replace(plain, prefix=5), v),
            (replace(plain, q_BHTK=q[:, :, 1:]), v),
            (replace(plain, q_BHTK=q.double(), k_BGSK=v.double()), v.double()),
            (plain, torch.empty(2, 2, 20, 136)),
            (plain, v.bfloat16()),
            (replace(plain, place=Placement(bias_HS=torch.empty(4, 20))), v),
            (replace(plain, place=Placement(is_chunk=True)), v),
        ]
        assert [walks(*case) for case in taken] == [True] * len(taken)
        assert [walks(*case) for case in left] == [False] * len(left)
        # Heads that are too wide for the walk give their sums by blocks.
        assert [gives_sums(*case) for case in left] == [case[1].shape[-1] == 136 for case in left]
        with read_weights(partial(KeySummer, first_BT=None)):
            assert walks(plain, v), "as in the context around it"
        with read_weights(KeySummer, by_walk=False):
            assert not walks(plain, v)
    with reading(by_walk=None):
        assert not walks(plain, v)
    assert not walks(plain, v)


@pytest.mark.parametrize("kind", ["plain", "a sink, first tokens of documents"])
def test_it_moves_little_more_than_queries_keys_values_and_outputs(kind):
    """As 134M has them at T 1024."""
    sizes = []

    def note(function, args, found):
        sizes.extend(x.numel() for x in tree_leaves((args, found)) if isinstance(x, torch.Tensor))

    with reading(by_walk=True):
        q, k, v = (torch.empty(16, 1024, 12, 64).transpose(1, 2) for _ in range(3))
        first = None if kind == "plain" else torch.zeros(16, 1024, dtype=torch.long)
        extra = [] if kind == "plain" else [ExtraKey(torch.empty(16, 12, 1024, 1))]
        with Operators(note), Traffic() as traffic, read_weights(partial(KeySummer, first_BT=first)):
            weighted = FusedSoftmax(Scores(q, k, 0.125, Placement()), v, extra, needs_weights=True)
            sums = weighted.reader.sums()
    assert sums.importance_2BHT.shape == (2, 16, 12, 1024)
    assert (sums.on_first_2BHT is None) == (kind == "plain")
    # Four tensors in the first walk, two in the second one; the output is scaled, and first keys gathered.
    assert traffic.bytes.total() / q.nbytes < (6.6 if kind == "plain" else 17)
    assert max(sizes) == q.numel()


def test_a_machine_that_runs_no_kernel_says_so_in_one_line(monkeypatch, tmp_path, tiny):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why = r"^snapshot.attention_weights is walk, whose kernels do not run here \(the device is cpu\): give blocks$"
    model = model_of()
    for take in (measure, partial(birth_reference, batch_size=2)):
        with pytest.raises(UsageError, match=why):
            take(model, PROBE, attention_weights="walk")
    with pytest.raises(UsageError, match=why):
        pretrain(tiny({"snapshot.attention_weights": "walk"}), RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert SnapshotConfig().attention_weights == "blocks"
