"""What several folders' tests share: a run that trains in a second."""

import os

# Nothing in the tests leaves the machine. The hub's library reads this when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import settings

from birthmark.callbacks.config import LogConfig, SnapshotConfig
from birthmark.data.config import DataConfig
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig

# Busy machines are slow, which is no fault of the code; and what decides whether a change lands decides it twice alike.
settings.register_profile("birthmark", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("birthmark")

_TINY = RunConfig(
    name="tiny",
    init_seed=3,
    model=ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12),
    data=DataConfig(path="backcopy", data_seed=5),
    optim=OptimConfig(lr=0.01, warmup_steps=2, grad_clip=0.5),
    trainer=TrainerConfig(
        max_steps=6,
        micro_batch_size=2,
        global_batch_size=4,
        checkpoint_every=2,
        log_every=1,
        val_sequences=6,
        device="cpu",
    ),
    snapshot=SnapshotConfig(n_sequences=10, seq_len=8, batch_size=4, top_k=5),
    log=LogConfig(wandb="off"),
)


def _set(config, path, value):
    head, _, rest = path.partition(".")
    return replace(config, **{head: _set(getattr(config, head), rest, value) if rest else value})


@pytest.fixture(scope="module", autouse=True)
def one_thread(request):
    """Tiny tensors gain nothing from more threads, and lose tenfold to a busy neighbour on the same cores.

    Whole runs keep their threads: they are compared bit for bit with runs of other processes.
    """
    before = torch.get_num_threads()
    if request.path.parent.name in ("models", "metrics"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny():
    """A tiny run's config; dotted fields can be overridden: ``tiny({"trainer.max_steps": 2})``."""

    def build(overrides=None):
        return reduce(lambda config, item: _set(config, *item), (overrides or {}).items(), _TINY)

    return build
