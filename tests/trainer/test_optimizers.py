"""The table of optimizers: what each reads, steps and keeps; which parameters decay; states of earlier versions."""

import copy
import dataclasses
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import get_args

import numpy as np
import pytest
import torch
from quiet_runs import leaves
from triton_kernels import DEVICES

from birthmark import kernel_devices
from birthmark.errors import RunError, UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.init import ParameterRole, parameter_roles
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig
from birthmark.trainer.loop.steps import StepGuard, UpdateSkippedError
from birthmark.trainer.module import PretrainModule, next_token_loss
from birthmark.trainer.optimizers import classes
from birthmark.trainer.optimizers.classes import NarrowAdamW, _Noise, round_at_random
from birthmark.trainer.optimizers.parameter_groups import parameter_groups, renumber_optimizer_state
from birthmark.trainer.optimizers.schedules import fields_of
from birthmark.trainer.optimizers.table import OPTIMIZERS, OptimizerName
from birthmark.trainer.strategies.table import STRATEGIES

PLAIN = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12, bias=True, norm="layernorm")
KV_BIAS = replace(PLAIN, attention=AttentionConfig(kv_bias="key_value"))
T5 = replace(PLAIN, positions="t5")
#: Numbers that every optimizer reads; those of one alone are left at their defaults.
TRAIN = OptimConfig(lr=0.01, warmup_steps=0, schedule="constant", weight_decay=0.1)
NARROW = replace(TRAIN, state_dtype="bf16")


def trained(config, n_steps=4):
    """A model after some steps of an optimizer, the optimizer, and the gradients of each step."""
    module = PretrainModule(born(PLAIN, 0), config, TrainerConfig())
    optimizer = module.configure_optimizers()["optimizer"]
    generator, gradients = torch.Generator().manual_seed(1), []
    for _ in range(n_steps):
        optimizer.zero_grad()
        next_token_loss(module.model, torch.randint(0, 24, (3, 9), generator=generator)).objective.backward()
        gradients.append({name: p.grad.clone() for name, p in module.model.named_parameters()})
        optimizer.step()
    return module.model, optimizer, gradients


def test_every_name_of_the_config_is_in_the_table():
    assert list(OPTIMIZERS) == list(get_args(OptimizerName))
    fields = {field.name for field in dataclasses.fields(OptimConfig)}
    for kind in OPTIMIZERS.values():
        assert fields_of(kind) <= fields


def sgd(value, gradients, decay):
    """Momentum over a gradient with decay."""
    momentum = 0.0
    for g in gradients:
        momentum = 0.8 * momentum + g + decay * value
        value = value - 0.01 * momentum
    return value


def nadam(value, gradients, decay):
    """As Dozat (2016) has it: β₁ of step t is β₁ (1 − ½·0.96^(0.004 t)); decay shrinks the weight beforehand."""
    m, v, product = 0.0, 0.0, 1.0
    for t, g in enumerate(gradients, 1):
        mu, mu_next = (0.9 * (1 - 0.5 * 0.96 ** (s * 0.004)) for s in (t, t + 1))
        product *= mu
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        step = (1 - mu) / (1 - product) * g + mu_next / (1 - product * mu_next) * m
        value = value * (1 - 0.01 * decay) - 0.01 * step / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    return value


def lion(value, gradients, decay):
    """Algorithm 2 of its paper."""
    momentum = 0.0
    for g in gradients:
        value = value - 1e-3 * ((0.9 * momentum + 0.1 * g).sign() + decay * value)
        momentum = 0.98 * momentum + 0.02 * g
    return value


def adamw(value, gradients, decay):
    """Algorithm 2 of arXiv 1711.05101."""
    m, v = 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        step = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        value = value - 0.01 * (step + decay * value)
    return value


