"""Links of the chain that leads to a sink, each judged block by block: a mean over blocks hides local effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, isnan, nan

import numpy as np

from ..measure.records import Snapshot
from ..metrics.quantities import MEASURED
from .attention_sink import ON_PROBE, Sink, SinkReading, chain_group, leading_group
from .formatting import format_value, in_prose
from .massive_channel import Writer, dominance_by_block, massive_pairs, rises
from .quantities_by_block import Profile, in_block
from .run_history import RunHistory
from .thresholds import threshold
from .verdict import (
    Group,
    Tone,
    Verdict,
    array_of,
    enumerated,
    is_measured,
    over_training,
    over_training_beside_level,
    scalar,
)

#: Variance below which position 0 has none: every sequence begins with the same token.
_NO_VARIANCE = 1e-9


def peak_of(snapshot: Snapshot | None, name: str, group: Group = "bias") -> tuple[float, str]:
    """Return the value of a link's quantity in the block where it stands out most, and that block in words.

    Args:
        snapshot: the snapshot.
        name: one of `LINKS_BY_BLOCK`.
        group: the probe.

    Returns:
        The scalar and "" if the snapshot has no blocks.
    """
    found = LINKS_BY_BLOCK[name](snapshot, group)
    if found is None or not found.is_seen.any():
        return scalar(snapshot, name, group), ""
    at = int(np.nanargmin(found.values)) if name == "effective_rank" else found.peak
    return float(found.values[at]), found.name(at)


def _verdict(
    history: RunHistory, key: str, name: str, sentence: str, tone: Tone, section: str = "", group: Group = "bias"
) -> Verdict:
    """Build a verdict on a link, with its peak over training beside its control."""
    steps, _, control = over_training_beside_level(history, name, group)
    if name == "dominance_first":
        control = over_training(history, name, "dominance_median", group)[2]
    values = [peak_of(snapshot, name, group)[0] for snapshot in history.dated]
    return Verdict(key, sentence, tone, steps, values, control, section or key, headline=False)


def _on(snapshot: Snapshot, group: Group) -> str:
    """Name the probe of a sentence, if another one leads for sinks."""
    return "" if leading_group(snapshot) == "bias" else f" {ON_PROBE[group]}"


def _not_a_number(subject: str) -> tuple[str, Tone]:
    return f"{subject}: not a number at the newest snapshot.", "unclear"


# ── aggregation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _judged_variance(snapshot: Snapshot | None, group: Group = "bias") -> Profile | None:
    """Return the variance discrepancy in the blocks before the first sink, including the first block.

    If heads attend to the first position its state is alike in all sequences: the stronger the sink, the smaller the
    variance that led to it.
    """
    found = Profile.of(snapshot, "variance_discrepancy", group)
    if found is None:
        return None
    sinks = Sink.of(snapshot, SinkReading(group, of_documents=False)).blocks
    before = len(found.values) if sinks is None or len(sinks) != len(found.values) else max(int(np.argmax(sinks)), 1)
    return found.within(np.arange(len(found.values)) < before)


def aggregation(history: RunHistory) -> Verdict | None:
    """Judge if values of position 0 vary more than later ones: on random tokens, since a fixed first token has none."""
    name, now = "variance_discrepancy", history.last or history.first
    if now is None or not is_measured(history, name):
        return None
    judged, every = _judged_variance(now), Profile.of(now, name)
    subject = "The variance of the first position"
    if chain_group(now) != "bias":
        subject = "On random tokens, which have no sink, the variance of the first position"
    tone: Tone = "unclear"
    if judged is None or every is None or not judged.is_seen.any():
        value = scalar(now, name)
        times = f"σ²(0) is {in_prose(value, 2)} times σ² of later positions, mean over blocks; 1 is equal variance"
        sentence, tone = _graded(
            value / threshold("variance"),
            subject,
            f"{subject} stands out: {times}.",
            f"{subject} does not stand out: {times}.",
        )
    elif np.nanmax(every.values) <= _NO_VARIANCE:
        sentence = f"{subject} is 0: all sequences begin with the same token, so that it cannot stand out."
    else:
        sentence, tone = _variance_in_words(subject, judged, every)
    return _verdict(history, "aggregation", name, sentence, tone)


def _variance_in_words(subject: str, judged: Profile, every: Profile) -> tuple[str, Tone]:
    out, is_before = judged.at_least(threshold("variance")), judged.is_seen.sum() < every.is_seen.sum()
    after = ""
    if is_before:
        rest = every.values[every.is_seen & ~judged.is_seen]
        low, high = (format_value(float(end), "ratio") for end in (rest.min(), rest.max()))
        start = int(every.blocks[every.is_seen & ~judged.is_seen][0])
        after = f" From block {start} on, with the sink, it is {low if low == high else f'{low} to {high}'}."
    peak = judged.peak
    times = (
        f"σ²(0) is {{}}{in_prose(float(judged.values[peak]), 2)} times σ² of later positions{{}}; 1 is equal variance."
    )
    if not out.any():
        where = ", before the sink forms" if is_before else " in any block"
        return f"{subject} does not stand out{where}: " + times.format(
            "at most ", f" ({judged.name(peak)})"
        ) + after, "absent"
    several = out.sum() > 1
    where = every.where(out) + (", before the sink forms" if is_before else "")
    numbers = times.format(*(("up to ", f" ({judged.name(peak)})") if several else ("", "")))
    return f"{subject} stands out {where}: {numbers}{after}", "present"


# ── hidden units and states ──────────────────────────────────────────────────────────────────────────────────────────


def neurons(history: RunHistory) -> Verdict | None:
    """Name the units that write the massive channel of the first position, and count those that fire there alone."""
    now = history.last or history.first
    group = chain_group(now)
    if now is None or not is_measured(history, "super_neurons", group):
        return None
    count = scalar(now, "super_neurons", group)
    one = "super neuron fires" if count == 1 else "super neurons fire"
    sentence, tone = _graded(
        count,
        "The number of super neurons",
        f"{count:,.0f} {one} at the first position{_on(now, group)}{_most_of_them(now, count, group)}",
        "No hidden unit is a super neuron.",
    )
    if tone == "present":
        sentence = _written(now, sentence, group)
    steps, values, _ = over_training(history, "super_neurons", "super_neurons", group)
    return Verdict("neurons", sentence, tone, steps, values, None, "neurons", headline=False)


def _most_of_them(snapshot: Snapshot, count: float, group: Group) -> str:
    """Name the block with the most super neurons, if there are several."""
    counts = array_of(snapshot, "super_neurons", group)
    if counts is None or counts.ndim != 1 or count < 2 or not np.isfinite(counts).any():
        return ""
    most = int(np.nanargmax(counts))
    return (
        f", {counts[most]:,.0f} of them in block {most + 1}" if counts[most] < count else f", all in block {most + 1}"
    )


def _written(now: Snapshot, counted: str, group: Group) -> str:
    """Write the sentences on writers, which precede the count of super neurons."""
    found = rises(now, group)
    written = [] if found is None else [rise for rise in found[1] if rise.writers]
    if found is None or not written:
        return (
            f"{counted}."
            if found is None
            else f"{counted}; none of those listed writes its channel {found[0].channel}."
        )
    channel, (first, *others) = found[0].channel, written
    main = first.writers[0]
    sentence = (
        f"Unit {main.unit} of block {main.block} writes channel {channel}, in which the first position's state reaches "
        f"{_size(first.value)}: its mean |activation| is {_size(main.first)} there and {_size(main.others)} elsewhere."
    )
    if first.writers[1:]:
        sentence += f" {_units(first.writers[1:])} of that block {'write' if first.writers[2:] else 'writes'} it too."
    for rise in others:
        verb = "write" if rise.writers[1:] else "writes"
        sentence += f" In block {rise.block} {_lower(_units(rise.writers))} {verb} it, up to {_size(rise.value)}."
    return f"{sentence} {counted}."


def _units(writers: tuple[Writer, ...]) -> str:
    return f"Unit{'s' if writers[1:] else ''} {enumerated([str(writer.unit) for writer in writers])}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _size(value: float) -> str:
    """Write an activation or a state, without decimals if large."""
    return in_prose(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 1 else 2 if abs(value) >= 0.1 else 3)


def dominance(history: RunHistory) -> Verdict | None:
    """Judge if one channel dominates the state of position 0, and in which blocks."""
    now = history.last or history.first
    group = chain_group(now)
    if now is None or not is_measured(history, "dominance_first", group):
        return None
    found, on = dominance_by_block(now, group), _on(now, group)
    if found is None:
        first, median = (scalar(now, f"dominance_{place}", group) for place in ("first", "median"))
        numbers = f"max over mean {in_prose(first, 1)}, {in_prose(median, 1)} at the median position"
        times = first / median / threshold("dominance") if median > 0 else nan
        present, absent = (
            f"{what} dominates the first position{on}: {numbers}." for what in ("One channel", "No channel")
        )
    else:
        out = found.at_least(threshold("dominance"))
        at = (found.within(out) if out.any() else found).peak
        first, median = (float(values[at]) for values in (found.values, found.controls))
        numbers = f"{in_prose(first, 1)} in {found.name(at)}, {in_prose(median, 1)} at the median position"
        times = nan if np.isnan(found.ratio).all() else float(out.any())
        most = "up to " if out.sum() > 1 else ""
        present = f"One channel dominates the first position {found.where(out)}{on}: max over mean is {most}{numbers}."
        present += _massive(now, group)
        absent = f"No channel dominates the first position in any block{on}: max over mean is at most {numbers}."
    sentence, tone = _graded(times, "Which channels dominate the first position", present, absent)
    return _verdict(history, "dominance", "dominance_first", sentence, tone, group=group)


def _massive(snapshot: Snapshot, group: Group) -> str:
    """Describe the largest value of the states, and that of the next position with one."""
    pairs = massive_pairs(snapshot, group)
    if not pairs:
        return ""
    largest = pairs[0]
    at = f"The largest value is {_size(largest.value)}, in channel {largest.channel} at position {largest.position}"
    other = next((pair for pair in pairs if pair.position != largest.position), None)
    beside = f"; next is position {other.position} with {_size(other.value)}" if other else ""
    return f" {at} after {in_block(largest.block)}{beside}."


def rank(history: RunHistory) -> Verdict | None:
    """Find the blocks whose states fill the fewest directions, beside the embeddings, and the last block."""
    now = history.last or history.first
    group = chain_group(now)
    if now is None or not is_measured(history, "effective_rank", group):
        return None
    array, on = array_of(now, "effective_rank", group), _on(now, group)
    if array is None or array.ndim != 1 or len(array) < 2 or not np.isfinite(array).all():
        sentence, tone = _not_a_number("The effective rank")
        if isfinite(value := scalar(now, "effective_rank", group)):
            sentence = (
                f"The effective rank after the last block is {in_prose(value, 1)}; of other blocks it is not known."
            )
        return _verdict(history, "rank", "effective_rank", sentence, tone, "dominance", group)
    found = Profile(array.astype(float), np.full(len(array), float(array[0])), first=0)
    low = int(np.argmin(array[1:])) + 1
    lowest = f"after {found.name(low)}, {in_prose(float(array[low]), 1)}"
    start, width = in_prose(float(array[0]), 1), (now.summary.get("model") or {}).get("d_model")
    beside = "" if low == len(array) - 1 else f" and {in_prose(float(array[-1]), 1)} after the last block"
    fallen = found.ratio < threshold("rank")
    if not fallen.any():
        sentence = (
            f"The effective rank falls below half of the embeddings' ({start}) in no block{on}: it is lowest {lowest}."
        )
        return _verdict(history, "rank", "effective_rank", sentence, "absent", "dominance", group)
    sentence = f"States fill few directions {found.where(fallen)}{on}: their effective rank is lowest {lowest}"
    sentence += f"{f' of {width:,}' if width else ''}; it is {start} in the embeddings{beside}."
    return _verdict(history, "rank", "effective_rank", sentence, "present", "dominance", group)


# ── lock and gradient ────────────────────────────────────────────────────────────────────────────────────────────────


def lock(history: RunHistory) -> Verdict | None:
    """Judge if the key of position 0 lies along the queries' direction, and in which blocks."""
    now = history.last or history.first
    group = chain_group(now)
    if now is None or not is_measured(history, "qk_cosine", group):
        return None
    found = Profile.of(now, "qk_cosine", group)
    chance = MEASURED["qk_cosine"].level(now.summary)
    what, on = "locked onto the queries' direction", _on(now, group)
    if found is None or not isfinite(chance):
        value, where, nowhere = scalar(now, "qk_cosine", group), "", ""
        numbers = f"mean |cosine| {in_prose(value)}, chance {in_prose(chance)}"
    else:
        out, value = found.at_least(threshold("lock")), float(found.values[found.peak])
        where, nowhere = f" {found.where(out)}", " in any block"
        of_all = len(found.values) > 1
        most = ("up to " if out.any() else "at most ") if of_all else ""
        numbers = f"|cosine|, mean over heads, {most}{in_prose(value)}"
        numbers += (
            f" ({found.name(found.peak)}), chance {in_prose(chance)}" if of_all else f", chance {in_prose(chance)}"
        )
    sentence, tone = _graded(
        value / chance / threshold("lock") if chance > 0 else nan,
        "Whether the first key is locked",
        f"The first key is {what}{where}{on}: {numbers}.",
        f"The first key is not {what}{nowhere}{on}: {numbers}.",
    )
    return _verdict(history, "lock", "qk_cosine", sentence, tone, group=group)


