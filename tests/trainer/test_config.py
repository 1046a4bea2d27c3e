from pathlib import Path

import pytest

import birthmark
from birthmark.errors import UsageError
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.config_file import read_config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optim.lr", -1.0),
        ("optim.lr", float("nan")),
        ("optim.weight_decay", -0.1),
        ("optim.warmup_steps", -1),
        ("optim.grad_clip", -1.0),
        ("optim.z_loss", -1e-4),
        ("optim.min_lr_ratio", 1.5),
        ("optim.decay_ratio", -0.5),
        ("optim.beta1", 1.0),
        ("optim.beta2", -0.1),
        ("optim.eps", 0.0),
        ("optim.eps", 1e-60),
        ("optim.eps", float("inf")),
        ("optim.eps", float("nan")),
        ("optim.adamw_lr", -1.0),
        ("optim.adamw_weight_decay", float("inf")),
        ("optim.momentum", 1.0),
        ("optim.precondition_every", 0),
        ("trainer.max_steps", 0),
        ("trainer.micro_batch_size", 0),
        ("trainer.global_batch_size", 0),
        ("trainer.log_every", 0),
        ("trainer.checkpoint_every", 0),
        ("trainer.val_sequences", 0),
        ("snapshot.n_sequences", 1),
        ("snapshot.seq_len", 1),
        ("snapshot.seq_len", 13),
        ("snapshot.batch_size", 0),
        ("snapshot.n_strangers", -1),
        ("snapshot.top_k", 0),
        ("snapshot.sink_epsilon", 1.0),
        ("snapshot.probes", ["text"]),
        ("snapshot.steps", [4, 0]),
        ("snapshot.factor", 1.0),
        ("data.val_fraction", 1.0),
    ],
)
def test_an_impossible_value_is_refused_by_name(tiny, field, value):
    with pytest.raises(UsageError, match=field.replace(".", r"\.")):
        tiny({field: value})


def test_all_problems_are_named_at_once():
    from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig

    with pytest.raises(UsageError) as refused:
        RunConfig(optim=OptimConfig(lr=-1, beta1=2), trainer=TrainerConfig(max_steps=0))
    assert all(name in str(refused.value) for name in ("optim.lr", "optim.beta1", "trainer.max_steps"))


@pytest.mark.parametrize(
    ("batch", "asked", "processes", "taken"),
    [
        (16, 16, 1, 16),
        (16, 4, 1, 4),
        (16, 16, 2, 8),
        (16, 16, 4, 4),
        (48, 16, 3, 16),
        (24, 16, 1, 12),
        (6, 4, 2, 3),
        (7, 3, 1, 3),
        (16, 16, 3, 6),
        (60, 4, 8, 4),
    ],
)
def test_processes_take_micro_batches_of_almost_one_size(batch, asked, processes, taken):
    config = TrainerConfig(global_batch_size=batch, micro_batch_size=asked)
    assert config.shared_by(processes).micro_batch_size == taken


CONFIGS = Path(birthmark.__file__).parent / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_run_is_the_same_on_one_process_and_starts_on_more(file):
    trainer = read_config(file).trainer
    assert trainer.shared_by(1) == trainer
    for n in range(1, min(trainer.global_batch_size, 12) + 1):
        assert trainer.shared_by(n).micro_batch_size <= trainer.micro_batch_size
