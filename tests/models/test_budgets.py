"""Budgets of operators and bytes, counted on the meta device: a snapshot's pass and each arm of attention, as a GPU
runs them. Times need a card; more bytes than these need a reason. And no training pass makes a tensor of host data.
"""

from contextlib import nullcontext

import attention_arms
import numpy as np
import pytest
import torch
from attention_arms import calibrated
from oracles import Operators, Traffic
from torch.utils._pytree import tree_leaves

from birthmark.measure.builtin_metrics import OBSERVED, builtin_metrics
from birthmark.measure.measurement import evaluation_mode
from birthmark.measure.observed_metrics import Setting
from birthmark.measure.passes import FiniteWatch, MetricObserver, WholePass
from birthmark.metrics.sinks import KeySummer
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.correlation import estimated_correlations
from birthmark.models.attention.positions import POSITIONS
from birthmark.models.attention.weight_reader import read_weights
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.plan import rehearsal

META = torch.device("meta")


# ---------------------------------------------------------------- one operator in place of a GPU's fused norm


@torch.library.custom_op("birthmark_tests::rms_norm", mutates_args=())
def fused_norm(x: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("for tensors without values")


@fused_norm.register_fake
def _(x, gain):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("birthmark_tests::rms_norm_backward", mutates_args=())
def fused_norm_backward(
    d_y: torch.Tensor, x: torch.Tensor, gain: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("for tensors without values")


@fused_norm_backward.register_fake
def _(d_y, x, gain, scale):
    return torch.empty_like(x), torch.empty_like(gain)


fused_norm.register_autograd(
    lambda ctx, d_y, _: fused_norm_backward(d_y, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors on the meta device take a GPU's branches; it has no autocast."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *a, **k: nullcontext() if kind == "meta" else autocast(kind, *a, **k)
    )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and enabled(*kind))
    monkeypatch.setitem(rehearsal.KERNELS, "rms_norm", lambda x, shape, weight, eps=None: fused_norm(x, weight)[0])
    with rehearsal.as_on("cuda"):
        yield


# ---------------------------------------------------------------- passes

#: 134M, as the docs have it.
SHAPE = {"d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048, "vocab_size": 32000, "max_seq_len": 1024}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}


def counted_pass(way):
    """Traffic of one pass of 16 × 1,024 tokens in float32."""
    config = ModelConfig(**SHAPE, **LLAMA)
    with META:
        model = Decoder(config).eval()
    assert sum(p.numel() for p in model.parameters()) == 134_105_856
    traffic = Traffic()
    with evaluation_mode(model), read_weights(KeySummer, by_walk=way == "walk"):
        if way == "plain":
            with traffic:
                model(torch.empty(16, 1024, dtype=torch.int64, device=META), last_only=True)
        else:
            observer = MetricObserver(
                builtin_metrics(Setting(model, 1024), dict(OBSERVED)), FiniteWatch(config.n_layers, META)
            )
            with traffic:
                WholePass(model)(observer, np.zeros((16, 1024), np.int64), 16)
    return traffic


#: Most operators and GB; those of an observed pass by the ways of reading attention weights.
PASSES = {"plain": (197, 27.8), "blocks": (1337, 74.6), "walk": (1035, 44.5)}


@pytest.mark.parametrize("way", PASSES)
def test_a_pass_of_134m_keeps_to_its_budget(way, as_on_a_gpu):
    traffic = counted_pass(way)
    operators, gigabytes = traffic.total
    assert operators <= PASSES[way][0], traffic.operators
    assert gigabytes <= PASSES[way][1], traffic.bytes


# ---------------------------------------------------------------- arms


#: Changes to plain attention; most bytes of it in plain's, forward and backward, and most operators.
ARMS = {
    "plain": ({}, 1, 20),
    "headnorm": ({"attention": AttentionConfig("headnorm")}, 1.1, 23),
    "headnorm as released": ({"attention": AttentionConfig("headnorm_released")}, 1.26, 28),
    "analytic": ({"attention": calibrated("analytic")}, 1.08, 33),
    "exact": ({"attention": calibrated()}, 1.01, 20),
    "exact and ρ": ({"attention": calibrated(correlation="estimated")}, 1.03, 23),
    "exact, two attentions": ({"attention": calibrated(squares="separate")}, 1.81, 78),
    "exact and ρ, two attentions": ({"attention": calibrated(correlation="estimated", squares="separate")}, 1.83, 84),
    "off by one": ({"attention": AttentionConfig(normaliser="softmax_off_by_one")}, 1.04, 22),
    "learned sink": ({"attention": AttentionConfig(normaliser="softmax_sink")}, 1.09, 25),
    "key and value bias": ({"attention": AttentionConfig(kv_bias="key_value")}, 1.11, 31),
    "four learned keys": ({"attention": AttentionConfig(kv_bias="key_value", kv_bias_tokens=4)}, 1.12, 36),
    "differential": ({"attention": AttentionConfig("differential_norm", normaliser="differential")}, 1.7, 55),
    "gate per head": ({"attention": AttentionConfig(gate="head")}, 1.22, 34),
    "gate per channel": ({"attention": AttentionConfig(gate="channel")}, 1.46, 29),
    "gate on values": ({"attention": AttentionConfig(gate="channel", gate_at="value")}, 1.46, 29),
    "norm of values": ({"attention": AttentionConfig(v_norm="head")}, 1.1, 23),
    "norm of queries and keys": ({"attention": AttentionConfig(qk_norm="head")}, 1.2, 26),
    "window": ({"attention": AttentionConfig(window=256)}, 1, 20),
    "prefix": ({"attention": AttentionConfig(prefix=64)}, 1.41, 36),
    "alibi": ({"positions": "alibi"}, 1.18, 40),
    "sigmoid": ({"attention": AttentionConfig(normaliser="sigmoid", sigmoid_bias="log_length")}, 16.2, 440),
}


def counted_arm(changes):
    """One attention's forward and backward pass: 8 × 2,048 tokens, 16 heads of 128, bf16."""
    shape = {"d_model": 2048, "n_layers": 1, "n_heads": 16, "vocab_size": 64, "max_seq_len": 2048}
    config = ModelConfig(**{**shape, **LLAMA, **changes})
    with META:
        module = Attention(config, 0).train().bfloat16()
        for moments in estimated_correlations(module):
            moments.float()  # as in training, whose weights alone are cast
        x = torch.empty(8, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
        place = POSITIONS[config.positions](config).place(2048, META)
    with Traffic() as traffic:
        module(x, place).backward(torch.empty_like(x))
    return traffic


def test_an_arm_moves_few_bytes_more_than_plain_attention(as_on_a_gpu):
    counted = {name: counted_arm(changes) for name, (changes, *_) in ARMS.items()}
    plain = counted["plain"].total[1]
    assert plain <= 3.5
    found = {name: (traffic.total[1] / plain, traffic.total[0]) for name, traffic in counted.items()}
    most = {name: (ratio + 1e-9, operators) for name, (_, ratio, operators) in ARMS.items()}
    assert {name: at for name, at in found.items() if any(x > y for x, y in zip(at, most[name], strict=True))} == {}


# ---------------------------------------------------------------- host data

#: For a GPU's stream each is a wait, or a copy from memory that is not pinned.
WAITS = {"lift_fresh", "_local_scalar_dense", "nonzero"}
KINDS = {
    **attention_arms.ARMS,
    **attention_arms.EXPLICIT_ROWS,
    **attention_arms.GATES,
    **attention_arms.SEVERAL_KEYS,
    "exact, one walk": calibrated(squares="joint"),
    "differential": AttentionConfig("differential_norm", normaliser="differential"),
}


class HostData(Operators):
    """Operators that make tensors of host data or read them; on the meta device also those that mix in the CPU's."""

    def __init__(self, device):
        super().__init__(self._note)
        self.device, self.seen = device, set()

    def _note(self, function, args, result):
        name = function._schema.name.removeprefix("aten::")
        kinds = {x.device.type for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)}
        if name in WAITS or (self.device == "meta" and "cpu" in kinds):
            self.seen.add(name)


def host_data(device, **changes):
    """Operators on host data in a training pass, forward and backward."""
    shape = {"d_model": 16, "n_layers": 1, "n_heads": 4, "vocab_size": 32, "max_seq_len": 40}
    with torch.device(device):
        model = Decoder(ModelConfig(**{**shape, **LLAMA, **changes})).train()
        tokens = torch.zeros(2, 33, dtype=torch.int64)
    with HostData(device) as watch:
        model(tokens[:, :-1], targets_BS=tokens[:, 1:]).objective.backward()
    return watch.seen


def assert_no_host_data(device):
    found = {name: host_data(device, attention=kind) for name, kind in KINDS.items()}
    found |= {name: host_data(device, positions=name) for name in POSITIONS}
    assert {name: seen for name, seen in found.items() if seen} == {}


def test_no_training_pass_of_any_arm_copies_host_data_to_the_device(as_on_a_gpu):
    assert_no_host_data("meta")
    with HostData("meta") as watch:
        _ = torch.from_numpy(np.zeros(2)).to(META), torch.zeros(2, device=META) + torch.ones(())
    assert watch.seen >= {"_to_copy", "add"}


def test_no_training_pass_of_any_arm_makes_a_tensor_of_pythons_numbers():
    """Plain numbers show on a CPU alone."""
    assert_no_host_data("cpu")
    for make in (lambda x: x.new_tensor(2.0), lambda x: x[[1]]):
        with HostData("cpu") as watch:
            make(torch.zeros(3))
        assert watch.seen >= {"lift_fresh"}


# ---------------------------------------------------------------- the counter


@pytest.mark.parametrize(
    ("step", "n", "n_bytes"),
    [
        (lambda x, y: x + y, 1, 3 * 400),
        (lambda x, y: x.add_(y), 1, 3 * 400),
        (lambda x, y: x.copy_(y), 1, 2 * 400),
        (lambda x, y: x * x, 1, 2 * 400),
        (lambda x, y: x.T[3:5].view(2, 10), 0, 0),
        (lambda x, y: torch.empty_like(x), 0, 0),
        (lambda x, y: x.new_zeros(5), 1, 20),
        (lambda x, y: x * y[:1].expand(10, 10), 1, 2 * 400 + 40),
        (lambda x, y: x.bfloat16(), 1, 400 + 200),
        (lambda x, y: torch._foreach_add_([x, y], 1), 1, 4 * 400),
    ],
)
def test_traffic_is_what_is_read_and_written(step, n, n_bytes):
    with Traffic() as traffic:
        step(torch.zeros(10, 10, device=META), torch.zeros(10, 10, device=META))
    assert (traffic.operators.total() - 2, traffic.bytes.total() - 800) == (n, n_bytes)
