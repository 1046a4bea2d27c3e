"""The table of optimizers: what each reads, steps and keeps; which parameters decay; states of earlier versions."""

import dataclasses
from dataclasses import replace
from itertools import chain
from typing import get_args

import pytest
import torch

from birthmark.errors import RunError, UsageError
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig
from birthmark.trainer.module import PretrainModule, next_token_loss
from birthmark.trainer.optimizers import OPTIMIZERS, OptimizerName, optimizer_fields
from birthmark.trainer.parameter_groups import parameter_groups, renumber_optimizer_state
from birthmark.trainer.strategies.table import STRATEGIES

PLAIN = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12, bias=True, norm="layernorm")
KV_BIAS = replace(PLAIN, attention=AttentionConfig(kv_bias="key_value"))
T5 = replace(PLAIN, positions="t5")
#: Numbers that every optimizer reads; those of one alone are left at their defaults.
TRAIN = OptimConfig(lr=0.01, warmup_steps=0, schedule="constant", weight_decay=0.1)


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
        assert optimizer_fields(kind) <= fields


def test_sgd_is_momentum_over_a_gradient_with_decay():
    config = replace(TRAIN, name="sgd", beta1=0.8)
    model, _, gradients = trained(config)
    for name, start in born(PLAIN, 0).named_parameters():
        decay = 0.1 if name.endswith("weight") else 0.0
        value, momentum = start.detach().double(), torch.zeros_like(start).double()
        for gradient in gradients:
            momentum = 0.8 * momentum + gradient[name].double() + decay * value
            value = value - 0.01 * momentum
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), value.float(), atol=1e-6, rtol=1e-5)


def test_nadam_is_the_papers_formula_with_decoupled_decay():
    """As Dozat (2016) has it: β₁ of step t is β₁ (1 − ½·0.96^(0.004 t)); decay shrinks the weight beforehand."""
    config = replace(TRAIN, name="nadam", beta1=0.9, beta2=0.99)
    model, _, gradients = trained(config)
    for name, start in born(PLAIN, 0).named_parameters():
        decay = 0.1 if name.endswith("weight") else 0.0
        value, m, v, product = start.detach().double(), 0.0, 0.0, 1.0
        for t, gradient in enumerate(gradients, 1):
            g = gradient[name].double()
            mu, mu_next = (0.9 * (1 - 0.5 * 0.96 ** (s * 0.004)) for s in (t, t + 1))
            product *= mu
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            step = (1 - mu) / (1 - product) * g + mu_next / (1 - product * mu_next) * m
            value = value * (1 - 0.01 * decay) - 0.01 * step / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), value.float(), atol=1e-5, rtol=1e-4)


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
    ],
)
def test_a_field_that_an_optimizer_does_not_read_is_refused(fields, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(optim=OptimConfig(**fields))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_steps_whole_matrices_is_refused_where_its_state_is_sharded(strategy):
    def config():
        return RunConfig(optim=OptimConfig(name="adafactor"), trainer=TrainerConfig(strategy=strategy))

    if strategy in ("single", "ddp"):
        assert config().optim.name == "adafactor"
    else:
        with pytest.raises(UsageError, match=f"adafactor, which steps whole matrices, but {strategy} shards its state"):
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
    renumber_optimizer_state(stored, model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1))
    optimizer.load_state_dict(stored)
    found = {names[id(p)]: optimizer.state[p]["exp_avg"] for p in chain(*(g["params"] for g in optimizer.param_groups))}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_state_of_another_model_is_refused():
    stored = torch.optim.AdamW(by_dimensions(born(replace(PLAIN, n_layers=1), 0))).state_dict()
    with pytest.raises(RunError, match=r"the run's config\.yaml is another model's"):
        renumber_optimizer_state(stored, born(PLAIN, 0))
