"""Runs on sequences that hold whole documents and padding."""

import numpy as np
import pytest
import torch
from oracles import routing_cost
from quiet_runs import logged, run, up_to
from torch.nn import functional as F

from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.models.birth import born


@pytest.fixture(scope="module")
def fields(tmp_path_factory, write_documents):
    folder = tmp_path_factory.mktemp("packed")
    text = {"data.path": str(write_documents(folder / "text")), "data.cache_dir": str(folder / "cache")}
    text |= {"data.val_fraction": 0.2, "data.packing": "documents", "data.bos": "document", "model.vocab_size": 280}
    steps = {"optim.schedule": "constant", "trainer.max_steps": 3, "trainer.checkpoint_every": 3}
    return text | steps | {"snapshot.enabled": False}


#: A coefficient so large that the loss of later steps shows how the load is balanced.
EXPERTS = {"model.experts.n_experts": 5, "model.experts.d_ff": 8, "model.experts.load_balance": 2.0}
EXPERTS |= {"model.experts.router_z_loss": 0.3}


@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_every_token_of_the_global_batch_counts_alike(tiny, fields, more, tmp_path):
    """Losses and gradients are those of the mean over its tokens, by hand, whatever the micro-batches are."""
    fields = fields | more
    config = tiny(fields | {"trainer.global_batch_size": 6, "optim.grad_clip": 0.0})
    data = prepare(config.data, vocab_size=280, seq_len=config.model.max_seq_len)
    model = born(tiny(fields | {"model.vocab_size": data.vocab_size}).model, config.init_seed)
    batch = torch.from_numpy(data.train.batch(0, 6))
    assert len({int(n) for n in (batch[:, 1:] >= 0).sum(1)}) > 1
    logits = model(batch[:, :-1].clamp_min(0))
    real = batch[:, 1:] >= 0
    loss = F.cross_entropy(logits[real], batch[:, 1:][real])
    balance, cost, _ = routing_cost(model, batch[:, :-1].clamp_min(0), real) if more else (None, 0, None)
    (loss + cost).backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()

    by_size = []
    for size in (1, 2, 6):
        asked = tiny(fields | {"trainer.global_batch_size": 6, "trainer.micro_batch_size": size})
        done = run(asked, tmp_path / str(size))
        assert logged(done, "train/loss")[1] == pytest.approx(loss.item(), rel=1e-5)
        assert logged(done, "train/grad_norm")[1] == pytest.approx(norm, rel=1e-5)
        if balance is not None:
            assert logged(done, "train/load_balance")[1] == pytest.approx(balance.item(), rel=1e-6)
        by_size.append(np.array([logged(done, "train/loss")[step] for step in (1, 2, 3)]))
    for losses in by_size[1:]:
        np.testing.assert_allclose(losses, by_size[0], rtol=1e-6)
    # Validation: the mean over tokens too.
    val = torch.from_numpy(data.val.batch(0, min(data.val.n_samples, asked.trainer.val_sequences)))
    fresh = born(tiny(fields | {"model.vocab_size": data.vocab_size}).model, config.init_seed)
    with torch.no_grad():
        logits = fresh(val[:, :-1].clamp_min(0))
    by_hand = F.cross_entropy(logits[val[:, 1:] >= 0], val[:, 1:][val[:, 1:] >= 0]).item()
    assert logged(done, "val/loss")[0] == pytest.approx(by_hand, rel=1e-5)


def test_a_packed_run_goes_on_where_it_stopped(tiny, fields, tmp_path):
    more = {"trainer.checkpoint_every": 1, "data.packing": "best_fit", "optim.warmup_steps": 0}
    whole = run(tiny(fields | more), tmp_path / "whole")
    parts = run(tiny(fields | more), up_to(1, whole, tmp_path / "parts").path, resume=True)
    assert logged(parts, "train/loss") == logged(whole, "train/loss")
    assert logged(parts, "val/loss") == logged(whole, "val/loss")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"model.attention.prefix": 2}, "model.attention.prefix"),
        (
            {"model.attention.aggregation": "calibrated", "model.attention.calibration.correlation": "estimated"},
            "model.attention.calibration.correlation estimated",
        ),
    ],
)
def test_what_padding_would_mislead_is_refused(tiny, fields, model, field):
    with pytest.raises(UsageError, match=rf"^data\.packing documents with {field.replace('.', '[.]')}.*give concat"):
        tiny(fields | model)