def adafactor(value, gradients, decay):
    """Algorithms 4 and 5 of arXiv 1804.04235, with β₂ = 1 − t^−0.8; the decay and the least square are torch's."""
    rms, whole = (lambda x: float(x.square().mean().sqrt())), 0.0
    for t, g in enumerate(gradients, 1):
        # Rows and columns of a running mean are the running means of rows and columns.
        size, whole = 0.01 * max(1e-3, rms(value)), (1 - t**-0.8) * whole + t**-0.8 * g**2
        square = whole if g.ndim == 1 else whole.mean(1, keepdim=True) * whole.mean(0) / whole.mean()
        update = g / square.clamp_min(2**-46).sqrt()
        value = value * (1 - 0.01 * decay) - size * update / max(1.0, rms(update))
    return value


#: By name: the formula of one parameter, the fields that it is written for, and the tolerance.
BY_HAND = {
    "adamw": (adamw, {"beta1": 0.9, "beta2": 0.99}, 1e-5),
    "nadam": (nadam, {"beta1": 0.9, "beta2": 0.99}, 1e-5),
    "sgd": (sgd, {"beta1": 0.8}, 1e-6),
    "adafactor": (adafactor, {}, 1e-5),
    "lion": (lion, {"beta1": 0.9, "beta2": 0.98, "lr": 1e-3}, 1e-6),
}
#: Those with a test of their own below, by hand too: what they do to a parameter depends on its role.
APART = {"muon", "soap"}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in APART])
def test_an_optimizer_is_its_formula_in_float64(name):
    assert name in BY_HAND, "write its formula by hand"
    by_hand, fields, tolerance = BY_HAND[name]
    model, _, gradients = trained(replace(TRAIN, name=name, **fields))
    for its, start in born(PLAIN, 0).named_parameters():
        decay = 0.1 if its.endswith("weight") else 0.0
        expected = by_hand(start.detach().double(), [g[its].double() for g in gradients], decay).float()
        found = model.get_parameter(its).detach()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.elementwise])
def test_the_table_names_the_whole_state_of_an_optimizer(name, beta1):
    config = replace(TRAIN, name=name, beta1=beta1)
    _, optimizer, _ = trained(config, 2)
    row = config.optimizer
    assert bool(optimizer.state) == bool(row.sharded_state or row.replicated_state)
    for parameter, state in optimizer.state.items():
        assert {*row.sharded_state, *row.replicated_state} == set(state)
        assert all(state[key].shape == parameter.shape for key in row.sharded_state)
        assert all(torch.equal(state[key], next(iter(optimizer.state.values()))[key]) for key in row.replicated_state)


