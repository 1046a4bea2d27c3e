"""Inputs of products are cast once, however many products read them; and gated norms."""

import pytest
import torch
from oracles import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from birthmark.models import decoder
from birthmark.models.attention import attention
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.norms import cast_once, rms_norm
from birthmark.plan.rehearsal import as_on

EPS = 1e-5
#: Of one block of rows, of several and a rest, and of one channel.
SHAPES = [(2, 3, 64), (2, 700, 1000), (4, 5, 1)]


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gain, dy = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape[-1:], shape))
    return x.requires_grad_(), gain.requires_grad_(), dy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_torchs_to_the_bit(shape, dtype):
    x, gain, _ = inputs(shape, dtype)
    trained = rms_norm(x, gain, EPS)
    assert trained.requires_grad
    assert torch.equal(trained, F.rms_norm(x, gain.shape, gain, EPS))
    with torch.no_grad():
        assert torch.equal(rms_norm(x, gain, EPS), trained)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-13)])
def test_gradients_are_those_of_the_formula(shape, dtype, rounding):
    x, gain, dy = inputs(shape, dtype)
    found = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    exact_x, exact_gain = (tensor.detach().double().requires_grad_() for tensor in (x, gain))
    formula = exact_x / (exact_x.square().mean(-1, keepdim=True) + EPS).sqrt() * exact_gain
    wanted = torch.autograd.grad(formula, (exact_x, exact_gain), dy.double())
    for ours, exact, given in zip(found, wanted, (x, gain), strict=True):
        assert ours.dtype == given.dtype
        # Over one channel the gradient is what is left of two numbers of the size of dy · gain / x.
        scale = max(float(exact.norm()), float((dy * gain / x).detach().norm()) if shape[-1] == 1 else 0.0)
        assert float((ours.double() - exact).norm()) <= rounding * scale


def test_gradients_are_float32_inside_whatever_autocast_is_on():
    x, gain, dy = inputs((2, 700, 1000), torch.float32)
    plain = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(rms_norm(x, gain, EPS), (x, gain), dy)
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))


def test_it_keeps_its_input_and_one_number_a_row():
    x, gain, _ = inputs((2, 700, 1000), torch.float32)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        rms_norm(x, gain, EPS)
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, gain)}
    assert given < set(kept)
    assert sum(tensor.numel() for pointer, tensor in kept.items() if pointer not in given) == 2 * 700


def test_rows_that_lie_apart_and_a_gain_that_is_frozen():
    x, _, dy = inputs((3, 64, 40), torch.float32)
    gain = torch.linspace(0.5, 1.5, 64)
    found = rms_norm(x.transpose(1, 2), gain, EPS)
    exact = F.rms_norm(x.transpose(1, 2).double(), (64,), gain.double(), EPS)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy.transpose(1, 2).to(y.dtype))[0] for y in (found, exact)))


def test_a_compiled_graph_has_torchs_own():
    x, gain, dy = inputs((2, 3, 64), torch.float32)
    nodes = []

    def backend(graph, _):
        nodes.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    y = torch.compile(rms_norm, backend=backend, fullgraph=True)(x, gain, EPS)
    assert nodes == [torch.rms_norm]
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(rms_norm(x, gain, EPS), x, dy))


# ---------------------------------------------------------------- test norms
# Inputs of products are cast once, however many products read them; and gated norms.

SHAPE = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}


def step(model, tokens):
    """The loss of a bf16 pass, gradients, and how often the residual stream's shape was cast on the way forward."""
    casts = []

    def note(function, args, found):
        if function.name() == "aten::_to_copy" and found.shape == (*tokens.shape, 32):
            casts.append((args[0].dtype, found.dtype) == (torch.float32, torch.bfloat16))

    with torch.autocast("cpu", torch.bfloat16), Operators(note):
        loss = model(tokens).float().square().mean()
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters())), sum(casts)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "none"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_norms_output_is_cast_once_for_all_maps_that_read_it(norm, placement, lively, random_tokens, monkeypatch):
    config = ModelConfig(**SHAPE, mlp="swiglu", norm=norm, norm_placement="pre" if norm == "none" else placement)
    model, tokens = lively(config).requires_grad_(), random_tokens(config)
    loss, gradients, n = step(model, tokens)
    if placement == "pre":  # a norm of what is bf16 casts inside
        assert n == 2 * 3 + 1  # two in each block, and the head's
    monkeypatch.setattr(decoder, "cast_once", lambda x: x)
    loss_before, gradients_before, n_before = step(model, tokens)
    assert n_before - n == 3 * 3  # q, k and v read one, gate and up the other
    # What the products read is the same; gradients of the norm's output are summed in bf16 now.
    assert torch.equal(loss, loss_before)
    for now, before in zip(gradients, gradients_before, strict=True):
        assert float((now - before).norm()) <= 2e-2 * float(before.norm())


