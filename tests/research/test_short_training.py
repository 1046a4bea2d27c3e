"""Short trainings: the steps that AdamW takes under a constant gradient, and the divergence as scipy has it."""

import pytest
import torch
from scipy import special, stats
from torch import nn

from birthmark.errors import RunError
from birthmark.research.robustness.treatments import towards, train


class One(nn.Module):
    """One number, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.moving, self.frozen = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()), requires_grad=False)


class Says(nn.Module):
    """Gives logits ``[B, T, V]``, whatever it reads."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens_BT):
        return self.logits


@pytest.mark.parametrize(("steps", "moved"), [(1, 1), (10, 10), (20, 0.5 + 19)])
def test_the_rate_rises_over_a_tenth_of_the_steps_and_stays(steps, moved):
    """AdamW moves by the rate where a gradient stays the same."""
    seen = []
    model = train(One(), seen.append, steps, 0.01, lambda model, batch: model.moving + model.frozen)
    assert model.moving.item() == pytest.approx(1 - 0.01 * moved, abs=1e-5)
    assert model.frozen.item() == 1
    assert seen == list(range(steps))
    assert not model.training


def test_a_loss_that_is_no_number_ends_it_in_a_line():
    with pytest.raises(RunError, match="the training has a loss of nan at step 0: give a smaller lr"):
        train(One(), lambda step: None, 3, 0.01, lambda model, batch: model.moving * float("nan"))


def test_a_student_is_drawn_to_all_that_its_teacher_says_where_a_token_counts():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (2 * torch.randn(2, 3, 7, generator=generator) for _ in "ab")
    batch_BT = torch.tensor([[1, 2, 3, 4], [1, 2, -1, -1]])
    found = towards(Says(teacher))(Says(student), batch_BT)
    p, q = (special.softmax(x.double().numpy(), axis=-1) for x in (teacher, student))
    counted = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert found.item() == pytest.approx(sum(stats.entropy(p[at], q[at]) for at in counted) / 4, rel=1e-5)
