"""Weights read as they are computed, against the same attention left alone and against the matrix in float64."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import attention_arms
import pytest
import torch
from oracles import Seen

from birthmark.models.attention import normalisers
from birthmark.models.attention import weight_reader as reading
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.normalisers import FusedSoftmax
from birthmark.models.attention.positions import Placement
from birthmark.models.attention.scores import ExtraKey, Scores
from birthmark.models.attention.weight_reader import read_weights
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig

B, H, T, D = 3, 4, 70, 24


@dataclass
class Keep:
    """A reader that puts the blocks together again, and counts how often it saw each weight."""

    shape_BHT: tuple[int, int, int]
    rows_sum_to_one: bool
    causal: bool
    starts: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.weights = torch.zeros(*self.shape_BHT, self.shape_BHT[-1], dtype=torch.float64)
        self.seen = torch.zeros(self.shape_BHT, dtype=torch.long)

    def read_scores(self, part, scores_BHRS):
        pass

    def read(self, part, start, weights_BHRS):
        _, _, n_rows, n_keys = weights_BHRS.shape
        self.starts.append(start)
        self.weights[part][:, :, start : start + n_rows, :n_keys] = weights_BHRS
        self.seen[part][:, :, start : start + n_rows] += 1
        weights_BHRS.fill_(torch.nan)  # readers may write


ARMS = {
    "window": AttentionConfig(window=9),
    "prefix": AttentionConfig(prefix=40),
    "window, prefix, exact": AttentionConfig("calibrated", normaliser="softmax_off_by_one", window=5, prefix=35),
    "sink, key and value bias": AttentionConfig(normaliser="softmax_sink", kv_bias="key_value"),
    "relu, normalised, prefix": AttentionConfig(normaliser="relu", normalise_rows=True, prefix=40),
} | {name: attention_arms.ARMS[name] for name in ("plain", "headnorm", attention_arms.EXACT, "off by one", "sigmoid")}


def attention(kind):
    module = Attention(ModelConfig(d_model=D, n_heads=H, n_kv_heads=2, max_seq_len=T, attention=kind), block=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / D**0.25)
    return module.double()


def place(positions):
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)
    bias = torch.randn(H, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"none": Placement(), "slopes": Placement(slopes_H=slopes), "bias": Placement(bias_HS=bias)}[positions]


def passed(module, where, make=None):
    """Output and what an observer is shown, with readers that ``make`` makes."""
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad(), read_weights(make) if make else nullcontext():
        return module(x, where, seen := Seen()), seen.attended[1]


@pytest.mark.parametrize("cached", [1, 64 * T * 2, 1 << 18])
@pytest.mark.parametrize("positions", ["none", "slopes", "bias"])
@pytest.mark.parametrize("name", ARMS)
def test_what_is_read_are_the_weights_that_make_the_output(name, positions, cached, monkeypatch):
    if positions == "slopes" and ARMS[name].prefix is not None:
        positions = "bias"
    monkeypatch.setattr(reading, "_CACHED", cached)
    monkeypatch.setattr(normalisers, "_QUERY_BLOCK", 33)
    module, where = attention(ARMS[name]), place(positions)
    expected_out, expected = passed(module, where)
    out, found = passed(module, where, Keep)
    reader = found.weights.reader
    assert (reader.seen == 1).all()
    assert max(reader.starts) >= 64, "more than one block"
    rows = torch.zeros_like(reader.weights)
    for start, stop in ((0, 30), (30, 31), (31, T)):
        block = expected.weights.rows(start, stop)
        rows[:, :, start:stop, : block.shape[-1]] = block
    torch.testing.assert_close(reader.weights, rows, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(out, expected_out, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found.o_BHTK, expected.o_BHTK, atol=1e-10, rtol=1e-10)
    # What is read later is the same.
    torch.testing.assert_close(found.weights.rows(3, 20), expected.weights.rows(3, 20), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found.weights.sum_squares(), rows.square().sum(-1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.weights.row_sum(), expected.weights.row_sum(), atol=1e-10, rtol=1e-10)
    assert reader.causal == (ARMS[name].prefix is None)
    if reader.rows_sum_to_one:
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length", [1, 31, 33, 600])
def test_softmax_of_lower_precision_is_near_the_matrix_in_float64(length, dtype, tolerance):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 16, generator=generator).to(dtype) for _ in range(3))
    sink = torch.randn(2, 3, length, generator=generator)
    scores = (q.double() @ k.double().mT * 0.3).masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
    for extra, total in (([], None), ([ExtraKey(sink[..., None])], sink.double().exp())):
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (0 if total is None else total[..., None]))
        with torch.no_grad(), read_weights(Keep):
            weighted = FusedSoftmax(Scores(q, k, 0.3, Placement()), v, extra, needs_weights=True, needs_squares=True)
        assert weighted.o_BHTK.dtype == dtype
        torch.testing.assert_close(weighted.o_BHTK.double(), weights @ v.double(), atol=tolerance, rtol=tolerance)
        # Weights are float32 whatever the values are.
        torch.testing.assert_close(weighted.reader.weights, weights, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(weighted.sum_squares().double(), weights.square().sum(-1), atol=1e-6, rtol=1e-5)


def test_scores_of_any_size_make_weights():
    """Their exponentials alone would overflow, or be all 0."""
    q = torch.full((1, 1, 40, 4), 30.0)
    k = torch.cat([q[:, :, :20], -q[:, :, 20:]], dim=2)
    with torch.no_grad(), read_weights(Keep):
        weighted = FusedSoftmax(Scores(q, k, 1.0, Placement()), q, [], needs_weights=True)
    torch.testing.assert_close(weighted.reader.weights.sum(-1), torch.ones(1, 1, 40, dtype=torch.float64))
    torch.testing.assert_close(weighted.reader.weights[0, 0, 39, :20], torch.full((20,), 1 / 20, dtype=torch.float64))


def test_nothing_is_read_with_gradients_without_an_observer_or_outside():
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=9, max_seq_len=8)
    model, tokens, made = born(config, 0), torch.zeros(1, 5, dtype=torch.long), []

    def make(*args):
        made.append(Keep(*args))
        return made[-1]

    watch = Seen()
    with read_weights(make):
        model(tokens, observer=watch).sum().backward()
        with torch.no_grad():
            model(tokens)
    with torch.no_grad():
        model(tokens, observer=watch)
    assert made == []
    assert watch.attended[1].weights.reader is None
    with torch.no_grad(), read_weights(make):
        model(tokens, observer=watch)
    assert made == [watch.attended[1].weights.reader]
    with pytest.raises(KeyError), read_weights(make):
        raise KeyError
    with torch.no_grad():
        model(tokens, observer=watch)
    assert len(made) == 1


def test_autocast_around_it_changes_nothing():
    def weights():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(B, H, T, 8, generator=generator) for _ in range(3))
        with torch.no_grad(), read_weights(Keep):
            return FusedSoftmax(Scores(q, k, 0.5, Placement()), v, [], needs_weights=True)

    plain = weights()
    with torch.autocast("cpu", torch.bfloat16):
        cast = weights()
    assert torch.equal(plain.reader.weights, cast.reader.weights)
    assert torch.equal(plain.o_BHTK, cast.o_BHTK)


@pytest.mark.parametrize("shape", [(16, 12, 1024), (3, 12, 4096), (5, 32, 4096), (2, 64, 16384), (7, 2, 64), (1, 1, 1)])
def test_blocks_of_a_gpu_are_large_bounded_and_hold_every_head_once(shape):
    n_rows, parts = reading._blocks(torch.empty(*shape, 8, device="meta"))
    seen = torch.zeros(shape[:2], dtype=torch.int64)
    for part in parts:
        seen[part] += 1
        assert seen[part].numel() * n_rows * shape[2] <= 1 << 26
    assert (seen == 1).all()
    assert n_rows <= shape[2]
    # A batch of the usual length is read in one part, by four blocks of queries.
    assert shape != (16, 12, 1024) or (len(parts), n_rows) == (1, 256)