def test_nothing_is_cast_in_float32():
    x = torch.randn(2, 3)
    assert cast_once(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert cast_once(x.double()).dtype == torch.float64
        assert cast_once(x).dtype == torch.bfloat16


@pytest.mark.parametrize("qk_norm", ["head", "width"])
def test_queries_and_keys_have_the_type_of_values_on_cuda(qk_norm, monkeypatch):
    seen = []
    real = attention.Scores
    monkeypatch.setattr(attention, "Scores", lambda q, k, *rest: seen.extend([q.dtype, k.dtype]) or real(q, k, *rest))
    config = ModelConfig(**SHAPE, mlp="swiglu", attention=AttentionConfig(qk_norm=qk_norm, normaliser="softmax_sink"))
    with FakeTensorMode(), as_on("cuda"), torch.autocast("cpu", torch.bfloat16):
        model = decoder.Decoder(config)
        model(torch.zeros(2, 24, dtype=torch.int64)).sum().backward()
    assert seen == [torch.bfloat16] * 6


@torch.no_grad()
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "dyt"])
def test_a_gated_norm_is_its_formula_and_born_as_the_plain_one(norm):
    config = ModelConfig(**SHAPE, norm=norm, norm_gate=3, norm_placement="both")
    model, plain = born(config, 0), born(ModelConfig(**SHAPE, norm=norm, norm_placement="both"), 0)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    norms = [name.removesuffix("gain") for name in theirs if name.endswith(".gain")]
    assert ours.keys() - theirs == {f"{name}gate.{one}.weight" for name in norms for one in ("down", "up")}
    gated, without = model.blocks[1].norm_mlp.double(), plain.blocks[1].norm_mlp.double()
    x = torch.randn(5, SHAPE["d_model"], dtype=torch.float64)
    y = without(x)
    inner = y @ gated.gate.down.weight.T
    opening = 1 / (1 + torch.exp(-(inner / (1 + torch.exp(-inner))) @ gated.gate.up.weight.T))
    torch.testing.assert_close(gated(x), y * opening)


@torch.no_grad()
def test_a_scale_stands_before_the_norm_and_a_tanh_in_its_place():
    shape = SHAPE | {"norm_placement": "both"}
    plain = born(ModelConfig(**shape), 0)
    scaled = born(ModelConfig(**shape, norm_scale=True), 0)
    bent = born(ModelConfig(**shape, norm="dyt", bias=True), 0)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(scaled(tokens), plain(tokens))
    for model, found in ((scaled, {"scale"}), (bent, {"alpha", "bias"})):
        ours, theirs = model.state_dict(), plain.state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert {name.rpartition(".")[2] for name in ours if name not in theirs} == found
    x = torch.randn(5, SHAPE["d_model"], dtype=torch.float64)
    norm, tanh = scaled.blocks[1].norm_mlp_out.double(), bent.norm.double()
    gain, scale, bias = (torch.rand(SHAPE["d_model"], dtype=torch.float64) + 0.5 for _ in range(3))
    norm.gain.copy_(gain), norm.scale.copy_(scale), tanh.gain.copy_(gain), tanh.bias.copy_(bias)
    root = ((x * scale).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), x * scale / root * gain)
    assert bent.blocks[0].norm_attn.alpha.item() == tanh.alpha.item() == 0.5
    torch.testing.assert_close(tanh(x), (torch.exp(x) - 1) / (torch.exp(x) + 1) * gain + bias)  # tanh(x/2)
