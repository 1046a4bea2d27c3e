"""Section on the course of training: the losses, beside the loss of a model that knows only the frequencies of
tokens.
"""

from __future__ import annotations

import numpy as np

from ...pictures.curves import Control
from ...pictures.style import FAINT, SOLID
from ...text import finite_or_nan
from ..link import Link
from ..section import Section
from ..training_view import TrainingView


def _over_training(view: TrainingView, section: Section) -> None:
    if not any(run.birth or run.metrics for run in view.runs):
        return  # measured here, trained elsewhere
    for run in view.runs:
        for key in ("train/loss", "val/loss"):
            steps, values = run.series(key)
            bad = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
            if bad:
                section.notes.append(
                    f"{run.name}: {key} is not a number in {len(bad)} lines, first at step {bad[0]:,}."
                )
    losses = view.logged({"train/loss": ("train", FAINT), "val/loss": ("validation", SOLID)})
    entropies = {finite_or_nan((run.birth.get("data") or {}).get("unigram_entropy")) for run in view.runs}
    reach = [0.0, max((max(curve.steps) for curve in losses), default=0.0)]
    levels = [
        Control("unigram entropy", reach, [e, e], quantity="unigram_entropy")
        for e in sorted(entropies)
        if np.isfinite(e)
    ]
    if losses:
        caption = "Training and validation loss."
        view.add_curves(section, "loss", caption, losses, "loss (nats per token)", levels, from_zero=False)
    else:
        section.notes.append("No losses are recorded yet.")
    bits = view.logged({"val/bits_per_byte": ("", SOLID)})
    view.add_curves(section, "bits", "Validation text, per UTF-8 byte.", bits, "bits per byte", from_zero=False)
    trigger = view.logged({"val/loss_trigger": ("", SOLID)})
    view.add_curves(section, "trigger", "Validation loss at trigger positions.", trigger, "nats per trigger")
    z_loss = view.logged({"train/z_loss": ("", SOLID)})
    view.add_curves(section, "z_loss", "What the z-loss adds to what training minimises.", z_loss, "z-loss")
    balance = view.logged({"train/load_balance": ("", SOLID)})
    caption = "Load balance of the routers: 1 where all experts are used alike."
    view.add_curves(section, "load_balance", caption, balance, "load balance", from_zero=False)
    if len(section.pictures) % 2:  # a place in the row is free
        norm = view.logged({"train/grad_norm": ("", SOLID)})
        view.add_curves(section, "norm", "Gradient norm before clipping.", norm, "gradient norm")


LOSS = Link(
    "loss",
    "Loss",
    "Mean cross-entropy on training batches and on held-out windows. The unigram entropy is what a model reaches "
    "that knows nothing but how frequent each token is.",
    _over_training,
    quantities=(
        *("train/loss", "val/loss", "val/bits_per_byte", "val/loss_trigger", "train/z_loss", "train/load_balance"),
        "train/grad_norm",
    ),
    optional=True,
)