def _gradient_group(snapshot: Snapshot | None) -> Group:
    """Return the probe of the gradient: text, if measured."""
    return "bias_text" if array_of(snapshot, "gradient_sink", "bias_text") is not None else "bias"


def _gradient_blocks(snapshot: Snapshot | None, group: Group = "bias") -> Profile | None:
    """Return the gradient sink in the blocks, without the embeddings, where it is not a sink."""
    found = Profile.of(snapshot, "gradient_sink", group)
    return None if found is None else found.within(found.blocks > 0)


def gradient(history: RunHistory) -> Verdict | None:
    """Judge if the loss gradient gathers at the first position, in which blocks, and beside its start."""
    now = history.last or history.first
    group = _gradient_group(now)
    every, blocks = Profile.of(now, "gradient_sink", group), _gradient_blocks(now, group)
    if now is None or every is None or blocks is None or not blocks.is_seen.any():
        return None
    before = _gradient_blocks(history.first, group) if history.last is not None else None
    start = 1.0 if before is None else max(1.0, float(np.nanmax(before.values)))
    out = blocks.at_least(threshold("gradient") * start)
    peak, at = float(blocks.values[blocks.peak]), blocks.name(blocks.peak)
    apart = "" if isnan(every.values[0]) else f", {in_prose(float(every.values[0]), 2)} in the embeddings"
    control = "1 is no difference" if before is None else f"at most {in_prose(start, 2)} {history.start.at}"
    numbers = f"times that of the others{apart}; {control}."
    if out.any():
        what = f"The loss gradient gathers at the first position {blocks.where(out)}: up to {in_prose(peak, 2)} ({at})"
        return _verdict(history, "gradient", "gradient_sink", f"{what} {numbers}", "present", group=group)
    what = f"The loss gradient does not gather at the first position in any block: at most {in_prose(peak, 2)} ({at})"
    return _verdict(history, "gradient", "gradient_sink", f"{what} {numbers}", "absent", group=group)


