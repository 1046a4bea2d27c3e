"""Documents of one sequence against each document alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from birthmark.models.attention import document_mask as module
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.attention.correlation import EstimatedCorrelation, _moments_of_documents
from birthmark.models.attention.document_mask import Documents
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig, nested
from birthmark.models.exchange.exported.config_fields import config_of_fields
from birthmark.models.linear_cross_entropy import IGNORED

ROOT = Path(__file__).parents[3]
CONFIG = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=61, max_seq_len=48)
#: Two sequences; the second ends in padding.
LENGTHS = [[1, 20, 3, 24], [2, 17, 9, 11]]


#: Documents are set below, and a prefix excludes them.
APART = ("model.attention.documents", "model.attention.prefix")


def arms():
    """Every arm of every study that says something of attention or positions."""
    found = {}
    for file in sorted((ROOT / "configs" / "studies").glob("*.yaml")):
        for name, fields in (yaml.safe_load(file.read_text()).get("arms") or {}).items():
            ours = {k: v for k, v in fields.items() if k.startswith(("model.attention.", "model.positions"))}
            if all(k.startswith("model.") for k in fields) and fields.keys().isdisjoint(APART):
                found[f"{file.stem} {name}"] = ours
    assert len(found) > 30
    return found


ARMS = arms()


def config_of(fields, base=CONFIG):
    fields = nested({k.removeprefix("model."): v for k, v in fields.items()} | {"attention.documents": True})
    attention = config_of_fields(AttentionConfig, fields.pop("attention"))
    if attention.latent.is_on or attention.normaliser == "differential":  # they share no keys among heads
        fields["n_kv_heads"] = None
    return replace(base, attention=attention, **fields)


def numbers():
    rows = [[i for i, n in enumerate(lengths) for _ in range(n)] for lengths in LENGTHS]
    return torch.tensor([row + [-1] * (48 - len(row)) for row in rows])


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 61, (2, 48), generator=torch.Generator().manual_seed(3))


def places():
    """(sequence, positions) of each document."""
    for b, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        yield from ((b, slice(end - n, end)) for n, end in zip(lengths, ends, strict=True))


def alone(model, tokens):
    """(sequence, positions, what comes of the document there)."""
    for b, here in places():
        yield b, here, model(tokens[b : b + 1, here])[0]


@pytest.mark.parametrize("unknown", [False, True], ids=["grouped", "explicit"])
@pytest.mark.parametrize("name", ARMS)
def test_a_document_is_what_it_is_alone(name, unknown, tokens, monkeypatch):
    monkeypatch.setattr(Documents, "known", property(lambda self: not unknown))
    model = born(config_of(ARMS[name]), 0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gates, sinks and biases that start at 0 do something
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        packed = model(tokens, documents_BT=numbers())
        whole = model(tokens)
        for b, here, logits in alone(model, tokens):
            torch.testing.assert_close(packed[b, here], logits, atol=1e-5, rtol=1e-5)
    assert (packed[0, 24:] - whole[0, 24:]).abs().max() > 1e-3
    assert packed.isfinite().all()


@pytest.mark.parametrize("name", ["plain", "exact_amplify", "softmax_sink", "window_16", "positions_alibi"])
def test_gradients_are_those_of_the_documents_alone(name, tokens):
    config = config_of(ARMS[f"sinks {name}"])
    targets = tokens.roll(-1, 1).masked_fill(numbers() < 0, IGNORED)
    packed, apart = born(config, 0), born(config, 0)
    packed(tokens, targets_BS=targets, documents_BT=numbers()).objective.backward()
    loss = partial(torch.nn.functional.cross_entropy, reduction="sum")
    total = sum(loss(logits, targets[b, here]) for b, here, logits in alone(apart, tokens))
    (total / (targets != IGNORED).sum()).backward()
    for (parameter_name, a), b in zip(packed.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4, msg=parameter_name)


def test_one_document_a_sequence_is_no_mask_at_all(tokens):
    model = born(config_of({}), 0).eval()
    torch.testing.assert_close(model(tokens, documents_BT=torch.zeros(2, 48).long()), model(tokens))


def test_bf16_runs_in_groups_too(tokens):
    model = born(config_of({}), 0).eval()
    with torch.no_grad():
        exact = model(tokens, documents_BT=numbers())
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(tokens, documents_BT=numbers())
    assert (rough.float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_compiled_pass_does_not_ask_for_lengths(tokens):
    """Traced without values: what torch.compile and a plan of memory need."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = born(config_of({"model.attention.aggregation": "calibrated"}), 0).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = model(torch.zeros(2, 48).long(), documents_BT=torch.zeros(2, 48).long())
    assert fake.shape == (2, 48, 61)


def test_every_position_is_in_one_group():
    documents = Documents.of(numbers())
    assert documents.position_BT[0].tolist() == [p for n in LENGTHS[0] for p in range(n)]
    groups, order = documents._grouped
    assert sorted(order.tolist()) == list(range(96))
    assert sum(len(group.real_R) for group in groups) == 96
    for group in groups:
        n, longest = group.token_NL.shape
        assert len(group.real_R) > n * longest / 2 or longest <= module._SHORTEST


def test_moments_of_documents_are_those_of_pairs_within_them():
    v = torch.randn(2, 3, 48, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.7
    real = [v[b, :, here] for b, here in places()]
    mean, square, of_mean, length = _moments_of_documents(v, Documents.of(numbers()))
    tokens = torch.cat(real, dim=1)
    torch.testing.assert_close(mean, tokens.mean(1))
    torch.testing.assert_close(square, tokens.square().sum(-1).mean(1))
    pairs = [(x[:, i] * x[:, j]).sum(-1) for x in real for i in range(x.shape[1]) for j in range(x.shape[1]) if i != j]
    n = [x.shape[1] for x in real]
    assert length == pytest.approx(sum(k * k for k in n) / sum(n))
    product = (of_mean * length - square) / (length - 1)
    torch.testing.assert_close(product, torch.stack(pairs).mean(0))

    # Of whole sequences they are what they are without documents.
    base = replace(CONFIG, n_heads=3, n_kv_heads=3, d_model=15, positions="none")
    config = config_of({"model.attention.aggregation": "calibrated"}, base)
    with_them, without = EstimatedCorrelation(config).double(), EstimatedCorrelation(config).double()
    with_them.update(v, Documents.of(torch.zeros(2, 48).long()))
    without.update(v)
    for a, b in zip(with_them.buffers(), without.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_that_does_not_keep_documents_apart_is_shown_none(tokens):
    with pytest.raises(ValueError, match=r"for a model with attention\.documents"):
        born(CONFIG, 0)(tokens, documents_BT=numbers())
