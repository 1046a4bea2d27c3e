"""Short trainings in memory, of all parameters that are not frozen, towards any objective."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import RunError
from ...models.decoder import Decoder
from ...trainer.module import next_token_loss

#: Share of the steps over which the learning rate rises.
_WARMUP = 0.1
_CLIP = 1.0

#: Function from a model and a batch ``[B, T+1]`` to the objective.
Objective = Callable[[Decoder, Tensor], Tensor]


def train(
    model: Decoder, batch: Callable[[int], Tensor], steps: int, lr: float, objective: Objective | None = None
) -> Decoder:
    """Train a model in place: AdamW (β .9 and .95, no decay), clipped gradients, a constant rate after a warm-up.

    Args:
        model: its parameters with gradients are trained.
        batch: function from a step, from 0, to its token ids ``[B, T+1]``.
        steps: number of steps.
        lr: learning rate.
        objective: loss to minimise; by default that of every next token.

    Raises:
        RunError: the objective is not finite.
    """
    objective = objective or (lambda model, batch_BT: next_token_loss(model, batch_BT).objective)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / (_WARMUP * steps))
        optimizer.zero_grad()
        loss = objective(model, batch(step))
        if not bool(torch.isfinite(loss)):
            raise RunError(f"the training has a loss of {loss.item()} at step {step}: give a smaller lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
    return model.eval()


def towards(teacher: Decoder) -> Objective:
    """Return the objective of the mean KL divergence, in nats, of a model's next-token distributions from the teacher's
    (arXiv 1503.02531).
    """
    teacher.eval().requires_grad_(False)

    def objective(model: Decoder, batch_BT: Tensor) -> Tensor:
        tokens_BT = batch_BT[:, :-1].clamp_min(0)
        wanted_BTV, found_BTV = (one(tokens_BT).float().log_softmax(-1) for one in (teacher, model))
        counts_BT = batch_BT[:, 1:] >= 0
        kl_BT = F.kl_div(found_BTV, wanted_BTV, reduction="none", log_target=True).sum(-1)
        return (kl_BT * counts_BT).sum() / counts_BT.sum()

    return objective
