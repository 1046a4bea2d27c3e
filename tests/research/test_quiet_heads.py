"""Heads that are made silent or even where they are idle, against models that are so everywhere."""

from dataclasses import replace

import pytest
import torch

from birthmark.data.backcopy import BackCopy, trigger_mask
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig
from birthmark.research.sinks.quiet_heads import rows_of
from birthmark.trainer.module import next_token_losses

SHAPE = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=24, max_seq_len=12)


@pytest.fixture(scope="module", params=["plain", "calibrated"])
def model(request, enliven):
    return enliven(born(replace(SHAPE, attention=AttentionConfig(aggregation=request.param)), 0)).eval()


@torch.no_grad()
def test_even_attention_replaces_itself(model):
    samples = torch.from_numpy(BackCopy(24, 12, 0, "val").batch(0, 8))
    loud = rows_of(model, samples)[1]
    assert abs(loud.even_idle) > 1e-3
    assert loud.size != pytest.approx(loud.even_size, rel=1e-2)
    # Without queries all scores are 0.
    model.blocks[1].attn.q.weight.zero_()
    row = rows_of(model, samples)[1]
    assert (row.even_idle, row.even_trigger) == pytest.approx((0, 0), abs=1e-6)
    assert row.size == pytest.approx(row.even_size, rel=1e-5)
    assert row.silent_idle != pytest.approx(0, abs=1e-4)
    seen_BT = torch.arange(1, 13).expand(8, -1)[:, 1:]
    assert row.mass == pytest.approx(float((1 / seen_BT[~trigger_mask(samples[:, 1:-1])]).mean()), rel=1e-5)


@torch.no_grad()
def test_silent_heads_are_a_block_whose_attention_writes_nothing(model):
    # Without triggers all queries are idle.
    samples = torch.randint(4, 24, (8, 13), generator=torch.Generator().manual_seed(0))
    found = rows_of(model, samples)[0].silent_idle
    before = next_token_losses(model, samples).mean()
    model.blocks[0].attn.o.weight.zero_()
    assert found == pytest.approx(float(next_token_losses(model, samples).mean() - before), abs=1e-6)
    assert abs(found) > 1e-4
