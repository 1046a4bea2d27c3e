"""One pass of each model and every pair of them, against the formulas on whole tensors."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.hf import HFModel
from birthmark.measure.loss_by_position import loss_by_position
from birthmark.measure.model_pairs import compare_readings, losses_on_line
from birthmark.measure.model_reading import read_model
from birthmark.measure.quantised.cost import quantisation_costs
from birthmark.metrics import two_models as of_metrics
from birthmark.metrics.two_models import token_kl
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

N, T, V = 10, 8, 61
CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=V, max_seq_len=12, logit_softcap=4.0)
OTHER = dataclasses.replace(CONFIG, d_model=24, n_layers=1, tie_embeddings=True, logit_softcap=None)


@pytest.fixture(scope="module")
def tokens():
    return random_probe(V, N, T, probe_seed=0)


@pytest.fixture(scope="module")
def models(their_model):
    """Two births, one of another width, depth and head, and one of transformers."""
    return [born(CONFIG, 0).eval(), born(OTHER, 1).eval(), HFModel(their_model("llama"))]


def readings(models, tokens, folder, **sizes):
    found = []
    for i, model in enumerate(models):
        (folder / str(i)).mkdir(parents=True)
        found.append(read_model(f"model {i}", model, tokens, folder / str(i), **sizes))
    return found


@pytest.fixture(scope="module")
def compared(models, tokens, tmp_path_factory):
    found = readings(models, tokens, tmp_path_factory.mktemp("read"), batch_size=4, minibatch=5)
    return compare_readings(found, tokens, is_text=True)


@torch.no_grad()
def seen(model, tokens):
    """Logits of all positions, and states of the last one by layer, all at once."""
    read, states = torch.from_numpy(tokens), {}

    def keep(site, layer, h_BTD):
        if site != "attention":
            states[layer] = h_BTD[:, -1].double()

    nothing = lambda *arguments: None  # noqa: E731
    model(read, observer=SimpleNamespace(residual=keep, attention=nothing, neurons=nothing))
    return model(read).double(), states


def test_kl_and_loss_are_those_of_whole_tensors(models, compared, tokens):
    logits = [seen(model, tokens)[0] for model in models]
    kl_NTAA = token_kl([one.flatten(0, 1) for one in logits]).view(N, T, 3, 3).numpy()
    np.testing.assert_allclose(compared.kl_AAT, np.moveaxis(kl_NTAA.mean(0), 0, -1), atol=1e-6)
    of_sequences = kl_NTAA.mean(1)
    np.testing.assert_allclose(compared.kl_se_AA, of_sequences.std(0, ddof=1) / N**0.5, atol=1e-6)
    np.testing.assert_allclose(compared.mean_kl(), of_sequences.mean(0), atol=1e-6)
    assert compared.mean_kl()[0, 1] > 0.01
    assert compared.mean_kl()[0, 1] != pytest.approx(compared.mean_kl()[1, 0], rel=1e-3)
    for model, logits_NTV in enumerate(logits):
        targets = torch.from_numpy(tokens)[:, 1:]
        loss_NT = F.cross_entropy(logits_NTV[:, :-1].transpose(1, 2), targets, reduction="none")
        np.testing.assert_allclose(compared.loss_AT[model], loss_NT.mean(0), atol=1e-6)


def test_cka_is_that_of_the_layers_own_states(models, compared, tokens):
    states = [seen(model, tokens)[1] for model in models]
    assert {pair: found.shape for pair, found in compared.cka_by_layer.items()} == {
        (0, 0): (3, 3), (0, 1): (3, 2), (0, 2): (3, 3), (1, 1): (2, 2), (1, 2): (2, 3), (2, 2): (3, 3),
    }  # fmt: skip

    def vectors(a, layer):
        return [of_metrics.gram_vector(part)[None].numpy() for part in states[a][layer].split(5)]

    def hsic(*places):
        return of_metrics.hsic(*(vectors(*place) for place in places)).item()

    for (a, b), found in compared.cka_by_layer.items():
        for i, j in np.ndindex(found.shape):
            own = (hsic((a, i), (a, i)) * hsic((b, j), (b, j))) ** 0.5
            assert found[i, j] == pytest.approx(hsic((a, i), (b, j)) / own, abs=1e-6)
    assert compared.last_cka().diagonal() == pytest.approx(1, abs=1e-6)


def test_how_the_pass_is_split_changes_nothing(models, compared, tokens, tmp_path):
    found = readings(models, tokens, tmp_path, batch_size=10, minibatch=5)
    again = compare_readings(found, tokens, is_text=False)
    assert again.loss_AT is None
    np.testing.assert_allclose(again.kl_AAT, compared.kl_AAT, atol=1e-6)
    np.testing.assert_allclose(again.last_cka(), compared.last_cka(), atol=1e-5)


def test_a_model_is_left_as_it_was_and_one_that_is_broken_is_named(tokens, tmp_path):
    model = born(CONFIG, 0)
    readings([model], tokens, tmp_path / "whole", batch_size=4, minibatch=5)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        model.head.weight[3, 0] = torch.nan
    with pytest.raises(RunError, match="model 0: the model gives NaN or inf"):
        readings([model], tokens, tmp_path / "broken", batch_size=4, minibatch=5)


def test_logits_that_are_no_map_of_the_states_are_refused(their_model, tokens, tmp_path):
    model = HFModel(their_model("llama"))
    model.model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(UsageError, match="no linear map"):
        readings([model], tokens, tmp_path, batch_size=4, minibatch=5)


def test_losses_on_the_line_are_those_of_the_models_there(models, tokens):
    a, b = models[0], born(CONFIG, 7).eval()
    before = {name: tensor.clone() for name, tensor in a.state_dict().items()}
    found = losses_on_line(a, b, [0, 0.25, 1], tokens, batch_size=4)
    middle = born(CONFIG, 0).eval()
    middle.load_state_dict({name: 0.75 * x + 0.25 * b.state_dict()[name] for name, x in before.items()})
    read = torch.from_numpy(tokens)
    for model, loss in zip((a, middle, b), found, strict=True):
        with torch.no_grad():
            expected = F.cross_entropy(model(read[:, :-1]).flatten(0, 1).double(), read[:, 1:].flatten())
        assert loss == pytest.approx(float(expected), abs=1e-6)
    assert all(torch.equal(tensor, a.state_dict()[name]) for name, tensor in before.items())


def test_there_is_no_line_between_models_of_two_configs(models, tokens, their_model):
    with pytest.raises(UsageError, match=r"no straight line between them: .* is "):
        losses_on_line(models[0], models[1], [0, 1], tokens, batch_size=4)
    loud = born(dataclasses.replace(CONFIG, logit_softcap=9.0), 0)
    with pytest.raises(UsageError, match="their configs differ in logit_softcap"):
        losses_on_line(models[0], loud, [0, 1], tokens, batch_size=4)
    theirs = [HFModel(their_model("llama", hidden_act=name)) for name in ("silu", "relu")]
    with pytest.raises(UsageError, match="their configs differ in hidden_act"):
        losses_on_line(*theirs, [0, 1], tokens, batch_size=4)


def all_losses(model, tokens, folder, documents=None):
    """The mean loss of a model on text, by everything that says it."""
    (folder / "0").mkdir()
    reading = read_model("m", model, tokens, folder / "0", documents_NT=documents, batch_size=4, minibatch=5)
    (cost,) = quantisation_costs(model, [], tokens, tokens, documents_NT=documents, batch_size=4)
    return {
        "compare": compare_readings([reading], tokens, is_text=True).mean_loss()[0],
        "line": losses_on_line(model, model, [0], tokens, documents_NT=documents, batch_size=4)[0],
        "quantise": cost.loss,
    }


def test_a_prefix_that_sees_itself_is_in_no_loss(tokens, tmp_path, enliven):
    """Of a prefix of 5 positions the last one alone predicts what it has not seen."""
    model = enliven(born(dataclasses.replace(CONFIG, attention=AttentionConfig(prefix=5)), 0)).double().eval()
    with torch.no_grad():
        log_p = model(torch.from_numpy(tokens)).log_softmax(-1).numpy()
    losses = [-log_p[n, t, tokens[n, t + 1]] for n in range(N) for t in range(4, T - 1)]
    found = all_losses(model, tokens, tmp_path)
    found["length"] = np.nanmean(loss_by_position(model, tokens, None))
    assert found == pytest.approx(dict.fromkeys(found, np.mean(losses)), rel=1e-5)
    for read in (lambda: quantisation_costs(model, [], tokens[:, :5], tokens),
                 lambda: losses_on_line(model, model, [0], tokens[:, :5], batch_size=4),
                 lambda: loss_by_position(model, tokens[:, :5], None)):  # fmt: skip
        with pytest.raises(UsageError, match=r"sequences of 5 tokens: .* give a seq_len of 6 or more"):
            read()


def test_documents_are_read_apart_as_each_by_itself(tokens, tmp_path, enliven):
    model = enliven(born(dataclasses.replace(CONFIG, attention=AttentionConfig(documents=True)), 0)).double().eval()
    starts = [0, 3, 5, T]
    documents = np.broadcast_to(np.repeat([0, 1, 2], np.diff(starts)), (N, T))
    read = torch.from_numpy(tokens)
    with torch.no_grad():
        alone = [model(read[:, a:b]) for a, b in pairwise(starts)]
        whole = model(read)
    both = (torch.cat(alone, 1), whole)
    by_itself, together = (F.cross_entropy(x[:, :-1].mT, read[:, 1:]).item() for x in both)
    assert abs(by_itself - together) > 1e-3
    found = all_losses(model, tokens, tmp_path, documents)
    assert found == pytest.approx(dict.fromkeys(found, by_itself), rel=1e-5)
