"""Training passes with experts and dropout: computing again and compiling change nothing."""

from dataclasses import replace

import pytest
import torch
from oracles import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from birthmark.models.attention.fused.backends import BACKENDS
from birthmark.models.birth import born
from birthmark.models.config import DropoutConfig, ExpertsConfig, ModelConfig
from birthmark.models.dropout import Dropout, keys_of_samples
from birthmark.trainer.activation_checkpointing import _policy, set_train_passes
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.module import next_token_loss

EXPERTS = ExpertsConfig(n_experts=3, d_ff=16, d_shared=8, load_balance=0.5, router_z_loss=0.1)
DROPOUT = DropoutConfig(embedding=0.1, residual=0.2, attention=0.3)
SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "max_seq_len": 12}
CONFIG = ModelConfig(**SIZES, experts=EXPERTS, dropout=DROPOUT)
BATCH = torch.randint(40, (3, 13), generator=torch.Generator().manual_seed(0))


def gradients(**fields):
    """Losses and gradients of two passes, one after the other, with dropout."""
    model = born(CONFIG, 0).train()
    set_train_passes(model, TrainerConfig(device="cpu", **fields))
    for step in range(2):
        masks = Dropout(CONFIG.dropout, torch.from_numpy(keys_of_samples(step, range(3))))
        losses = next_token_loss(model, BATCH, dropout=masks)
        losses.objective.backward()
    return {"objective": losses.objective.detach(), **losses.routing._asdict()} | {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module")
def plain():
    return gradients()


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_checkpointing_changes_no_bit_of_losses_and_gradients(plain, kind):
    found = gradients(activation_checkpointing=kind)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


#: Each fused attention, with a window too where it takes one.
FUSED = {
    f"{backend.name}, window {window}": (device, backend, window)
    for device, backends in BACKENDS.items()
    for backend in backends
    for window in ((None, 4) if backend.windows else (None,))
}


@pytest.mark.parametrize("name", FUSED)
def test_selective_keeps_what_every_fused_attention_computes(name):
    """With operators as they are called, on tensors without memory: no GPU is needed."""
    device, backend, window = FUSED[name]
    operators = []
    with FakeTensorMode(), Operators(lambda function, *_: operators.append(function)):
        q, k, v = (torch.empty(1, 2, 16, 64, dtype=backend.dtypes[-1], device=device) for _ in range(3))
        backend.forward(q, k, v, 0.125, True, window)
    (attention,) = [operator for operator in operators if "attention" in operator.name()]
    assert _policy(None, attention) is CheckpointPolicy.MUST_SAVE


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": "full"}])
def test_compiled_blocks_give_the_same(plain, fields):
    found = gradients(compile="blocks", **fields)
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], atol=1e-5, rtol=1e-4)


def test_validation_has_no_routing_losses():
    assert next_token_loss(born(CONFIG, 0).eval(), BATCH).routing is None


def test_a_step_is_one_graph_whatever_routers_choose():
    plain, traced = (born(replace(CONFIG, n_layers=1), 0).train() for _ in range(2))
    compiled = torch.compile(next_token_loss, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        batch_BT = torch.randint(40, (3, 13), generator=torch.Generator().manual_seed(seed))
        for loss, model in ((next_token_loss, plain), (compiled, traced)):
            model.zero_grad()
            masks = Dropout(CONFIG.dropout, torch.from_numpy(keys_of_samples(seed, range(3))))
            loss(model, batch_BT, dropout=masks).objective.backward()
        for mine, theirs in zip(traced.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