@pytest.mark.parametrize("grad_clip", [1e-3, 2.4, 1e3])
def test_a_step_that_clips_as_it_reads_gradients_is_clipping_and_a_step(grad_clip):
    """Gradients end as clipped ones, up to the rounding of two operations; where nothing is clipped, to the bit."""
    config = replace(TRAIN, grad_clip=grad_clip, clip_in_step=True)
    module, twin = PretrainModule(born(PLAIN, 0), config, TrainerConfig()), born(PLAIN, 0)
    optimizer = module.configure_optimizers()["optimizer"]
    plain = torch.optim.AdamW(parameter_groups(twin, config.optimizer), lr=0.01, betas=(0.9, 0.95), fused=True)
    batches, norms = torch.randint(0, 24, (5, 3, 9), generator=torch.Generator().manual_seed(1)), []
    for batch in batches:
        twin.zero_grad()
        next_token_loss(twin, batch).objective.backward()
        # Two backward passes may round otherwise where their tensors lie otherwise in memory.
        for p, expected in zip(module.model.parameters(), twin.parameters(), strict=True):
            p.grad = expected.grad.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), grad_clip)))
        plain.step()
        module.loss_sum = torch.zeros(2)
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        for (name, p), expected in zip(module.model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
            torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-5, msg=name)
    assert [step.grad_norm for step in module.watch.take()] == pytest.approx(norms, rel=1e-4)
    assert sum(norm > grad_clip for norm in norms) == {1e-3: 5, 2.4: 3, 1e3: 0}[grad_clip]
    if grad_clip == 1e3:
        assert all(map(torch.equal, module.model.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    ("optim", "strategy", "expected"),
    [
        (
            {"clip_in_step": True, "name": "nadam"},
            "single",
            "clip_in_step is True, which optimizer nadam does not",
        ),
        ({"clip_in_step": True, "grad_clip": 0.0}, "single", "optim.grad_clip is 0, which clips nothing: leave one"),
        ({"clip_in_step": True}, "zero2", "optim.clip_in_step is true, but zero2 clips in an engine of its own: leave"),
        ({"state_dtype": "bf16", "name": "muon"}, "single", "state_dtype is bf16, which optimizer muon does not read"),
        ({"state_dtype": "bf16"}, "zero1", "optim.state_dtype is bf16, but zero1 keeps state in float32: give trainer"),
    ],
)
def test_what_a_step_cannot_do_is_refused(optim, strategy, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(optim=OptimConfig(**optim), trainer=TrainerConfig(strategy=strategy))


def test_adafactor_keeps_rows_and_columns_and_learns():
    model, optimizer, _ = trained(replace(TRAIN, name="adafactor"), 8)
    state = optimizer.state[model.embed.weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (24, 1),
        "col_var": (1, 16),
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "sgd", "beta2": 0.9}, r"optim\.beta2 is 0\.9, which optimizer sgd does not read: remove it"),
        ({"name": "sgd", "eps": 1e-6}, r"optim\.eps is 1e-06, which optimizer sgd does not read"),
        ({"name": "adafactor", "beta1": 0.8}, r"optim\.beta1 is 0\.8, which optimizer adafactor does not read"),
        ({"name": "lion", "eps": 1e-6}, r"optim\.eps is 1e-06, which optimizer lion does not read"),
        ({"name": "adamw", "momentum": 0.8}, r"optim\.momentum is 0\.8, which optimizer adamw does not read"),
        ({"name": "adamw", "adamw_lr": 0.1}, r"optim\.adamw_lr is 0\.1, which optimizer adamw does not read"),
        ({"name": "muon", "precondition_every": 5}, r"optim\.precondition_every is 5, which optimizer muon does not"),
        ({"name": "soap", "update_scale": "spectral"}, r"optim\.update_scale is spectral, which optimizer soap does"),
    ],
)
def test_a_field_that_an_optimizer_does_not_read_is_refused(fields, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(optim=OptimConfig(**fields))


#: Strategies that can run what steps whole matrices.
ABLE = {"adafactor": {"single", "ddp"}, "soap": {"single", "ddp"}, "muon": {"single", "ddp", "fsdp2"}}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if not kind.elementwise])
def test_what_steps_whole_matrices_is_refused_where_its_state_is_sharded(name, strategy):
    def config():
        return RunConfig(optim=OptimConfig(name=name), trainer=TrainerConfig(strategy=strategy))

    if strategy in ABLE[name]:
        assert config().optim.name == name
    else:
        mend = "ddp or fsdp2 or single" if name == "muon" else "ddp or single"
        expected = f"{name}, which steps whole matrices, but {strategy} shards its state: give trainer.strategy {mend}"
        with pytest.raises(UsageError, match=expected):
            config()


