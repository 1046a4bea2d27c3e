"""The mixture of experts against a loop over tokens, and against Mixtral and OLMoE of transformers."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from birthmark.models.activations import ACTIVATIONS
from birthmark.models.birth import born
from birthmark.models.config import GATED, ExpertsConfig, InitConfig, ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.models.experts import fused_experts as grouped_experts
from birthmark.models.experts.fused_experts import fused_experts
from birthmark.models.experts.routed_mlp import Mixture
from birthmark.models.init import birth_plan

CONFIG = ModelConfig(
    d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=12, mlp="swiglu", d_ff=24,
    experts=ExpertsConfig(n_experts=5, top_k=2, d_ff=12, d_shared=20),
)  # fmt: skip


def with_experts(**fields):
    return replace(CONFIG, experts=replace(CONFIG.experts, **fields))


def mixture_of(config, seed=0, dtype=torch.float64):
    return born(config, seed).to(dtype).blocks[-1].mlp


def slowly(mixture, x_BTD, top_k, renormalise):
    """One token after the other: its experts by a sort of its shares, their outputs added."""
    out_BTD = torch.zeros_like(x_BTD)
    for b, t in torch.cartesian_prod(*map(torch.arange, x_BTD.shape[:2])).tolist():
        x_D = x_BTD[b, t]
        share_E = torch.exp(mixture.router.weight @ x_D)
        share_E = share_E / share_E.sum()
        chosen = sorted(range(len(share_E)), key=lambda e: -share_E[e].item())[:top_k]
        whole = sum(share_E[e] for e in chosen) if renormalise else 1.0
        for e in chosen:
            expert = mixture.experts[e]
            hidden_F = torch.nn.functional.silu(expert.gate.weight @ x_D) * (expert.up.weight @ x_D)
            out_BTD[b, t] += share_E[e] / whole * (expert.down.weight @ hidden_F)
        if mixture.shared is not None:
            hidden_F = torch.nn.functional.silu(mixture.shared.gate.weight @ x_D) * (mixture.shared.up.weight @ x_D)
            out_BTD[b, t] += mixture.shared.down.weight @ hidden_F
    return out_BTD


ROUTED = [{}, {"renormalise": False, "d_shared": None}, {"top_k": 1}, {"top_k": 5, "renormalise": False}]


@pytest.mark.parametrize("fields", ROUTED)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(fields):
    config = with_experts(**fields)
    mixture = mixture_of(config)
    x_BTD = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    parameters = [x_BTD, *mixture.parameters()]
    found_BTD = mixture(x_BTD)
    expected_BTD = slowly(mixture, x_BTD, config.experts.top_k, config.experts.renormalise)
    torch.testing.assert_close(found_BTD, expected_BTD)
    up = torch.randn_like(found_BTD)
    ours, theirs = (torch.autograd.grad(y, parameters, up, allow_unused=True) for y in (found_BTD, expected_BTD))
    for parameter, mine, slow in zip(parameters, ours, theirs, strict=True):
        assert mine is not None  # an expert without tokens has a gradient of zeros
        torch.testing.assert_close(mine, torch.zeros_like(parameter) if slow is None else slow)


def test_an_expert_without_tokens_takes_part():
    mixture = mixture_of(with_experts(top_k=1, d_shared=None))
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[3] = 1.0
    x_BTD = torch.rand(1, 4, 16, dtype=torch.float64)
    mixture(x_BTD).sum().backward()
    used = [expert.up.weight.grad.abs().sum().item() > 0 for expert in mixture.experts]
    assert used == [False, False, False, True, False]
    assert all(parameter.grad is not None for parameter in mixture.parameters())


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_logits_and_load_balance_are_those_of_transformers(name, tmp_path):
    routing = {"renormalise": name == "mixtral", "router_z_loss": 0.5, "load_balance": 0.25}
    norm = replace(CONFIG.attention, qk_norm="width" if name == "olmoe" else "none")
    model = born(replace(with_experts(d_ff=24, d_shared=None, **routing), attention=norm), 3)
    save_pretrained(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.model_type == name
    tokens_BT = torch.randint(40, (3, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = model(tokens_BT[:, :-1]), theirs(tokens_BT[:, :-1], output_router_logits=True)
        torch.testing.assert_close(found, expected.logits, atol=1e-5, rtol=1e-5)
        losses = model.train()(tokens_BT[:, :-1], targets_BS=tokens_BT[:, 1:])
    balance = getattr(getattr(transformers.models, name), f"modeling_{name}").load_balancing_loss_func
    # Theirs takes choices as a share of tokens, and pools the blocks that it is given.
    by_block = [balance((logits,), num_experts=5, top_k=2) / 2 for logits in expected.router_logits]
    squares = [logits.logsumexp(-1).square().mean() for logits in expected.router_logits]
    assert losses.routing.load_balance.item() == pytest.approx(sum(by_block).item() / 2, rel=1e-5)
    assert losses.routing.router_z.item() == pytest.approx(sum(squares).item() / 2, rel=1e-5)
    added = 0.25 * losses.routing.load_balance + 0.5 * losses.routing.router_z
    torch.testing.assert_close(losses.objective, losses.cross_entropy + added)


def test_births_are_paired_and_have_the_roles_of_a_dense_mlp():
    few, many = (born(with_experts(n_experts=n), 0).state_dict() for n in (3, 5))
    assert few.keys() < many.keys()
    router = "blocks.0.mlp.router.weight"
    assert all(torch.equal(few[name], many[name]) for name in few if not name.endswith("router.weight"))
    assert torch.equal(few[router], many[router][:3])
    gpt2 = replace(CONFIG, init=InitConfig(kind="gpt2", zero=["mlp.up"]))
    plan = birth_plan(born(gpt2, 0), gpt2.init)
    assert {plan[f"blocks.1.mlp.{part}.down.weight"].std for part in ("experts.0", "experts.4", "shared")} == {0.01}
    assert {plan[f"blocks.1.mlp.{part}.up.weight"].value for part in ("experts.0", "shared")} == {0.0}


def test_the_first_blocks_may_be_dense():
    model = born(with_experts(n_dense=1), 0)
    assert not isinstance(model.blocks[0].mlp, Mixture)
    assert isinstance(model.blocks[1].mlp, Mixture)
    assert model.blocks[0].mlp.up.weight.shape == (24, 16)


def with_modules(mixture):
    """The same, with each expert called as the module that it is, since a hook wants to see its call."""
    mixture = copy.deepcopy(mixture)
    mixture.experts[0].register_forward_hook(lambda *_: None)
    return mixture


@pytest.fixture(params=[False, True], ids=["one by one", "grouped"])
def is_grouped(request, monkeypatch):
    """Both ways to compute the operator; on a CPU torch multiplies group by group."""
    if request.param:
        monkeypatch.setattr(grouped_experts, "is_fast", lambda *_: True)
    return request.param


def test_a_rehearsal_calls_every_expert_for_as_many_rows():
    """Tensors without values choose nothing; 2 sequences of 7 tokens with 2 choices have 28 rows."""
    rows = []
    with FakeTensorMode():
        mixture = Mixture(CONFIG, 1)
        for expert in mixture.experts:
            expert.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
        assert mixture(torch.empty(2, 7, 16)).shape == (2, 7, 16)
    assert sorted(rows) == [4, 6, 6, 6, 6]  # 14 choices of a sequence over 5 experts


def all_random(mixture, generator):
    for parameter in mixture.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 4
    return mixture


@pytest.mark.parametrize("mlp", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("bias", [False, True])
def test_one_operator_is_the_modules_one_by_one(mlp, bias, is_grouped):
    # torch has no grouped product in float64.
    dtype = torch.float32 if is_grouped else torch.float64
    generator = torch.Generator().manual_seed(2)
    fused = all_random(mixture_of(replace(with_experts(), mlp=mlp, bias=bias), dtype=dtype), generator)
    modules = with_modules(fused).double()
    x_BTD, up_BTD = (torch.randn(2, 9, 16, dtype=dtype, generator=generator) for _ in range(2))
    found, expected = (
        [y_BTD := one(x), *torch.autograd.grad(y_BTD, [x, *one.parameters()], up_BTD.to(x.dtype))]
        for one, x in ((fused, x_BTD.requires_grad_()), (modules, x_BTD.detach().double().requires_grad_()))
    )
    chosen_NK = torch.zeros(18, 1, dtype=torch.int64)
    count_E = torch.bincount(chosen_NK[:, 0], minlength=len(modules.experts))
    assert fused_experts(modules.experts, x_BTD.flatten(0, 1), torch.ones(18, 1), chosen_NK, count_E) is None
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = {"atol": 1e-6 * theirs.abs().max().item(), "rtol": 1e-5} if is_grouped else {}
        torch.testing.assert_close(mine, theirs.to(dtype), **tolerance)


def test_one_operator_keeps_the_dtypes_of_the_modules(is_grouped):
    # Rows of 16 bytes are what a grouped product in bf16 asks for.
    fused = mixture_of(with_experts(d_ff=16)).float()
    modules, x_BTD = with_modules(fused), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(x_BTD), modules(x_BTD)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    for one, y_BTD in ((fused, found), (modules, expected)):
        y_BTD.float().square().sum().backward()
        assert {parameter.grad.dtype for parameter in one.parameters()} == {torch.float32}
    for mine, theirs in zip(fused.parameters(), modules.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=0.02 * theirs.grad.abs().max().item(), rtol=0.02)


def test_kernels_that_skip_experts_without_rows_leave_nothing_in_gradients(monkeypatch):
    """As some devices' do (PyTorch's issue 172439): what was in memory stays where an expert has no rows."""
    product, skipped = torch.nn.functional.grouped_mm, []

    def skips(a, b, *, offs):
        out = product(a, b, offs=offs)
        if a.ndim == b.ndim == 2:
            without = offs.diff(prepend=offs.new_zeros(1)) == 0
            skipped.extend(without.tolist())
            out[without] = torch.nan
        return out

    monkeypatch.setattr(grouped_experts, "is_fast", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", skips)
    mixture = mixture_of(with_experts(top_k=1), dtype=torch.float32)
    mixture(torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(5))).sum().backward()
    assert any(skipped)
    assert not all(skipped)
    assert all(parameter.grad.isfinite().all() for parameter in mixture.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
def test_a_gpu_computes_all_experts_at_once_without_waiting(bias):
    config = replace(CONFIG, d_model=64, bias=bias, experts=replace(CONFIG.experts, d_ff=32))
    mixture = all_random(mixture_of(config, dtype=torch.float32), torch.Generator().manual_seed(2))
    mixture = mixture.cuda()
    x_BTD = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(3)).cuda().requires_grad_()
    if not grouped_experts.is_fast(x_BTD.bfloat16(), [mixture.experts[0].up.weight]):
        pytest.skip("this device has no kernel for grouped products")

    def passed(one):
        with torch.autocast("cuda", torch.bfloat16):
            y_BTD = one(x_BTD)
        return [y_BTD, *torch.autograd.grad(y_BTD.float().square().mean(), [x_BTD, *one.experts.parameters()])]

    # Routers are alike on one device, so that no rounding sends a token to another expert.
    expected = passed(with_modules(mixture))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, again = passed(mixture), passed(mixture)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, second, theirs in zip(found, again, expected, strict=True):
        assert torch.equal(mine, second)
        assert (mine.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


def test_frozen_experts_pass_gradients_on():
    mixture = mixture_of(with_experts())
    mixture.experts.requires_grad_(False)
    x_BTD = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    found = torch.autograd.grad(mixture(x_BTD).square().sum(), [x_BTD, mixture.router.weight])
    slow = slowly(mixture, x_BTD, 2, True).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(slow, [x_BTD, mixture.router.weight]))
    assert all(parameter.grad is None for parameter in mixture.experts.parameters())
