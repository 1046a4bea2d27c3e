import pytest

from birthmark.errors import UsageError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optim.lr", -1.0),
        ("optim.lr", float("nan")),
        ("optim.weight_decay", -0.1),
        ("optim.warmup_steps", -1),
        ("optim.grad_clip", -1.0),
        ("optim.min_lr_ratio", 1.5),
        ("optim.decay_ratio", -0.5),
        ("optim.beta1", 1.0),
        ("optim.beta2", -0.1),
        ("optim.eps", 0.0),
        ("trainer.max_steps", 0),
        ("trainer.micro_batch_size", 0),
        ("trainer.global_batch_size", 5),
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
        ("data.val_fraction", 1.0),
    ],
)
def test_an_impossible_value_is_refused_by_name(tiny, field, value):
    with pytest.raises(UsageError, match=field.replace(".", r"\.")):
        tiny({field: value})


def test_all_problems_are_named_at_once(tiny):
    from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig

    with pytest.raises(UsageError) as refused:
        RunConfig(optim=OptimConfig(lr=-1, beta1=2), trainer=TrainerConfig(max_steps=0))
    assert all(name in str(refused.value) for name in ("optim.lr", "optim.beta1", "trainer.max_steps"))