@pytest.mark.parametrize("model", [PLAIN, KV_BIAS, T5], ids=["plain", "kv_bias", "t5"])
def test_decay_reaches_matrices_and_embeddings_only(model):
    module = PretrainModule(born(model, 0), OptimConfig(weight_decay=0.3), TrainerConfig())
    optimizer = module.configure_optimizers()["optimizer"]
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.model.named_parameters():
        decays = name.endswith("weight") and not (model is T5 and name == "positions.table.weight")
        assert decay[id(parameter)] == (0.3 if decays else 0.0), name
    assert len(decay) == len(list(module.model.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_released_gain_decays_with_the_weights_but_is_no_matrix(name):
    model = born(replace(PLAIN, attention=AttentionConfig("headnorm_released")), 0)
    groups = PretrainModule(
        model, OptimConfig(name=name, weight_decay=0.3, adamw_weight_decay=0.2 if name == "muon" else None),
        TrainerConfig(),
    ).configure_optimizers()["optimizer"].param_groups  # fmt: skip
    gain = dict(model.named_parameters())["blocks.0.attn.aggregate.gain"]
    [group] = [group for group in groups if any(p is gain for p in group["params"])]
    assert group["weight_decay"] == (0.3 if name == "adamw" else 0.2)
    assert any(p is model.embed.weight for p in group["params"])


def by_dimensions(model):
    """The groups that earlier versions made."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    return [{"params": group} for group in groups if group]


NO_VECTORS = replace(KV_BIAS, norm="none", bias=False)


@pytest.mark.parametrize("config", [PLAIN, KV_BIAS, T5, NO_VECTORS], ids=["plain", "kv_bias", "t5", "no_vectors"])
def test_the_state_of_an_earlier_version_goes_to_the_parameters_that_it_is_of(config):
    model = born(config, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    earlier = torch.optim.AdamW(by_dimensions(model))
    for i, parameter in enumerate(model.parameters()):
        earlier.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(parameter, i)}
    expected = {names[id(p)]: state["exp_avg"] for p, state in earlier.state.items()}
    stored = earlier.state_dict()
    renumber_optimizer_state(stored, model, OptimConfig().optimizer)
    optimizer = torch.optim.AdamW(parameter_groups(model, OptimConfig().optimizer))
    optimizer.load_state_dict(stored)
    found = {names[id(p)]: optimizer.state[p]["exp_avg"] for p in chain(*(g["params"] for g in optimizer.param_groups))}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_state_of_another_model_is_refused():
    stored = torch.optim.AdamW(by_dimensions(born(replace(PLAIN, n_layers=1), 0))).state_dict()
    with pytest.raises(RunError, match=r"the run's config\.yaml is another model's"):
        renumber_optimizer_state(stored, born(PLAIN, 0), OptimConfig().optimizer)


# ── optimizers that torch lacks ──────────────────────────────────────────────────────────────────────────────────────


def polynomial_of_singular_values(matrix):
    """What five iterations make of a matrix, from its singular values alone, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize(("scale", "factor"), [("adamw", lambda m, n: 0.2 * max(m, n) ** 0.5), ("spectral", None)])
def test_muon_steps_matrices_by_their_singular_values_and_adamw_the_rest(scale, factor):
    config = replace(TRAIN, name="muon", momentum=0.9, update_scale=scale, adamw_lr=0.003, adamw_weight_decay=0.05)
    model, _, gradients = trained(config)
    factor = factor or (lambda m, n: max(1.0, m / n) ** 0.5)
    plain = replace(TRAIN, lr=0.003, weight_decay=0.05)
    twin = born(PLAIN, 0)
    adamw = torch.optim.AdamW(
        [
            {"params": [twin.embed.weight, twin.head.weight], "weight_decay": plain.weight_decay},
            {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=plain.lr,
        betas=(0.9, 0.95),
    )
    values, momenta = dict(twin.named_parameters()), {}
    for gradient in gradients:
        for name, value in values.items():
            value.grad = gradient[name].clone()
            if name.endswith("weight") and name not in ("embed.weight", "head.weight"):
                momenta[name] = momentum = 0.9 * momenta.get(name, 0.0) + 0.1 * gradient[name].double()
                update = polynomial_of_singular_values(0.1 * gradient[name].double() + 0.9 * momentum)
                step = factor(*value.shape) * update + 0.1 * value.detach().double()
                value.data = (value.detach().double() - 0.01 * step).float()
        adamw.step()
    assert len(momenta) == 2 * 6
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), values[name].detach(), atol=2e-5, rtol=2e-4)


# ── state in bf16 ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_random_rounding_goes_up_as_often_as_a_number_lies_high_between_its_neighbours():
    """All 65 536 draws, of numbers between two of bf16 that are found as whole numbers."""
    low = np.array([0x3F80, 0x3FFF, 0xBF80, 0x0001, 0x7F7F, 0x4321], np.uint32)
    for share in (0, 1, 0x4000, 0xFFFF):
        x = torch.from_numpy(np.repeat(((low << 16) + share).view(np.float32)[None], 1 << 16, 0))
        drawn = round_at_random(x, torch.arange(1 << 16, dtype=torch.int32)[:, None])
        up = (drawn.view(torch.int16).int().numpy() & 0xFFFF) - low.astype(np.int64)
        assert set(up.ravel()) <= {0, 1}
        assert up.sum(0).tolist() == [share] * 6
    # Numbers that are none: a CPU's, of either sign, and a GPU's, which has all bits.
    none = torch.tensor([0x7FC00000, -0x400000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_at_random(none, torch.tensor(0xFFFF, dtype=torch.int32)).isnan().all()


def test_the_bits_of_an_element_are_those_of_its_place_and_of_the_step_alone():
    bits = [_Noise(torch.tensor(float(step)), 100_000).of(0, 100_000) for step in range(1, 201)]
    other = _Noise(torch.tensor(3.0), 1_000_000)
    for start, n in ((0, 1), (4095, 2), (4096, 4096), (50_001, 49_999)):
        assert torch.equal(other.of(start, n), bits[2][start : start + n])
    drawn = torch.stack(bits).double()
    # As 200 independent uniform draws of each, by their means over steps, over places, and from step to step.
    sd = 65536 / 12**0.5
    assert (drawn.min(), drawn.max()) == (0, 65535)
    assert float(drawn.mean(0).std()) == pytest.approx(sd / 200**0.5, rel=0.02)
    assert float((drawn.mean(1) - 32767.5).abs().max()) < 5 * sd / 100_000**0.5
    assert float(torch.corrcoef(drawn[:, :3000])[0, 1:].abs().max()) < 5 / 3000**0.5


def moments(optimizer, parameter):
    return [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]


def test_state_in_bf16_follows_adamw_in_float32(monkeypatch):
    model, optimizer, _ = trained(replace(NARROW, beta2=0.999), 12)
    wide, reference, _ = trained(replace(TRAIN, beta2=0.999), 12)
    start = born(PLAIN, 0)
    for name, p in model.named_parameters():
        twin = wide.get_parameter(name)
        assert [x.dtype for x in moments(optimizer, p)] == [torch.bfloat16] * 2
        assert torch.dist(p, twin) < 0.02 * torch.dist(twin, start.get_parameter(name)), name
        for found, expected in zip(moments(optimizer, p), moments(reference, twin), strict=True):
            assert torch.dist(found, expected) < 0.02 * expected.norm(), name
    # The first step has no state behind it; and pieces of a tensor make no difference.
    (model, *_), (wide, *_) = trained(NARROW, 1), trained(TRAIN, 1)
    assert all(map(torch.equal, model.parameters(), wide.parameters()))
    whole, *_ = trained(NARROW, 4)
    monkeypatch.setattr("birthmark.trainer.optimizers.classes._CACHED", 128)
    assert all(map(torch.equal, trained(NARROW, 4)[0].parameters(), whole.parameters()))


def test_a_mean_of_squares_in_bf16_neither_stalls_nor_drifts():
    """Gradients of one size, then none: β₂ .999 to the 1000th, .368, is left; of one rounded to the nearest, all."""
    parameter = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = NarrowAdamW([{"params": [parameter]}], lr=0.0, betas=(0.9, 0.999))
    nearest = torch.tensor(0.5, dtype=torch.bfloat16)
    parameter.grad = torch.full_like(parameter, 0.5)
    for _ in range(200):
        optimizer.step()
    square = moments(optimizer, parameter)[1]
    assert float(square.float().mean()) == pytest.approx(0.25 * (1 - 0.999**200), rel=2e-3)
    parameter.grad.zero_()
    before = float(square.float().mean())
    for _ in range(1000):
        optimizer.step()
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(square.float().mean()) == pytest.approx(before * 0.999**1000, rel=5e-3)
    assert float(nearest) == 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_one_kernel_steps_and_rounds_as_torchs_operators_do(device, scaled, betas, monkeypatch):
    """Rows of 4,096 elements that end within a block; gradients of all sizes, none, and of what is no number."""
    generator, of_each = torch.Generator().manual_seed(0), []
    start = torch.randn(3, 3001, generator=generator)
    gradients = [torch.randn(3, 3001, generator=generator) * 10.0**power for power in (-9, 0, 4)]
    for gradient in gradients:
        gradient[0, :7] = 0.0
    # A GPU's NaN, which one more bit carries over to −0.
    gradients[2][1, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for name in ("_CACHED", "_AT_ONCE"):  # two pieces: the second begins within a row
        monkeypatch.setattr(classes, name, 5000)
    for where, chosen_for in (("cpu", "cpu"), (device, "cuda")):
        monkeypatch.setattr(kernel_devices, "chosen_for", chosen_for)
        parameter = torch.nn.Parameter(start.clone().to(where))
        optimizer = NarrowAdamW([{"params": [parameter]}], lr=0.01, betas=betas, weight_decay=0.1)
        steps = []
        for number, gradient in enumerate([*gradients, gradients[0]]):
            parameter.grad = gradient.clone().to(where)
            if scaled:
                optimizer.grad_scale = torch.tensor(3.0, device=where)
                optimizer.found_inf = torch.tensor(float(number == 3), device=where)
            optimizer.step()
            state = optimizer.state[parameter]
            kept = parameter, parameter.grad, *moments(optimizer, parameter)
            steps.append([x.detach().cpu().clone() for x in kept])
            assert float(state["step"]) == (3 if scaled and number == 3 else number + 1)
        of_each.append(steps)
    for (p, g, *kept), (by_kernel, by_kernel_g, *kept_by_kernel) in zip(*of_each, strict=True):
        torch.testing.assert_close(by_kernel, p, rtol=2e-6, atol=1e-7, equal_nan=True)
        torch.testing.assert_close(by_kernel_g, g, rtol=1e-6, atol=0, equal_nan=True)
        for one, other in zip(kept, kept_by_kernel, strict=True):
            bits = [x.view(torch.int16).int()[~x.isnan()] for x in (one, other)]
            assert int((bits[0] - bits[1]).abs().max()) <= 1
            assert float((bits[0] != bits[1]).float().mean()) < 1e-3
            assert torch.equal(one.isnan(), other.isnan())
    if scaled:  # nothing moves where a gradient was found to be infinite
        for i in (0, 2, 3):
            torch.testing.assert_close(steps[3][i], steps[2][i], rtol=0, atol=0, equal_nan=True)


def test_state_in_bf16_is_loaded_as_it_was_and_goes_on_to_the_bit():
    model, optimizer, _ = trained(NARROW, 3)
    twin = born(PLAIN, 0)
    twin.load_state_dict(model.state_dict())
    other = PretrainModule(twin, NARROW, TrainerConfig()).configure_optimizers()["optimizer"]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
        assert all(map(torch.equal, moments(optimizer, p), moments(other, of_twin)))
        assert {x.dtype for x in moments(other, of_twin)} == {torch.bfloat16}
        p.grad, of_twin.grad = torch.ones_like(p), torch.ones_like(p)
    optimizer.step()
    other.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(("config", "n_bytes"), [(TRAIN, 8), (NARROW, 4)])
def test_a_plan_knows_the_bytes_of_adamws_state(config, n_bytes):
    model, optimizer, _ = trained(config, 1)
    for p in model.parameters():
        kept = sum(x.nbytes for x in optimizer.state[p].values() if x.ndim)
        assert kept == config.optimizer.state_bytes(tuple(p.shape), False) == n_bytes * p.numel()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has had Muon since 2.9")
def test_muon_is_torchs_own_as_far_as_bfloat16_goes():
    from birthmark.trainer.optimizers.classes import Muon

    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(matrix.clone())
    mine = Muon([{"params": [ours]}], lr=0.1, momentum=0.9, weight_decay=0.01)
    torchs = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        ours.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(1 + seed))
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    assert torch.dist(ours, theirs) < 0.02 * torch.dist(ours, matrix)


def test_soap_steps_matrices_in_the_eigenbasis_of_their_gradients_and_adamw_the_rest():
    """The paper's code takes the first step for the basis alone; in the second the moments are of one gradient."""
    pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    config = replace(TRAIN, name="soap", beta1=0.9, beta2=0.95, weight_decay=0.0)
    model, optimizer, (first, second) = trained(config, 2)
    start = dict(born(PLAIN, 0).named_parameters())
    name = "blocks.0.mlp.up.weight"
    left, right = (first[name].double() @ first[name].double().T, first[name].double().T @ first[name].double())
    bases = [torch.linalg.eigh(side)[1].flip(1) for side in (left, right)]
    state = optimizer.state[model.get_parameter(name)]
    rank = min(first[name].shape)
    for found, expected in zip(state["Q"], bases, strict=True):
        overlap = (found.double().T @ expected).abs().diagonal()[: rank // 2]
        torch.testing.assert_close(overlap, torch.ones_like(overlap), atol=1e-3, rtol=0)
    # The first step of Adam, bias corrected, is g/|g| in the basis.
    q_left, q_right = (basis.double() for basis in state["Q"])
    rotated = q_left.T @ second[name].double() @ q_right
    moved = q_left.T @ (model.get_parameter(name) - start[name]).detach().double() @ q_right
    large = rotated.abs() > 1e-3 * rotated.abs().max()
    torch.testing.assert_close(moved[large], -0.01 * rotated.sign()[large], atol=1e-4, rtol=0)
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[model.embed.weight]) == set(optimizer.state[model.head.weight]) == adamw


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.steps_matrices])
def test_matrices_apart_are_one_optimizer_to_a_checkpoint(name):
    """Saved after two steps, loaded into another: the third step is the same to the bit, and shares one state."""
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    config = replace(TRAIN, name=name)
    model, optimizer, _ = trained(config, 2)
    twin = born(PLAIN, 0)
    twin.load_state_dict(model.state_dict())
    other = PretrainModule(twin, config, TrainerConfig()).configure_optimizers()["optimizer"]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    batch = torch.randint(0, 24, (3, 9), generator=torch.Generator().manual_seed(7))
    for its_model, its in ((model, optimizer), (twin, other)):
        its.zero_grad()
        next_token_loss(its_model, batch).objective.backward()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(other.state) == len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_plan_counts_the_state_that_an_optimizer_keeps(name):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    config = replace(TRAIN, name=name)
    model, optimizer, _ = trained(config, 3)
    roles = parameter_roles(model)

    def n_elements(value):
        if isinstance(value, (list, tuple)):
            return sum(map(n_elements, value))
        return value.numel() if isinstance(value, torch.Tensor) and value.ndim else 0

    for its, parameter in model.named_parameters():
        kept = sum(map(n_elements, optimizer.state[parameter].values()))
        is_matrix = roles[its] is ParameterRole.MATRIX
        assert kept == config.optimizer.state_elements(tuple(parameter.shape), is_matrix), its


class Vectors(torch.nn.Module):
    """A part that calls a vector a matrix."""

    def __init__(self, role):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.parameter_roles = {"scale": role}


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (ParameterRole.MATRIX, r"muon, which steps matrices, but scale has the role of one and the shape \[4\]: state"),
        (ParameterRole.GAIN, "muon, which steps matrices, but the model has none: give adamw"),
    ],
)
def test_muon_on_vectors_is_refused(role, expected):
    with pytest.raises(UsageError, match=expected):
        parameter_groups(Vectors(role), OptimConfig(name="muon").optimizer)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer.optimizer.soap", None)
    with pytest.raises(UsageError, match=r"pip install pytorch-optimizer"):
        trained(replace(TRAIN, name="soap"), 1)


@pytest.mark.parametrize("n_steps", [0, 3])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "bf16"])
def test_a_skipped_step_moves_nothing_of_any_optimizer(name, wait, n_steps):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    model, optimizer, _ = trained(NARROW if name == "bf16" else replace(TRAIN, name=name), n_steps)
    before = leaves(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    guard = StepGuard(model)
    with suppress(UpdateSkippedError):
        guard.hold(optimizer, list(model.parameters()), torch.tensor(float("nan")), wait=wait)
        optimizer.step()
    guard.settle()
    after = leaves((model.state_dict(), optimizer.state_dict()))
    assert before.keys() == after.keys()
    assert all(torch.equal(a, after[n]) if isinstance(a, torch.Tensor) else a == after[n] for n, a in before.items())