LINKS_BY_BLOCK: Mapping[str, Callable[[Snapshot | None, Group], Profile | None]] = {
    "variance_discrepancy": _judged_variance,
    "dominance_first": dominance_by_block,
    "qk_cosine": lambda snapshot, group: Profile.of(snapshot, "qk_cosine", group),
    "gradient_sink": _gradient_blocks,
    "effective_rank": lambda snapshot, group: Profile.of(snapshot, "effective_rank", group),
}
"""Functions that take a quantity, by its name, from a snapshot, in the blocks where it is judged."""


def peaks_by_block(snapshot: Snapshot, group: Group = "bias") -> dict[str, tuple[float, int]]:
    """Return, for each link of `LINKS_BY_BLOCK` that a snapshot has, its value in the block where it stands out most,
    and the number of that block: the scalar alone, such as a mean over blocks, hides it.
    """
    found = {}
    for name, read in LINKS_BY_BLOCK.items():
        profile = read(snapshot, group) if isfinite(scalar(snapshot, name, group)) else None
        if profile is not None and profile.is_seen.any():
            at = int(np.nanargmin(profile.values)) if name == "effective_rank" else profile.peak
            found[name] = float(profile.values[at]), int(profile.blocks[at])
    return found


def _graded(over_threshold: float, subject: str, present: str, absent: str) -> tuple[str, Tone]:
    """Return the sentence and tone of a value, given as a multiple of its threshold."""
    if isnan(over_threshold):
        return _not_a_number(subject)
    return (present, "present") if over_threshold >= 1 else (absent, "absent")
