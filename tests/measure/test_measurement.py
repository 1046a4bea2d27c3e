"""The one pass against the same quantities computed the slow way, from tensors kept whole."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import Operators, Seen, Traffic
from scipy import stats
from slow_snapshot import differences, slow_quantities
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.builtin_metrics import ObservedLock, ObservedStates
from birthmark.measure.measurement import BirthReference, birth_reference, evaluation_mode, measure
from birthmark.measure.observed_metrics import AttentionView, SelfObserving
from birthmark.measure.passes import FiniteWatch, MetricObserver, sequences_of_pass
from birthmark.metrics.activation_sums import ActivationSums
from birthmark.metrics.sinks import KeySummer, key_sums
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.experts.config import ExpertsConfig
from birthmark.models.observe import Attended

CONFIG = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=32, max_seq_len=12)
PROBE = random_probe(32, 9, 12, 0)


def trained(config=CONFIG):
    """A model that is no longer newborn."""
    model = born(config, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


@torch.no_grad()
def whole_pass(model, tokens):
    """Keep all that one pass shows, with the weights of a plain softmax (tests/slow_snapshot.py)."""
    seen, blocks = Seen(), model.blocks
    logits = model(tokens, observer=seen)[:, -1].double()
    attended = [*seen.attended.values()]
    q, k, v = ([getattr(a, f"{name}_BHTK").double() for a in attended] for name in "qkv")
    unseen = torch.ones(q[0].shape[2], q[0].shape[2]).triu(1) > 0
    scores = [(x @ y.mT * x.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf) for x, y in zip(q, k, strict=True)]
    outputs = [a.out_BHTK.transpose(1, 2).flatten(2) for a in attended]
    return SimpleNamespace(
        states=[h for (site, _), h in seen.residuals.items() if site != "attention"],
        after_attention=[h for (site, _), h in seen.residuals.items() if site == "attention"],
        attention=[block.attn.o(x) for block, x in zip(blocks, outputs, strict=True)],
        mlp=[block.mlp.down(a) for block, a in zip(blocks, seen.units.values(), strict=True)],
        maps=[[x and x.weight for x in (b.mlp.up, b.mlp.gate, b.mlp.down)] for b in blocks],
        units=[*seen.units.values()], outputs=outputs, q=q, k=k, v=v, weights=[x.softmax(-1) for x in scores],
        scores=[x.amax((0, 2, 3)) for x in scores], logits=logits,
    )  # fmt: skip


def against_birth(now, newborn):
    """Compare with a birth: alignment, drift and energy share of each state; scalars of rankings."""
    found = {"alignment": [], "drift": [], "energy_share": []}
    for h, born_h in zip(now.states, newborn.states, strict=True):
        h, seed = h[:, -1].double(), born_h[:, -1].double().mean(0)
        seed = seed / seed.norm()
        found["alignment"].append((h @ seed / h.norm(dim=-1)).mean())
        found["drift"].append(h.mean(0) @ seed / h.mean(0).norm())
        found["energy_share"].append((h @ seed).square().mean() / h.square().sum(-1).mean())
    p, q = (kept.logits.softmax(-1).mean(0).numpy() for kept in (now, newborn))
    scalars = {
        "rank_persistence": stats.spearmanr(p, q).statistic, "kendall_tau": stats.kendalltau(p, q).statistic,
        "overlap_10": len(set(np.argsort(-p)[:10]) & set(np.argsort(-q)[:10])) / 10,
        "energy_share_chance": 1 / now.states[0].shape[-1],
    }  # fmt: skip
    scalars |= {name: values[-1] for name, values in found.items()}
    return {name: np.array(values) for name, values in found.items()}, scalars


SLOWLY = {
    "plain": CONFIG,
    "gated MLP, norms on both sides": replace(CONFIG, mlp="swiglu", norm_placement="both"),
    "head-wise norm": replace(CONFIG, attention=AttentionConfig("headnorm")),
    "calibrated": replace(CONFIG, attention=AttentionConfig("calibrated")),
}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize(("name", "batch_size"), [*((name, 4) for name in SLOWLY), *(("plain", n) for n in (1, 9, 64))])
def test_every_quantity_equals_the_slow_way_however_the_probe_is_split(name, batch_size, dtype, bound):
    config, tokens = SLOWLY[name], torch.from_numpy(PROBE)
    model, newborn = trained(config).to(dtype), born(config, 0).to(dtype)
    birth = birth_reference(newborn, PROBE, batch_size)
    found = measure(model, PROBE, birth, [], batch_size=batch_size, sink_epsilon=0.2)
    now, newborn = whole_pass(model, tokens), whole_pass(newborn, tokens)
    np.testing.assert_allclose(birth.mean_prob, newborn.logits.softmax(-1).mean(0), rtol=bound)
    by_kind = zip(slow_quantities(now, tokens, 0.2), against_birth(now, newborn), strict=True)
    arrays, scalars = (a | b for a, b in by_kind)
    assert found.arrays.keys() - arrays.keys() == {"alignment_stranger", "rank_persistence_stranger"}
    assert found.scalars.keys() - scalars.keys() == {"rbo"}
    assert {one: value for one, value in differences(found, (arrays, scalars)).items() if not value < bound} == {}


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


def launched(n_layers, n_batches, **attention):
    shape = {"d_model": 32, "n_heads": 2, "vocab_size": 64, "max_seq_len": 64, "norm": "rmsnorm", "mlp": "swiglu"}
    config = ModelConfig(**shape, n_layers=n_layers, positions="rope", attention=AttentionConfig(**attention))
    probe_NT = np.random.default_rng(0).integers(0, 64, (2 * n_batches, 64))
    with Traffic() as traffic:
        measure(born(config, 0).eval(), probe_NT, batch_size=2)
    return traffic.operators.total()


def test_a_block_of_an_observed_pass_has_few_operators():
    """On a GPU each is a launch, and small ones cost as much as large ones. What all blocks give is added up together:
    a constant.
    """
    two, three = (launched(n_layers, 2) - launched(n_layers, 1) for n_layers in (2, 3))
    assert three - two <= 135, (two, three)
    assert two + 10 * (three - two) <= 1930, (two, three)  # 12 blocks


@pytest.mark.parametrize("tied", [False, True])
def test_no_metric_waits_for_the_device_while_a_pass_runs(tied, monkeypatch):
    model = trained()
    if tied:
        model.head.weight.data.zero_()
    birth, seen = birth_reference(model, PROBE, 4), set()
    show = MetricObserver._show

    def note(function, args, _):
        # Those that read a number, and those whose shape depends on one.
        name = function._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero", "bincount", "masked_select"):
            seen.add(name)

    waits = Operators(note)

    def watched(self, place, *tensors):
        with waits:
            show(self, place, *tensors)

    monkeypatch.setattr(MetricObserver, "_show", watched)
    measure(model, PROBE, birth, [birth], batch_size=4)
    assert seen == set()
    # The watch itself notices.
    with waits:
        probe_NT = torch.from_numpy(PROBE)
        _ = probe_NT[probe_NT > 3], probe_NT.sum().item()
    assert seen >= {"index", "_local_scalar_dense"}


def test_a_metric_whose_solvers_still_run_is_asked_last(monkeypatch):
    model, asked = trained(), []
    for own in (ObservedStates, ObservedLock, SelfObserving):
        result = own.result
        monkeypatch.setattr(own, "result", lambda self, result=result: asked.append(type(self)) or result(self))
    expected = measure(model, PROBE, batch_size=4)
    assert asked.index(ObservedStates) < asked.index(ObservedLock)
    asked.clear()
    monkeypatch.setattr(ObservedStates, "is_solving", True)
    found = measure(model, PROBE, batch_size=4)
    assert asked.index(ObservedStates) == len(asked) - 1 > 1
    # All else is as it was.
    assert [*found.scalars.items()] == [*expected.scalars.items()]
    assert [*found.arrays] == [*expected.arrays]


def test_a_gpu_gets_passes_that_keep_it_busy_and_a_cpu_small_ones():
    assert [sequences_of_pass(None, 64, 2048, on_gpu=on_gpu) for on_gpu in (False, True)] == [64, 1024]
    # 2²⁷ hidden activations in a wide model; never fewer than one sequence; and what is asked for is done.
    assert sequences_of_pass(None, 1024, 11008, on_gpu=True) == 2**27 // 11008 // 1024
    assert sequences_of_pass(None, 1 << 20, 2048, on_gpu=True) == 1
    assert sequences_of_pass(3, 64, 2048, on_gpu=True) == 3


class LendingObserver(MetricObserver):
    """Lends metrics copies of what a pass shows, and takes them back when each call ends."""

    def _show(self, place, *shown):
        for hook, takes_sums in self.hooks[place]:
            lent = [self._copied(x) for x in shown]
            hook(*(x.x_BTD if isinstance(x, ActivationSums) and not takes_sums else x for x in lent))
            for x in lent:
                self._take_back(x)

    def _copied(self, x):
        if isinstance(x, AttentionView):
            return replace(x, **{name: getattr(x, name).clone() for name in LENT})
        if isinstance(x, ActivationSums):
            return ActivationSums(x.x_BTD.clone())
        return x.clone() if isinstance(x, Tensor) else x

    def _take_back(self, x):
        if isinstance(x, ActivationSums):
            x = x.x_BTD
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
    config = ModelConfig(d_model=16, n_layers=1, n_heads=4, vocab_size=32, max_seq_len=1024)
    model, probe = born(config, 0), random_probe(32, 2, 1024, 0)
    birth = birth_reference(model, probe, 2)
    sizes = []

    def note(function, args, result):
        sizes.extend(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor))

    with Operators(note):
        measure(model, probe, birth, [], batch_size=2)
    assert 0 < max(sizes) < 2 * 4 * 1024 * 1024 * 4 / 4


def test_an_autocast_around_it_does_not_change_the_figures():
    birth = BirthReference(*vars(birth_reference(born(CONFIG, 0), PROBE, 4)).values())
    plain = measure(trained(), PROBE, birth, [])
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(trained(), PROBE, birth, []).scalars == plain.scalars


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


@pytest.mark.parametrize("name", ["plain", "headnorm", "calibrated", "window", "prefix", "sigmoid", "softmax_sink"])
def test_attention_that_is_read_on_the_way_is_that_of_a_pass_left_alone(name):
    """Sums over weights, what the block adds and the logits, over several blocks of queries."""
    kind = {"window": AttentionConfig(window=7), "prefix": AttentionConfig(prefix=45)}.get(name)
    if kind is None:
        kind = AttentionConfig(**{"aggregation" if name in ("plain", "headnorm", "calibrated") else "normaliser": name})
    config = ModelConfig(d_model=16, n_layers=2, n_heads=4, vocab_size=32, max_seq_len=70, attention=kind)
    model, probe = trained(config), random_probe(32, 5, 70, 0)
    found = measure(model, probe, birth_reference(model, probe, 4), [], batch_size=3)
    with torch.no_grad():
        logits = model(torch.from_numpy(probe), last_only=True, observer=(seen := Seen()))
    np.testing.assert_allclose(found.arrays["mean_prob"], logits.double().softmax(-1).mean(0), rtol=1e-5)
    for layer, attended in seen.attended.items():
        assert attended.weights.reader is None
        sums, out = key_sums(attended.weights, 70), attended.out_BHTK
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
    with pytest.raises(RunError, match=f"for a norm, first in {BREAKS[name]}$"):
        measure(model, PROBE, birth, [], batch_size=4)


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("place", ["q_BHTK", "k_BHTK", "out_BHTK", "neurons", "residual", "nowhere"])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(place, position):
    """Also where all that follows from it is finite, as some fused kernels have it."""
    finite = FiniteWatch(1, torch.device("cpu"))
    observer, broken = MetricObserver([], finite), torch.ones(2, 2, 4, 3)
    broken[1, 0, position, 2] = torch.inf
    heads = {name: broken if name == place else torch.ones(2, 2, 4, 3) for name in LENT}
    observer.attention(1, Attended(**heads, weights=None))
    observer.neurons(1, broken[:, 0] if place == "neurons" else torch.ones(2, 4, 3))
    observer.residual("mlp", 1, broken[:, 0] if place == "residual" else torch.ones(2, 4, 3))
    named = {"neurons": "hidden activations", "residual": "after the MLP"}.get(
        place, "queries, keys, values or outputs"
    )
    assert finite.first() is None if place == "nowhere" else named in finite.first()


#: Arrays that are no counts over a threshold, no places and no ranks.
SMOOTH = (
    "alignment", "drift", "energy_share", "inter_mlp", "intra_mlp", "inter_attention", "intra_attention", "sink_mass",
    "importance", "n_eff", "positional_variance", "variance_discrepancy", "dominance", "massive_value",
    "effective_rank", "activation_first", "activation_others", "qk_cosine", "qk_cosine_signed", "qk_positive",
)  # fmt: skip


def test_a_bfloat16_model_is_measured_in_float32_and_its_error_is_that_of_its_own_rounding():
    config = ModelConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=256, max_seq_len=64)
    probe = random_probe(256, 16, 64, 0)
    rounded, exact = trained(config).bfloat16(), trained(config)
    exact.load_state_dict(rounded.state_dict())
    birth = birth_reference(exact, probe, 8)
    low, high = (measure(model, probe, birth, [], batch_size=8) for model in (rounded, exact))
    for name in SMOOTH:
        # As docs/measuring.md states.
        np.testing.assert_allclose(low.arrays[name], high.arrays[name], atol=0.02, rtol=0.02, err_msg=name)


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


def test_a_device_without_float64_is_refused():
    with (
        pytest.raises(UsageError, match=r'mps, which has no float64 .* accelerator="cpu"'),
        evaluation_mode(SimpleNamespace(device=torch.device("mps"))),
    ):
        pytest.fail("it was evaluated")


def test_sequences_of_one_position_are_refused():
    with pytest.raises(UsageError, match="the probe has 1 positions: give at least 2"):
        measure(born(CONFIG, 0), PROBE[:, :1])
