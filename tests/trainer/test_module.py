from dataclasses import replace

import pytest
import torch

from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig
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
