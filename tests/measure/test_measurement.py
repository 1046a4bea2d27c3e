"""The one pass against the same quantities computed the slow way, from tensors kept whole."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from birthmark.data.probes import random_probe
from birthmark.errors import RunError
from birthmark.measure.measurement import BirthReference, birth_reference, measure
from birthmark.measure.observed import AttentionView
from birthmark.measure.passes import MetricObserver, sequences_of_pass
from birthmark.metrics.sinks import KeySummer, key_sums
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.experts.config import ExpertsConfig

CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=32, max_seq_len=12)
PROBE = random_probe(32, 9, 12, 0)


class Keep:
    """An observer that keeps everything."""

    def __init__(self):
        self.hidden, self.weights, self.heads, self.queries, self.units = {}, {}, {}, {}, {}

    def residual(self, site, layer, h):
        self.hidden[site, layer] = h.double()

    def attention(self, layer, attended):
        q, k = attended.q_BHTK.double(), attended.k_BHTK.double()
        scores = q @ k.mT * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        self.weights[layer] = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        self.heads[layer] = attended.o_BHTK.double(), attended.out_BHTK.double()
        self.queries[layer] = q, k

    def neurons(self, layer, a):
        self.units[layer] = a.double()


def trained(config=CONFIG):
    """A model that is no longer newborn."""
    model = born(config, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def cosines(vectors):
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    return unit @ unit.T


def off_diagonal_mean(matrix):
    n = len(matrix)
    return ((matrix.sum() - matrix.diagonal().sum()) / (n * (n - 1))).item()


@pytest.fixture(scope="module")
def slow():
    """Every quantity of the snapshot, from whole tensors in float64."""
    keep, newborn = Keep(), Keep()
    with torch.no_grad():
        logits = trained()(torch.from_numpy(PROBE), observer=keep)[:, -1].double()
        logits_at_birth = born(CONFIG, 0)(torch.from_numpy(PROBE), observer=newborn)[:, -1].double()
    found = {"p": logits.softmax(-1).mean(0).numpy(), "birth_p": logits_at_birth.softmax(-1).mean(0).numpy()}
    sites = [("embedding", 0), ("mlp", 1), ("mlp", 2)]
    last = [keep.hidden[site][:, -1] for site in sites]
    seed = [newborn.hidden[site][:, -1].mean(0) for site in sites]
    seed = [s / s.norm() for s in seed]
    found["alignment"] = [torch.stack([h @ s / h.norm() for h in hs]).mean() for hs, s in zip(last, seed, strict=True)]
    found["drift"] = [hs.mean(0) @ s / hs.mean(0).norm() for hs, s in zip(last, seed, strict=True)]
    energies = [((hs @ s).square().mean(), hs.square().sum(-1).mean()) for hs, s in zip(last, seed, strict=True)]
    found["energy_share"] = [along / total for along, total in energies]
    for name, places in (("mlp", sites), ("attention", [("attention", 1), ("attention", 2)])):
        found[f"inter_{name}"] = [off_diagonal_mean(cosines(keep.hidden[p][:, -1])) for p in places]
        found[f"intra_{name}"] = [
            np.mean([off_diagonal_mean(cosines(sequence)) for sequence in keep.hidden[p]]) for p in places
        ]
    weights = torch.stack([keep.weights[1], keep.weights[2]])
    found["sink_mass"] = weights[..., 1:, 0].mean((1, 3))
    importance = torch.stack([weights[..., j:, j].mean(-1) for j in range(12)], dim=-1)
    found["importance"] = importance.mean(1)
    found["sink_rate"] = 100 * (importance[..., 0] > 0.2).double().mean(1)
    for i, suffix in enumerate(("", "_out")):
        variance = torch.stack([keep.heads[layer][i].var(0).mean(-1) for layer in (1, 2)])
        found[f"positional_variance{suffix}"] = variance
        found[f"variance_discrepancy{suffix}"] = variance.mean(1)[:, 0] / variance.mean(1)[:, 6:].mean(-1)
    found["n_eff"] = (1 / weights.square().sum(-1)).mean(1)
    grid = torch.arange(1, 10) / 10
    above = 100 * (importance.double() > grid.double()[:, None, None, None, None]).double()
    found["sink_rate_grid"], found["sink_rate_by_key"] = above[..., 0].mean(2), above.mean((1, 2, 3))

    sizes = [keep.hidden[site].abs() for site in sites]
    found["dominance"] = torch.stack([(h.amax(-1) / h.mean(-1)).mean(0) for h in sizes])
    found["massive_value"] = torch.stack([h.amax(0).flatten().sort(descending=True)[0][:10] for h in sizes])
    values = torch.stack([torch.linalg.svdvals(keep.hidden[site].flatten(0, 1)) for site in sites])
    found["singular_values"] = values / (9 * 12) ** 0.5
    found["effective_rank"] = torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1).exp()

    units = torch.stack([keep.units[1], keep.units[2]]).abs()
    found["activation_first"], found["activation_others"] = units[:, :, 0].mean(1), units[:, :, 1:].mean((1, 2))
    lock = []
    for layer in (1, 2):
        q, k = keep.queries[layer]
        u = torch.linalg.svd(q.transpose(0, 1).flatten(1, 2))[2][:, 0]
        u = u * (u * q.mean((0, 2))).sum(-1, keepdim=True).sign()
        cosine = (k[:, :, 0] * u).sum(-1) / k[:, :, 0].norm(dim=-1)
        positive = (q[:, :, 1:] @ k[:, :, 0, :, None] > 0).double().mean((0, 2, 3))
        lock.append((cosine.square().mean(0).sqrt(), cosine.mean(0), positive))
    for name, by_layer in zip(("qk_cosine", "qk_cosine_signed", "qk_positive"), zip(*lock, strict=True), strict=True):
        found[name] = torch.stack(by_layer)
    return found


@pytest.mark.parametrize("batch_size", [1, 4, 9, 64])
def test_every_quantity_equals_the_slow_way_however_the_probe_is_split(slow, batch_size):
    birth = birth_reference(born(CONFIG, 0), PROBE, batch_size)
    found = measure(trained(), PROBE, birth, [], batch_size=batch_size, sink_epsilon=0.2)
    np.testing.assert_allclose(found.arrays["mean_prob"], slow["p"], rtol=1e-5)
    np.testing.assert_allclose(birth.mean_prob, slow["birth_p"], rtol=1e-5)
    for name in ("alignment", "drift", "energy_share", "inter_mlp", "intra_mlp", "inter_attention", "intra_attention"):
        np.testing.assert_allclose(found.arrays[name], np.array(slow[name]), atol=1e-6, err_msg=name)
    for name in ("sink_mass", "importance", "sink_rate"):
        np.testing.assert_allclose(found.arrays[name], slow[name].numpy(), atol=1e-6, err_msg=name)
    for name in ("positional_variance", "variance_discrepancy"):
        for suffix in ("", "_out"):
            np.testing.assert_allclose(found.arrays[name + suffix], slow[name + suffix].numpy(), rtol=1e-4)
    for name in ("n_eff", "sink_rate_grid", "sink_rate_by_key", "dominance", "massive_value", "singular_values"):
        np.testing.assert_allclose(found.arrays[name], slow[name].numpy(), rtol=1e-4, err_msg=name)
    for name in ("effective_rank", "activation_first", "activation_others"):
        np.testing.assert_allclose(found.arrays[name], slow[name].numpy(), rtol=1e-4, err_msg=name)
    for name in ("qk_cosine", "qk_cosine_signed", "qk_positive"):
        np.testing.assert_allclose(found.arrays[name], slow[name].numpy(), atol=1e-4, err_msg=name)
    p, q = slow["p"], slow["birth_p"]
    strongest = slow["dominance"][:, 0].argmax()
    expected = {
        "dominance_first": slow["dominance"][strongest, 0],
        "dominance_median": np.median(slow["dominance"][strongest]),
        "massive_max": slow["massive_value"].max(),
        "effective_rank": slow["effective_rank"][-1],
        "n_eff": slow["n_eff"][..., -1].mean(),
        "variance_discrepancy": slow["variance_discrepancy"].mean(),
        "variance_discrepancy_out": slow["variance_discrepancy_out"].mean(),
        "qk_cosine": slow["qk_cosine"].mean(),
        "qk_positive": slow["qk_positive"].mean(),
        "alignment": slow["alignment"][-1],
        "inter": slow["inter_mlp"][-1],
        "intra": slow["intra_mlp"][-1],
        "kl_uniform": stats.entropy(p, np.full(32, 1 / 32)),
        "preference_ratio": 32 * p.max(),
        "entropy": stats.entropy(p) / np.log(32),
        "rank_persistence": stats.spearmanr(p, q).statistic,
        "kendall_tau": stats.kendalltau(p, q).statistic,
        "overlap_10": len(set(np.argsort(-p)[:10]) & set(np.argsort(-q)[:10])) / 10,
        "sink_mass": slow["sink_mass"].mean(),
        "sink_mass_max": slow["sink_mass"].max(),
        "sink_uniform": np.mean([1 / (t + 1) for t in range(1, 12)]),
        "energy_share_chance": 1 / 16,
    }
    for name, value in expected.items():
        assert found.scalars[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("prefix", [None, 3])
def test_a_first_token_that_all_sequences_share_has_no_variance(prefix):
    model, probe = trained(replace(CONFIG, attention=AttentionConfig(prefix=prefix))), PROBE.copy()
    probe[:, 0] = 3
    found = measure(model, probe, batch_size=4)
    variance = found.arrays["positional_variance"]
    assert (variance[:, :, 1:] > 0).all()
    if prefix is None:
        assert (variance[:, :, 0] == 0).all()
        assert found.scalars["variance_discrepancy"] == found.scalars["variance_discrepancy_out"] == 0
    else:
        assert (variance[:, :, 0] > 0).all()  # in a prefix the first query sees the others


def test_a_newborn_is_aligned_with_itself_and_not_with_strangers():
    birth, stranger = (birth_reference(born(CONFIG, seed), PROBE, 4) for seed in (0, 1))
    found = measure(born(CONFIG, 0), PROBE, birth, [stranger])
    assert found.scalars["drift"] == pytest.approx(1, abs=1e-9)
    assert found.scalars["rank_persistence"] == pytest.approx(1)
    assert found.arrays["alignment_stranger"].shape == (1, 3)
    swapped = measure(born(CONFIG, 0), PROBE, stranger, [])
    assert swapped.scalars["alignment"] == pytest.approx(found.arrays["alignment_stranger"][0, -1])
    assert swapped.scalars["rank_persistence"] == pytest.approx(found.arrays["rank_persistence_stranger"][0])


def test_a_measurement_leaves_no_trace():
    model = trained()
    model.train()
    model.blocks[0].eval()
    model(torch.from_numpy(PROBE)).logsumexp(-1).mean().backward()
    before = [(p.detach().clone(), p.grad.clone(), p._version) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    with torch.enable_grad():
        measure(model, PROBE, birth_reference(model, PROBE, 4), [])
        assert torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    for (value, grad, version), p in zip(before, model.parameters(), strict=True):
        assert torch.equal(value, p)
        assert torch.equal(grad, p.grad)
        assert version == p._version


def test_a_measurement_is_one_forward_pass(monkeypatch):
    model, seen = trained(), []
    birth = birth_reference(model, PROBE, 4)
    model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    measure(model, PROBE, birth, [birth], batch_size=4)
    assert seen == [4, 4, 1]


class LaunchedOperators(TorchDispatchMode):
    """Counts operators that compute something: no views (a linear map's second operator is one), no allocations."""

    FREE = ("new_empty", "empty", "empty_like", "promote_types", "detach", "alias", "_unsafe_view")

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += not function.is_view and function._schema.name.removeprefix("aten::") not in self.FREE
        return function(*args, **(kwargs or {}))


def launched(n_layers, n_batches, **attention):
    shape = {"d_model": 32, "n_heads": 2, "vocab_size": 64, "max_seq_len": 64, "norm": "rmsnorm", "mlp": "swiglu"}
    config = ModelConfig(**shape, n_layers=n_layers, positions="rope", attention=AttentionConfig(**attention))
    probe_NT = np.random.default_rng(0).integers(0, 64, (2 * n_batches, 64))
    with LaunchedOperators() as counted:
        measure(born(config, 0).eval(), probe_NT, batch_size=2)
    return counted.n


def test_a_block_of_an_observed_pass_has_few_operators():
    """On a GPU each is a launch, and small ones cost as much as large ones. What all blocks give is added up together:
    a constant.
    """
    two, three = (launched(n_layers, 2) - launched(n_layers, 1) for n_layers in (2, 3))
    assert three - two <= 143, (two, three)
    assert two + 10 * (three - two) <= 2000, (two, three)  # 12 blocks


class WaitsForTheDevice(TorchDispatchMode):
    """Notes operators whose caller waits for a GPU: those that read a number, and those whose shape depends on one."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        by_mask = name == "aten::index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or name in {f"aten::{op}" for op in ("_local_scalar_dense", "nonzero", "bincount", "masked_select")}:
            self.seen.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tied", [False, True])
def test_no_metric_waits_for_the_device_while_a_pass_runs(tied, monkeypatch):
    model = trained()
    if tied:
        model.head.weight.data.zero_()
    birth, waits = birth_reference(model, PROBE, 4), WaitsForTheDevice()
    show = MetricObserver._show

    def watched(self, place, *tensors):
        with waits:
            show(self, place, *tensors)

    monkeypatch.setattr(MetricObserver, "_show", watched)
    measure(model, PROBE, birth, [birth], batch_size=4)
    assert waits.seen == set()
    # The watch itself notices.
    with waits:
        probe_NT = torch.from_numpy(PROBE)
        _ = probe_NT[probe_NT > 3], probe_NT.sum().item()
    assert waits.seen >= {"aten::index", "aten::_local_scalar_dense"}


def test_a_gpu_gets_passes_that_keep_it_busy_and_a_cpu_small_ones():
    assert [sequences_of_pass(None, 64, 2048, on_gpu=on_gpu) for on_gpu in (False, True)] == [64, 1024]
    # 2²⁷ hidden activations in a wide model; never fewer than one sequence; and what is asked for is done.
    assert sequences_of_pass(None, 1024, 11008, on_gpu=True) == 2**27 // 11008 // 1024
    assert sequences_of_pass(None, 1 << 20, 2048, on_gpu=True) == 1
    assert sequences_of_pass(3, 64, 2048, on_gpu=True) == 3


class LendingObserver(MetricObserver):
    """Lends metrics copies of what a pass shows, and takes them back when each call ends."""

    def _show(self, place, *tensors):
        for hook in self.hooks[place]:
            lent = [self._copied(x) for x in tensors]
            hook(*lent)
            for x in lent:
                self._take_back(x)

    def _copied(self, x):
        if isinstance(x, AttentionView):
            return replace(x, **{name: getattr(x, name).clone() for name in LENT})
        return x.clone() if isinstance(x, Tensor) else x

    def _take_back(self, x):
        for taken in [getattr(x, name) for name in LENT] if isinstance(x, AttentionView) else [x]:
            if isinstance(taken, Tensor):
                taken.fill_(torch.nan if taken.is_floating_point() else -1)


LENT = ("q_BHTK", "k_BHTK", "v_BHTK", "o_BHTK", "out_BHTK")


class LendingSummer(KeySummer):
    def read_scores(self, part, scores_BHRS):
        super().read_scores(part, lent := scores_BHRS.clone())
        lent.fill_(torch.nan)

    def read(self, part, start, weights_BHRS):
        super().read(part, start, lent := weights_BHRS.clone())
        lent.fill_(torch.nan)


@pytest.mark.parametrize("seq_len", [17, 33, 64, 65, 257])
def test_no_metric_keeps_what_a_pass_lends_to_it(seq_len, monkeypatch):
    experts = ExpertsConfig(n_experts=4, top_k=2) if seq_len == 65 else ExpertsConfig()
    config = ModelConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=50, max_seq_len=seq_len, experts=experts)
    model, probe = born(config, 0), random_probe(50, 6, seq_len, 0)
    birth = birth_reference(model, probe, 4)
    expected = measure(model, probe, birth, batch_size=4)
    monkeypatch.setattr("birthmark.measure.measurement.MetricObserver", LendingObserver)
    monkeypatch.setattr("birthmark.measure.measurement.KeySummer", LendingSummer)
    found = measure(model, probe, birth, batch_size=4)
    assert found.scalars == expected.scalars
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


def test_nothing_of_the_size_of_all_attention_weights_is_allocated():
    """The largest tensor made in a pass stays far below B·H·T·T."""
    from torch.utils._python_dispatch import TorchDispatchMode

    config = ModelConfig(d_model=16, n_layers=1, n_heads=4, vocab_size=32, max_seq_len=1024)
    model, probe = born(config, 0), random_probe(32, 2, 1024, 0)
    birth = birth_reference(model, probe, 2)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    with Watch():
        measure(model, probe, birth, [], batch_size=2)
    assert 0 < largest < 2 * 4 * 1024 * 1024 * 4 / 4


def test_an_autocast_around_it_does_not_change_the_figures():
    birth = BirthReference(*vars(birth_reference(born(CONFIG, 0), PROBE, 4)).values())
    plain = measure(trained(), PROBE, birth, [])
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(trained(), PROBE, birth, []).scalars == plain.scalars


@pytest.mark.parametrize("aggregation", ["headnorm", "calibrated"])
def test_sinks_are_those_of_the_weights_whatever_follows_the_aggregation(aggregation):
    config = replace(CONFIG, attention=AttentionConfig(aggregation=aggregation))
    keep = Keep()
    model = trained(config)
    with torch.no_grad():
        model(torch.from_numpy(PROBE), observer=keep)
    found = measure(model, PROBE, birth_reference(model, PROBE, 4), [])
    expected = torch.stack([keep.weights[i][..., 1:, 0].mean((0, 2)) for i in (1, 2)])
    np.testing.assert_allclose(found.arrays["sink_mass"], expected.numpy(), atol=1e-6)
    # What enters the output projection has another variance than Σ a·v had.
    assert (found.arrays["variance_discrepancy_out"] < 0.7 * found.arrays["variance_discrepancy"]).all()


@pytest.mark.parametrize(
    ("normaliser", "weigh"),
    [
        ("sigmoid", lambda s: 1 / (1 + torch.exp(-s))),
        ("softmax_off_by_one", lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True))),
        ("identity", lambda s: torch.where(s > -torch.inf, s, 0.0)),
    ],
)
def test_sinks_of_rows_that_do_not_sum_to_one_are_given_raw_and_normalised(normaliser, weigh):
    kept = {}

    class KeepScores(Keep):
        def attention(self, layer, attended):
            q, k = attended.q_BHTK.double(), attended.k_BHTK.double()
            unseen = torch.ones(12, 12, dtype=torch.bool).triu(1)
            kept[layer] = weigh((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf))

    model = trained(replace(CONFIG, attention=AttentionConfig(normaliser=normaliser)))
    with torch.no_grad():
        model(torch.from_numpy(PROBE), observer=KeepScores())
    found = measure(model, PROBE, birth_reference(model, PROBE, 4), [], batch_size=4)
    raw = torch.stack([kept[1], kept[2]])
    shares = raw.abs() / raw.abs().sum(-1, keepdim=True)
    for weights, suffix in ((raw, ""), (shares, "_normalised")):
        mass = weights[..., 1:, 0].mean((1, 3))
        np.testing.assert_allclose(found.arrays[f"sink_mass{suffix}"], mass.numpy(), atol=1e-5)
        assert found.scalars[f"sink_mass{suffix}"] == pytest.approx(float(mass.mean()), abs=1e-5)
        importance = torch.stack([weights[..., j:, j].mean(-1) for j in range(12)], dim=-1).mean(1)
        np.testing.assert_allclose(found.arrays[f"importance{suffix}"], importance.numpy(), atol=1e-5)
    plain = measure(trained(), PROBE, birth_reference(trained(), PROBE, 4), [])
    assert not [name for name in (*plain.scalars, *plain.arrays) if "normalised" in name]


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_a_planted_super_neuron_is_found_with_what_it_reads_and_writes(mlp):
    """A unit that reads a direction that only the first position has: there is one in learned positions."""
    model = born(replace(CONFIG, mlp=mlp, d_ff=64, positions="learned", norm="none"), 0)
    mlps = [block.mlp for block in model.blocks]
    with torch.no_grad():
        model.positions.table.weight[:, 3] = 0
        model.positions.table.weight[0, 3] = 50
        for part in (mlps[0].up, mlps[0].gate):
            if part is not None:
                part.weight[:, 3] = 0
                part.weight[17] = 0
                part.weight[17, 3] = 5
        mlps[0].down.weight[:, 17] = 0
        mlps[0].down.weight[9, 17] = 2
    found = measure(model, PROBE, birth_reference(model, PROBE, 4), [], batch_size=4)
    assert found.arrays["super_neurons"][0] >= 1
    assert found.scalars["super_neurons"] == found.arrays["super_neurons"].sum()
    table = {name: found.arrays[f"neuron_{name}"][0] for name in ("index", "up_norm", "gate_norm", "is_super")}
    assert (table["index"][0], table["up_norm"][0]) == (17, 5)
    assert np.isnan(table["gate_norm"][0]) if mlp == "gelu" else table["gate_norm"][0] == 5
    assert table["is_super"][0]
    assert table["is_super"].sum() == found.arrays["super_neurons"][0] < 4
    assert found.arrays["neuron_down_dimension"][0, 0] == 9
    assert found.arrays["neuron_down_sparsity"][0, 0] == 16
    assert found.arrays["neuron_first"][0, 0] == found.arrays["activation_first"][0, 17]
    # What it writes is what stands out in the residual stream afterwards.
    assert (found.arrays["massive_position"][1, 0], found.arrays["massive_channel"][1, 0]) == (0, 9)
    assert found.arrays["dominance"][1, 0] > 2 * found.arrays["dominance"][1, 1:].max()


def test_a_newborn_has_no_super_neurons():
    for mlp in ("relu", "gelu", "swiglu"):
        model = born(replace(CONFIG, mlp=mlp, d_ff=256), 0)
        assert measure(model, PROBE, birth_reference(model, PROBE, 9), []).scalars["super_neurons"] == 0


def test_a_head_of_zeros_prefers_no_token():
    model = trained()
    with torch.no_grad():
        model.head.weight.zero_()
    found = measure(model, PROBE, birth_reference(model, PROBE, 4), [], batch_size=4)
    assert found.scalars["top1_share"] == pytest.approx(1 / 32)
    assert found.scalars["coverage_80"] == 26 / 32
    assert found.scalars["preference_ratio"] == pytest.approx(1)
    assert found.scalars["entropy_argmax"] == pytest.approx(1)


def test_an_embedding_of_zeros_has_cosine_zero_with_all_others():
    """As transformers makes a padding token of a newborn model."""
    model = born(CONFIG, 0)
    with torch.no_grad():
        model.embed.weight[PROBE[0, -1]] = 0
        model.embed.weight[PROBE[3, 2]] = 0
    birth = birth_reference(model, PROBE, 4)
    found = measure(model, PROBE, birth, [], batch_size=4)
    h = model.embed.weight.detach().double()[torch.from_numpy(PROBE)]
    unit = torch.nn.functional.normalize(h, dim=-1)
    np.testing.assert_allclose(found.arrays["inter_mlp"][0], off_diagonal_mean(unit[:, -1] @ unit[:, -1].T), atol=1e-6)
    intra = np.mean([off_diagonal_mean(sequence @ sequence.T) for sequence in unit])
    np.testing.assert_allclose(found.arrays["intra_mlp"][0], intra, atol=1e-6)
    direction = torch.nn.functional.normalize(h[:, -1].mean(0), dim=0)
    np.testing.assert_allclose(found.arrays["alignment"][0], (unit[:, -1] @ direction).mean(), atol=1e-6)
    assert all(np.isfinite(value).all() for value in (found.arrays["drift"], found.arrays["energy_share"]))


@pytest.mark.parametrize("name", ["plain", "headnorm", "calibrated", "window", "prefix", "sigmoid", "softmax_sink"])
def test_attention_that_is_read_on_the_way_is_that_of_a_pass_left_alone(name):
    """Sums over weights, what the block adds and the logits, over several blocks of queries."""
    kind = {"window": AttentionConfig(window=7), "prefix": AttentionConfig(prefix=45)}.get(name)
    if kind is None:
        kind = AttentionConfig(**{"aggregation" if name in ("plain", "headnorm", "calibrated") else "normaliser": name})
    config = ModelConfig(d_model=16, n_layers=2, n_heads=4, vocab_size=32, max_seq_len=70, attention=kind)
    model, probe = trained(config), random_probe(32, 5, 70, 0)
    found = measure(model, probe, birth_reference(model, probe, 4), [], batch_size=3)
    keep = {}

    class KeepSums(Keep):
        def attention(self, layer, attended):
            keep[layer] = key_sums(attended.weights, 70), attended.out_BHTK
            assert attended.weights.reader is None

    with torch.no_grad():
        logits = model(torch.from_numpy(probe), last_only=True, observer=KeepSums())
    np.testing.assert_allclose(found.arrays["mean_prob"], logits.double().softmax(-1).mean(0), rtol=1e-5)
    for layer, (sums, out) in keep.items():
        np.testing.assert_allclose(found.arrays["importance"][layer - 1], sums.importance_2BHT[0].mean(0), rtol=1e-4)
        np.testing.assert_allclose(found.arrays["sink_mass"][layer - 1], sums.mass_2BH[0].mean(0), rtol=1e-4)
        np.testing.assert_allclose(found.arrays["n_eff"][layer - 1], (1 / sums.squares_2BHT[0]).mean(0), rtol=1e-4)
        variance = out.double().var(0).mean(-1)
        np.testing.assert_allclose(found.arrays["positional_variance_out"][layer - 1], variance, rtol=1e-4)


def test_birth_and_measurement_of_a_newborn_are_the_same_to_the_last_bit():
    """However the probe is read: a rank is not to change where two tokens nearly tie."""
    model, probe = born(replace(CONFIG, max_seq_len=70), 0), random_probe(32, 5, 70, 0)
    birth = birth_reference(model, probe, 4)
    found = measure(model, probe, birth, [], batch_size=4)
    assert np.array_equal(found.arrays["mean_prob"], birth.mean_prob)
    assert np.array_equal(found.arrays["mean_direction"], birth.direction)


BREAKS = {
    "embed": "the embeddings",
    "blocks.0.attn.v": "the queries, keys, values or outputs of the attention of block 1",
    "blocks.1.attn.q": "the queries, keys, values or outputs of the attention of block 2",
    "blocks.1.attn.o": "the residual stream after the attention of block 2",
    "blocks.1.mlp.up": "the hidden activations of the MLP of block 2",
    "blocks.0.mlp.down": "the residual stream after the MLP of block 1",
    "head": "the logits",
}


@pytest.mark.heavy
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", BREAKS)
def test_the_first_place_that_is_not_finite_is_named(name, value):
    model = trained()
    birth = birth_reference(model, PROBE, 4)
    with torch.no_grad():
        model.get_submodule(name).weight.fill_(value)
    with pytest.raises(RunError, match=f"NaN or inf, first in {BREAKS[name]}$"):
        measure(model, PROBE, birth, [], batch_size=4)


#: How far a bf16 model's figures may be from those of the same weights in float32 (docs/measuring.md).
BF16 = {"atol": 0.02, "rtol": 0.02}


def test_a_bfloat16_model_is_measured_in_float32_and_its_error_is_that_of_its_own_rounding():
    config = ModelConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=64)
    probe = random_probe(256, 16, 64, 0)
    rounded = trained(config).bfloat16()
    exact = trained(config)
    exact.load_state_dict(rounded.state_dict())
    birth = birth_reference(exact, probe, 8)
    low, high = (measure(model, probe, birth, [], batch_size=8) for model in (rounded, exact))
    for name in SMOOTH:
        np.testing.assert_allclose(low.arrays[name], high.arrays[name], **BF16, err_msg=name)


#: Arrays that are no counts over a threshold, no places and no ranks.
SMOOTH = (
    "alignment",
    "drift",
    "energy_share",
    "inter_mlp",
    "intra_mlp",
    "inter_attention",
    "intra_attention",
    "sink_mass",
    "importance",
    "n_eff",
    "positional_variance",
    "variance_discrepancy",
    "dominance",
    "massive_value",
    "effective_rank",
    "activation_first",
    "activation_others",
    "qk_cosine",
    "qk_cosine_signed",
    "qk_positive",
)


@pytest.mark.heavy
def test_a_measurement_leaves_no_metric_behind():
    """Their states are as large as the model; Python's collector, which comes by late, is not needed to free them."""
    model = born(CONFIG, 0)

    def alive():
        return sum(isinstance(thing, Metric) for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        measure(model, PROBE, birth_reference(model, PROBE, 4), batch_size=4)
        assert alive() == before
    finally:
        gc.enable()
