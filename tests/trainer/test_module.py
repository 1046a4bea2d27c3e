from dataclasses import replace

import pytest
import torch

from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig
from birthmark.trainer.module import PretrainModule, next_token_loss
from birthmark.trainer.throughput import Stopwatch, flops_per_token


@pytest.mark.parametrize("experts", [{}, {"n_experts": 5, "d_ff": 24, "d_shared": 16, "n_dense": 1}])
def test_flops_per_token_count_matrix_products_forward_and_twice_backward(experts):
    """Against FLOPs counted while the products run (attention's full T×T, as the published formula has it)."""
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=50, max_seq_len=16, mlp="swiglu")
    config = replace(config, experts=ExpertsConfig(**experts))
    model = born(config, 0)
    tokens = torch.randint(0, 50, (1, 16))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_total_flops() / 16
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    n_params = sum(p.numel() for p in model.parameters())
    assert flops_per_token(config, n_params, 16) - 6 * vectors == pytest.approx(counted, rel=1e-6)


def test_the_stopwatch_leaves_pauses_out(monkeypatch):
    now = iter([10.0, 10.0, 11.0, 12.0, 12.0, 100.0, 100.0, 101.5, 101.5])
    monkeypatch.setattr("birthmark.trainer.throughput.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    watch.resume()
    watch.lap()
    watch.lap()
    watch.pause()
    watch.resume()
    watch.resume()
    watch.lap()
    watch.pause()
    watch.pause()
    assert watch.take() == 3.5
    assert watch.take() == 0.0
    assert watch.take_laps() == [1.0, 1.0, 1.5]
    assert watch.take_laps() == []


@pytest.mark.parametrize("fields", [{}, {"model.norm": "layernorm", "model.norm_placement": "both"}])
def test_a_residual_stream_in_bf16_rounds_little_more_than_its_products_do(tiny, fields):
    gradients, streams, model = {}, [], tiny(fields).model
    tokens = torch.randint(0, model.vocab_size, (8, model.max_seq_len + 1))
    for name, chosen in {
        "fp32": {"trainer.precision": "fp32"},
        "products": {"trainer.precision": "bf16"},
        "stream": {"trainer.precision": "bf16", "trainer.residual": "bf16"},
    }.items():
        config = tiny(fields | chosen)
        model = born(config.model, 0).train()
        module = PretrainModule(model, config.optim, config.trainer)
        model.blocks[-1].register_forward_hook(lambda block, read, written: streams.append(written.dtype))
        with module.forward_context():
            next_token_loss(model, tokens).objective.backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert model(tokens[:, :-1]).dtype == torch.float32  # a pass without autocast, as a snapshot's
    off = {name: torch.dist(gradient, gradients["fp32"]) for name, gradient in gradients.items()}
    assert streams[::2] == [torch.float32, torch.float32, torch.bfloat16]
    assert 0 < off["stream"] < 1.5 * off["products"] < 0.03 * gradients["fp32"].norm()
    (problem,) = replace(config.trainer, precision="fp32").problems()
    assert problem == "trainer.residual is bf16, but trainer.precision is fp32: set both to bf16, or neither"
