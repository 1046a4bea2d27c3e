"""Runs on sequences that hold whole documents and padding."""

import numpy as np
import pytest
import torch
from quiet_runs import logged
from rich.console import Console
from torch.nn import functional as F

from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.trainer.config import RunConfig
from birthmark.trainer.run import pretrain


@pytest.fixture(scope="module")
def fields(tmp_path_factory, write_documents):
    folder = tmp_path_factory.mktemp("packed")
    return {
        "data.path": str(write_documents(folder / "text")),
        "data.cache_dir": str(folder / "cache"),
        "data.val_fraction": 0.2,
        "data.packing": "documents",
        "data.bos": "document",
        "model.vocab_size": 280,
        "optim.schedule": "constant",
        "trainer.max_steps": 3,
        "trainer.checkpoint_every": 3,
        "snapshot.enabled": False,
    }


def test_every_token_of_the_global_batch_counts_alike(tiny, fields, tmp_path):
    """Losses and gradients are those of the mean over its tokens, by hand, whatever the micro-batches are."""
    config = tiny(fields | {"trainer.global_batch_size": 6, "optim.grad_clip": 0.0})
    data = prepare(config.data, vocab_size=280, seq_len=config.model.max_seq_len)
    model = born(tiny(fields | {"model.vocab_size": data.vocab_size}).model, config.init_seed)
    batch = torch.from_numpy(data.train.batch(0, 6))
    assert len({int(n) for n in (batch[:, 1:] >= 0).sum(1)}) > 1
    logits = model(batch[:, :-1].clamp_min(0))
    real = batch[:, 1:] >= 0
    loss = F.cross_entropy(logits[real], batch[:, 1:][real])
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()

    for size in (1, 2, 6):
        asked = tiny(fields | {"trainer.global_batch_size": 6, "trainer.micro_batch_size": size})
        done = pretrain(asked, RunDir(tmp_path / str(size)), console=Console(quiet=True)).run
        assert logged(done, "train/loss")[1] == pytest.approx(loss.item(), rel=1e-5)
        assert logged(done, "train/grad_norm")[1] == pytest.approx(norm, rel=1e-5)
    # Validation: the mean over tokens too.
    val = torch.from_numpy(data.val.batch(0, min(data.val.n_samples, asked.trainer.val_sequences)))
    fresh = born(tiny(fields | {"model.vocab_size": data.vocab_size}).model, config.init_seed)
    with torch.no_grad():
        logits = fresh(val[:, :-1].clamp_min(0))
    by_hand = F.cross_entropy(logits[val[:, 1:] >= 0], val[:, 1:][val[:, 1:] >= 0]).item()
    assert logged(done, "val/loss")[0] == pytest.approx(by_hand, rel=1e-5)


def test_a_packed_run_goes_on_where_it_stopped(tiny, fields, tmp_path):
    more = {"trainer.checkpoint_every": 1, "data.packing": "best_fit", "optim.warmup_steps": 0}
    whole = pretrain(tiny(fields | more), RunDir(tmp_path / "whole"), console=Console(quiet=True)).run
    short = tiny(fields | more | {"trainer.max_steps": 1})
    pretrain(short, RunDir(tmp_path / "parts"), console=Console(quiet=True))
    parts = pretrain(tiny(fields | more), RunDir(tmp_path / "parts"), resume=True, console=Console(quiet=True)).run
    assert logged(parts, "train/loss") == logged(whole, "train/loss")
    assert logged(parts, "val/loss") == logged(whole, "val/loss")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"model.attention.prefix": 2}, "model.attention.prefix"),
        (
            {
                "model.attention.aggregation": "calibrated",
                "model.attention.calibration": RunConfig().model.attention.calibration.__class__(
                    correlation="estimated"
                ),
            },
            "model.attention.calibration.correlation estimated",
        ),
    ],
)
def test_what_padding_would_mislead_is_refused(tiny, fields, model, field):
    with pytest.raises(UsageError, match=rf"^data\.packing documents with {field.replace('.', '[.]')}.*give concat"):
        tiny(fields | model)


def test_the_record_says_how_much_is_padding(tiny, fields):
    data = prepare(tiny(fields).data, vocab_size=280, seq_len=tiny().model.max_seq_len)
    every = data.train.batch(0, data.train.n_samples)
    assert data.record["padding"] == pytest.approx(np.mean(every < 0))
