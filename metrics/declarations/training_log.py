"""Quantities of the training log, evaluations among them, beside the scalars of snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..quantity import Column, Quantity, unlisted

_evaluated = partial(unlisted, section="evaluation", format=".3f")

EVALUATION = (
    _evaluated(
        "eval/TEXT/bits_per_byte",
        label="bits per byte of a text",
        definition="Summed −log₂ p of the tokens of a text over its UTF-8 bytes.",
        unit="bits per UTF-8 byte",
        when="`eval.texts` has TEXT",
    ),
    _evaluated(
        "eval/TASK/SCORE",
        label="score of a task",
        definition="A score of lm-eval, by its name there; of a filter of its own, `SCORE/FILTER`. `SCORE_stderr` is "
        "the standard error of one that is a mean over documents.",
        when="`eval.tasks` has TASK",
    ),
    _evaluated(
        "eval/TASK/chance",
        label="chance",
        definition="Accuracy of guessing: the mean of 1 / choices over the documents.",
        format="percent",
        when="`eval.tasks` has TASK, of multiple choice",
    ),
    _evaluated(
        "eval/backcopy/copy_accuracy",
        label="copy accuracy",
        definition="Share of triggers after which the copy is the likeliest token.",
        format="percent",
        when="`eval.tasks` has `backcopy`",
    ),
    _evaluated(
        "eval/backcopy/excess_loss",
        label="excess loss",
        definition="Loss above that of a perfect model on the same samples.",
        unit="nats per token",
        when="`eval.tasks` has `backcopy`",
    ),
)
"""Quantities of ``eval/…``."""


# ---------------------------------------------------------------- the training log
# Quantities of the training log beside the scalars of snapshots.

_loss = partial(unlisted, unit="nats per token", section="loss")
LOGGED: Mapping[str, Quantity] = {
    q.name: q
    for q in (
        _loss(
            "train/loss",
            label="train loss",
            definition="Loss of the global batch.",
            over_training=Column(place=-2),
        ),
        unlisted(
            "train/z_loss",
            label="z-loss",
            definition="Coefficient times the mean squared log-sum-exp of the logits, which training minimises too.",
            unit="nats² per token",
            section="loss",
            when="`optim.z_loss` is set",
        ),
        unlisted(
            "train/load_balance",
            label="load balance",
            definition="Load-balance loss of the routers without its coefficient, mean over blocks: 1 where all are "
            "used alike.",
            unit="1",
            section="loss",
            when="`model.experts.n_experts` is set",
        ),
        unlisted(
            "train/router_z",
            label="router z-loss",
            definition="Mean squared log-sum-exp of the routers' logits, without its coefficient.",
            unit="nats²",
            section="loss",
            when="`model.experts.n_experts` is set",
        ),
        _loss(
            "val/loss",
            label="val loss",
            definition="Mean loss over the validation windows.",
            over_training=Column(place=-3),
        ),
        _loss(
            "val/bits_per_byte",
            label="bits per byte",
            definition="Loss on validation text.",
            unit="bits per UTF-8 byte",
            when="the corpus is text",
        ),
        _loss(
            "val/loss_trigger",
            label="trigger loss",
            definition="Loss at trigger positions.",
            unit="nats per trigger position",
            when="the data is `backcopy`",
            over_training=Column(place=-1, gives_way=2),
        ),
        unlisted("train/lr", label="learning rate", definition="Learning rate of this step.", format=".3g"),
        unlisted("train/grad_norm", label="gradient norm", definition="Gradient norm before clipping.", section="loss"),
        unlisted(
            "train/skipped_steps",
            label="skipped steps",
            definition="Steps so far that moved nothing, because their loss or gradient was not finite.",
            format=",d",
        ),
        unlisted(
            "train/loss_spikes",
            label="loss spikes",
            definition="Steps so far whose loss is above all of the 128 steps before, and more than 6 robust standard "
            "deviations above their median.",
            format=",d",
        ),
        unlisted(
            "train/grad_norm_spikes",
            label="gradient spikes",
            definition="The same of the gradient norm.",
            format=",d",
        ),
        unlisted("train/tokens", label="tokens", definition="Tokens seen.", format=",d"),
        unlisted(
            "train/tokens_per_s",
            label="tokens per second",
            definition="Rate since the last line, without snapshots, validation and checkpoints.",
            unit="1/s",
            format=",.0f",
        ),
        unlisted(
            "train/flops_per_s",
            label="FLOPs per second",
            definition="The same rate in floating-point operations.",
            unit="1/s",
            format=".3g",
        ),
        unlisted(
            "train/mfu",
            label="model FLOPs utilisation",
            definition="Share of the device's peak.",
            format="percent",
            when="the peak of the device is known",
        ),
        unlisted(
            "train/step_p50_s",
            label="step time, median",
            definition="Median time of a step since the last line, on rank 0.",
            unit="s",
            format=".3g",
            section="speed",
        ),
        unlisted(
            "train/step_p99_s",
            label="step time, 99 %",
            definition="Time that 99 % of the steps since the last line took at most, on rank 0.",
            unit="s",
            format=".3g",
            section="speed",
        ),
        unlisted(
            "train/slowest_rank",
            label="slowest rank",
            definition="The rank whose median step time is the longest.",
            format=",d",
            when="there are several processes",
        ),
        unlisted(
            "train/slowest_rank_p50_s",
            label="step time of the slowest rank",
            definition="Its median step time.",
            unit="s",
            format=".3g",
            when="there are several processes",
            section="speed",
        ),
        unlisted(
            "train/data_wait",
            label="data wait",
            definition="Share of the time since the last line in which steps waited for their batches, on the rank "
            "that waited longest.",
            format="percent",
            section="speed",
        ),
        unlisted(
            "train/peak_memory",
            label="peak memory",
            definition="The most memory on any rank: allocated on a GPU since the last line; on CPU resident in a "
            "process so far.",
            unit="GB",
            format=".3g",
        ),
        *(
            unlisted(
                f"train/{part}_s",
                label=f"seconds of {what}",
                definition=f"For how long training stood still for {what} at this milestone.",
                unit="s",
                format=".3g",
                when=when,
            )
            for part, what, when in (
                ("validation", "the validation", ""),
                ("snapshot", "the bias snapshot", "snapshots are on"),
                ("fingerprint", "the lineage test", "the lineage test is on"),
                ("evaluation", "the evaluation", "it is evaluated there"),
                ("average", "the measurement of the averaged weights", "`optim.ema` is set"),
                ("checkpoint", "the checkpoint", ""),
            )
        ),
        unlisted(
            "seedprint/z",
            label="z",
            definition="z of the lineage test against the run's own birth (definitions §10).",
            format=".1f",
            section="lineage",
            control="seedprint/z_stranger",
            control_label="stranger",
            when="the lineage test is on",
            over_training=Column("lineage\nz", place=0, gives_way=0),
        ),
        unlisted(
            "seedprint/log10_p",
            label="log₁₀ p",
            definition="Its p as a power of ten (definitions §10).",
            format=".1f",
            section="lineage",
            control=-2.0,
            control_label="p = 0.01",
            when="the lineage test is on",
            over_training=Column(place=0, page_only=True),
        ),
        unlisted(
            "seedprint/z_stranger",
            label="z of strangers",
            definition="The largest z against a stranger's birth (definitions §10).",
            section="lineage",
            when="the lineage test is on, and births of other seeds are measured",
        ),
        unlisted(
            "seedprint/weights",
            label="cosine of weights",
            definition="Mean over matrices of the cosine with the run's own birth, of 4,096 centred values of each: 1 "
            "at birth, 0 for another seed (definitions §10).",
            format=".3f",
            section="lineage",
            control="seedprint/weights_stranger",
            control_label="stranger",
            when="the lineage test is on",
        ),
        unlisted(
            "seedprint/weights_stranger",
            label="cosine of strangers' weights",
            definition="The same with a stranger's birth, of the stranger it is largest for in size (definitions §10).",
            format=".3f",
            section="lineage",
            when="the lineage test is on, and births of other seeds are measured",
        ),
        *EVALUATION,
        unlisted(
            "ema/NAME",
            label="of the averaged weights",
            definition="The quantity NAME, `val/…`, `bias/…`, `bias_text/…` or `eval/…`, of the averaged weights.",
            when="`optim.ema` is set",
        ),
    )
}
"""Quantities of ``metrics.jsonl`` beside the scalars of snapshots, by their names there."""
