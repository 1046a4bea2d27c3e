"""Products of the blocks' maps in fp8: what changes, what does not, and where they are refused."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from birthmark.models.birth import born, digest
from birthmark.models.config import AttentionConfig, ExpertsConfig, ModelConfig
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.numerics import device_problems, use_fp8

GPU = torch.device("cuda")


def test_fp8_is_refused_where_it_cannot_be(monkeypatch):
    config = TrainerConfig(precision="fp8")
    (problem,) = device_problems(config, torch.device("cpu"))
    assert problem.startswith("trainer.precision is fp8, which needs a GPU of compute capability 8.9 or more")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert device_problems(config, GPU) == [problem]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert device_problems(config, GPU) == [
        "trainer.precision is fp8, which needs torchao: pip install torchao, or give bf16"
    ]
    (problem,) = TrainerConfig(precision="fp8", strategy="zero3").problems()
    assert problem.startswith("trainer.precision is fp8, but zero3 gathers")


def rounded(x):
    """To fp8 and back, scaled by the largest element."""
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().max()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


def test_training_multiplies_in_fp8_and_all_else_stays():
    pytest.importorskip("torchao", reason="torchao, an optional dependency, is not installed")
    config = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=16, mlp="swiglu", d_ff=64)
    model, tokens = born(config, 0), torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    before, names, plain = digest(model), [name for name, _ in model.named_parameters()], model(tokens)
    use_fp8(model, emulate=True)
    assert (digest(model), [name for name, _ in model.named_parameters()]) == (before, names)
    assert torch.equal(model.eval()(tokens), plain)
    model.train()
    gate, x_BTD = model.blocks[0].mlp.gate, torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    by_hand = F.linear(rounded(x_BTD), rounded(gate.weight))
    torch.testing.assert_close(gate(x_BTD), by_hand, rtol=1e-4, atol=1e-5)
    found = model(tokens)
    assert 1e-3 < ((found - plain).norm() / plain.norm()).item() < 0.2
    found.square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.fixture
def strict_fp8(monkeypatch):
    """In place of torchao: maps that fail where nothing is multiplied, as its largest element of nothing does."""

    class Strict(torch.nn.Linear):
        def forward(self, x):
            return F.linear(rounded(x), rounded(self.weight), self.bias)

    def convert(maps, config):
        (plain,) = maps
        strict = Strict(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
        return torch.nn.Sequential(strict)

    stub = SimpleNamespace(Float8LinearConfig=lambda **fields: None, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=stub))
    monkeypatch.setitem(sys.modules, "torchao.float8", stub)


SIZES = {"d_model": 32, "n_layers": 1, "n_heads": 16, "vocab_size": 64, "max_seq_len": 16, "mlp": "swiglu"}
EXPERTS = ExpertsConfig(n_experts=16, top_k=1, d_ff=16, d_shared=16)
GATED = ModelConfig(**SIZES, norm_gate=16, attention=AttentionConfig(gate="head"), experts=EXPERTS)


def test_routers_and_gates_stay_in_bf16(strict_fp8):
    """Though all their sides are multiples of 16."""
    model = born(GATED, 0)
    use_fp8(model)
    found = {name for name, module in model.named_modules() if "product" in vars(module)}
    attention = {f"attn.{name}" for name in ("q", "k", "v", "o")}
    experts = {f"mlp.{one}.{name}" for one in ("shared", *(f"experts.{e}" for e in range(16)))
               for name in ("gate", "up", "down")}  # fmt: skip
    assert found == {f"blocks.0.{name}" for name in attention | experts}


def test_an_expert_that_gets_no_token_trains_in_fp8_too(strict_fp8):
    model = born(GATED, 0).train()
    use_fp8(model)
    model(torch.zeros(1, 2, dtype=torch.long)).square().mean().backward()
    sums = [expert.up.weight.grad.abs().sum().item() for expert in model.blocks[0].mlp.experts]
    assert 1 <= sum(size > 0 for size in sums) <= 2


@pytest.mark.cuda
def test_fp8_trains_on_a_gpu():
    pytest.importorskip("torchao", reason="torchao, an optional dependency, is not installed")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    config = ModelConfig(d_model=64, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=32, mlp="swiglu", d_ff=128)
    model = born(config, 0, "cuda").train()
    tokens = torch.randint(64, (2, 32), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        plain = model(tokens).float()
        use_fp8(model)
        found = model(tokens).float()
    assert 0 < ((found - plain).norm() / plain.norm()).item() < 0.2
    found.square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
