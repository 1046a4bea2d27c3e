"""Findings of checkpoints that hold tensors of another: a block, a shard, an embedding, unchanged or rounded."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from ..findings.formatting import in_few_words
from ..metrics.weight_kinship import mean_distances, squared_distances
from .checkpoint import Same
from .training_order import Place, chains, steps_of_chains

#: Sampled values that a tensor needs; and of those that must differ where a tensor is said to change.
FEWEST_VALUES, FEWEST_CHANGED = 64, 16
#: Share of the values that change from one checkpoint to the next, where a type is fine enough to see training.
CHANGING = 0.5
#: Share of the values that must differ between two that have a tensor in common.
DIFFERENT = 0.1
#: The next best owner's distances must misfit so many times as much as those of the best.
CLEARER = 2.0
#: The way through a tensor's checkpoints must become so short by an exchange of two; without one it grows by a fifth
#: at least (research/log.md).
EXCHANGED = 0.8
#: The ways of the tensors of an exchange and of the others change by factors whose product is 1, up to this one.
SYMMETRY = 1.5
#: A way over a tensor's checkpoint must be so many times the way past it; in training it is twice at most.
DETOUR = 2.5
_ROUNDED: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BLOCK = re.compile(r"(?:.*?\.)?(\d+)\.")


@dataclass(frozen=True)
class Common:
    """Tensors that some checkpoints share."""

    names: tuple[str, ...]
    members: tuple[int, ...]
    rounded: str = ""
    """Type to which all but the last member have rounded them; the last is then their owner."""


class Tensors:
    """The sampled tensors of some checkpoints of one shape, and the squared distances by tensor."""

    def __init__(self, members: Sequence[Same]) -> None:
        self.members = members
        held = [{**same.values, **same.vectors} for same in members]
        # A tensor that some hold as whole numbers has values in the others alone.
        self.names = sorted(set.intersection(*map(set, held))) if held else []
        self.values = [{name: values[name] for name in self.names} for values in held]
        self.squares_TMM = squared_distances(self.values)
        self.matrices = np.array([name in members[0].values for name in self.names], dtype=bool)
        self.digests = [same.digests for same in members]
        self.small = {name for name in self.names if any(_says_little(held[name]) for held in self.values)}
        """Tensors that two checkpoints may have in common by chance."""

    def distance(self, names: Iterable[str]) -> np.ndarray:
        """Compute the distance between every two checkpoints ``[M, M]``, over some tensors."""
        chosen = set(names)
        return mean_distances(self.squares_TMM[[name in chosen for name in self.names]])

    def unshared_squares(self) -> np.ndarray:
        """Return squared distances by tensor ``[T, M, M]``; NaN for a tensor that one of the two has from another."""
        squares_TMM = self.squares_TMM.copy()
        for i, same in enumerate(self.members):
            mixed = [place for place, name in enumerate(self.names) if name in same.mixed]
            squares_TMM[mixed, i, :] = squares_TMM[mixed, :, i] = np.nan
        return squares_TMM

    def without_mixed(self) -> np.ndarray:
        """Compute the distance between every two checkpoints ``[M, M]``, over the matrices that neither has from
        another.
        """
        return mean_distances(self.unshared_squares()[self.matrices])

    def is_constant(self, name: str) -> bool:
        """Return True if all checkpoints hold a tensor to the bit."""
        return len({digests[name] for digests in self.digests}) == 1

    def is_all(self, names: Iterable[str]) -> bool:
        """Return True if some tensors are all that change in the suite."""
        chosen = set(names)
        return all(name in chosen or self.is_constant(name) for name in self.names)

    def changed(self, name: str, i: int, j: int) -> float:
        """Return the share of a tensor's sampled values that differ between two checkpoints."""
        return float((self.values[i][name] != self.values[j][name]).mean())


def _says_little(values: np.ndarray) -> bool:
    return values.size < FEWEST_VALUES or np.ptp(values) == 0


def say_mixed(members: Sequence[Same]) -> tuple[Tensors, list[str]]:
    """Report tensors of checkpoints that belong to another one, and exclude them from further judgement (`Same.mixed`);
    return a line for each set that is frozen, or copied throughout.

    Args:
        members: checkpoints of one shape.
    """
    tensors, notes = Tensors(members), []
    found = [*_in_common(tensors), *_rounded(tensors)]
    copied = []
    for common in found:
        verdict = "copied" if common.rounded else _verdict(common, tensors)
        if verdict == "copied":
            copied.append(common)
        elif verdict == "frozen":
            own = in_few_words([members[i].label for i in common.members])
            notes.append(f"{_described(common.names, tensors)} of {own}: frozen, or copied")
    for common in copied:
        owner = common.members[-1] if common.rounded else _owner(common, tensors, copied)
        for i in common.members:
            if i != owner:
                _say(i, owner, common, tensors)
    # Reported tensors are excluded from the next comparison.
    while _say_exchanged(tensors) or _say_strange(tensors):
        pass
    return tensors, notes


def _in_common(tensors: Tensors) -> list[Common]:
    """Find tensors that some checkpoints, but not all, share to the bit."""
    by_members: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in tensors.names:
        alike: dict[str, list[int]] = defaultdict(list)
        for i, digests in enumerate(tensors.digests):
            alike[digests[name]].append(i)
        for own in alike.values():
            if 1 < len(own) < len(tensors.members) and name not in tensors.small:
                by_members[tuple(own)].append(name)
    return [
        Common((*names, *(name for name in tensors.small if len({tensors.digests[i][name] for i in own}) == 1)), own)
        for own, names in by_members.items()
    ]


def _rounded(tensors: Tensors) -> list[Common]:
    """Find tensors that one checkpoint shares with another, rounded to a shorter type."""
    by_pair: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for rounded, dtype in _ROUNDED.items():
        for name in tensors.names:
            held = [values[name] for values in tensors.values]
            # The first values tell of nearly all tensors that none, or each, is of the shorter type.
            short = [np.array_equal(x[:1], _as(x[:1], dtype)) for x in held]
            if all(short) or not any(short) or name in tensors.small:
                continue
            exact = {j: _as(x, dtype) for j, x in enumerate(held) if not short[j]}
            for i in (i for i, is_short in enumerate(short) if is_short):
                alike = {j: float((x == held[i]).mean()) for j, x in exact.items()}
                owner = max(alike, key=lambda j: alike[j])
                others = [j for j in exact if not np.array_equal(held[j], held[owner])]
                if alike[owner] == 1 and all(alike[j] < CHANGING for j in others):
                    by_pair[i, owner, rounded].append(name)
    found = []
    for (i, owner, rounded), names in by_pair.items():
        own, other = tensors.values[i], tensors.values[owner]
        small = [name for name in tensors.small if np.array_equal(own[name], _as(other[name], _ROUNDED[rounded]))]
        found.append(Common((*names, *small), (i, owner), rounded))
    return found


def _as(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    rounded: np.ndarray = torch.from_numpy(values).to(dtype).float().numpy()
    return rounded


def _verdict(common: Common, tensors: Tensors) -> str:
    """Return ``copied``, ``frozen``, or "" for tensors whose type is too coarse to show their changes."""
    members = tensors.members
    ranks = {place: rank for rank, place in enumerate(sorted({claim for same in members for claim in same.claims}))}
    of = {i: sorted(ranks[claim] for claim in same.claims) for i, same in enumerate(members)}
    labelled = [i for i in common.members if of[i]]
    if len(labelled) < 2:
        return "copied" if labelled else ""
    # Copies claim several places: the one nearest to the others.
    first = min((of[i][0] for i in labelled if len(of[i]) == 1), default=of[labelled[0]][-1])
    chosen = [min(of[i], key=lambda rank: abs(rank - first)) for i in labelled]
    low, high = min(chosen), max(chosen)
    outside = {rank: i for i, own in of.items() if i not in common.members for rank in own}
    name = max(common.names, key=lambda name: tensors.values[0][name].size)
    size, begin = tensors.values[0][name].size, labelled[0]
    if between := [i for rank, i in outside.items() if low < rank < high]:
        changed = max(tensors.changed(name, begin, i) for i in between)
        return "copied" if changed >= DIFFERENT and changed * size >= FEWEST_CHANGED else ""
    before, behind = [r for r in outside if r < low], [r for r in outside if r > high]
    if len(labelled) > 2 and not (before and behind):
        return "frozen"
    around = [outside[rank] for rank in (max(before, default=None), min(behind, default=None)) if rank is not None]
    rest = [other for other in tensors.names if other not in common.names and not tensors.is_constant(other)]
    rest = [other for other in rest if other not in tensors.small] or rest
    others_move = np.median([tensors.changed(other, labelled[0], labelled[1]) for other in rest] or [0]) >= CHANGING
    moves = bool(around) and all(tensors.changed(name, begin, i) >= CHANGING for i in around)
    return "copied" if moves and others_move else ""


def _owner(common: Common, tensors: Tensors, copied: Sequence[Common]) -> int | None:
    """Return the checkpoint that owns the tensors: its distance to the others in these tensors matches that in the
    rest.
    """
    others = [k for k in range(len(tensors.members)) if k not in common.members]
    mixed = {name for one in copied for name in one.names}
    rest = [name for name in tensors.names if name not in mixed] or [
        name for name in tensors.names if name not in common.names
    ]
    if len(others) < 2 or not rest:
        return None
    with np.errstate(divide="ignore"):
        these_MM, rest_MM = np.log(tensors.distance(common.names)), np.log(tensors.distance(rest))
    a, b = (np.array(others)[side] for side in np.triu_indices(len(others), 1))
    known = np.isfinite(these_MM[a, b]) & np.isfinite(rest_MM[a, b])
    x, y = rest_MM[a, b][known], these_MM[a, b][known]
    slope = float(np.clip(np.polyfit(x, y, 1)[0], 0.3, 3.0)) if len(x) > 2 and np.ptp(x) > 0 else 1.0
    offset = float((y - slope * x).mean()) if len(x) else 0.0
    misfits = {}
    for i in common.members:
        far = these_MM[i, others] - slope * rest_MM[i, others] - offset
        misfits[i] = float(np.sqrt(np.square(far[np.isfinite(far)]).mean())) if np.isfinite(far).any() else np.inf
    best, second = sorted(misfits, key=lambda i: misfits[i])[:2]
    return best if misfits[second] >= CLEARER * misfits[best] else None


def _say(i: int, owner: int | None, common: Common, tensors: Tensors) -> None:
    same, what = tensors.members[i], _described(common.names, tensors)
    same.mixed |= set(common.names)
    rounded = f", rounded to {common.rounded}" if common.rounded else ""
    if owner is None:
        others = in_few_words([tensors.members[k].label for k in common.members if k != i])
        said = f"has {what} in common with {others}, and nothing tells whose it is"
    else:
        said = f"has {what} of {tensors.members[owner].label}{rounded}"
    is_whole = tensors.is_all(common.names)
    same.is_copy = tensors.is_all(same.mixed)
    # A checkpoint without a step may have been made from the one that it shares tensors with.
    n_placed = sum(bool(tensors.members[k].claims) for k in common.members)
    is_wrong = n_placed > 1 if owner is None else bool(tensors.members[owner].claims) or not is_whole
    for one in same.members:
        if is_wrong and one.member.place is not None:
            one.found("duplicate" if is_whole else "mixed", said)
        else:
            one.notes.append(said)


def _say_exchanged(tensors: Tensors) -> bool:
    """Report two checkpoints that have exchanged tensors, if there are any."""
    places = _settled(tensors)
    steps = steps_of_chains(chains(places, tensors.without_mixed()))
    length_TMM = np.sqrt(tensors.unshared_squares())
    most, best = 0.0, None
    for i, j in combinations(places, 2):
        touched = [tuple(step) for step in steps if len(step & {i, j}) == 1]
        moved = [tuple(j if k == i else i if k == j else k for k in step) for step in touched]
        now_T, then_T = (sum((length_TMM[:, a, b] for a, b in part), np.zeros(1)) for part in (touched, moved))
        chosen_T = then_T < EXCHANGED * now_T
        if _are_some(chosen_T, tensors):
            # A change that shortens the path of the chosen tensors must lengthen that of the others as much.
            these, rest = (np.nanmedian((then_T / now_T)[part]) for part in _parts(chosen_T, tensors))
            saved, is_even = float((now_T - then_T)[chosen_T].sum()), 1 / SYMMETRY < these * rest < SYMMETRY
            if saved > most and is_even and {*_unlike_the_rest(chosen_T, length_TMM, places)[:2]} == {i, j}:
                most, best = saved, (i, j, _with_vectors(chosen_T, tensors))
    if best is None:
        return False
    i, j, names = best
    for own, other in ((i, j), (j, i)):
        what = f"has {_described(names, tensors)} exchanged with {tensors.members[other].label}"
        _say_of_part(tensors.members[own], names, what)
    return True


def _say_strange(tensors: Tensors) -> bool:
    """Report a checkpoint some of whose tensors lie off the curve that its other tensors follow, if there is one."""
    places, length_TMM = _settled(tensors), np.sqrt(tensors.unshared_squares())
    for chain in chains(places, tensors.without_mixed()):
        for before, i, behind in zip(chain.path, chain.path[1:], chain.path[2:], strict=False):
            over_T, past_T = length_TMM[:, before, i] + length_TMM[:, i, behind], length_TMM[:, before, behind]
            chosen_T = over_T > DETOUR * past_T
            if _are_some(chosen_T, tensors) and _unlike_the_rest(chosen_T, length_TMM, places)[0] == i:
                names = _with_vectors(chosen_T, tensors)
                ratio = float(np.median((over_T / past_T)[_parts(chosen_T, tensors)[0]]))
                what = f"has {_described(names, tensors)} off the curve of the rest, and of no checkpoint of the suite"
                near = f"from {tensors.members[before].label} to {tensors.members[behind].label}"
                what = f"{what}: the way over it is {ratio:.1f} times that {near}"
                _say_of_part(tensors.members[i], names, what)
                return True
    return False


def _unlike_the_rest(chosen_T: np.ndarray, length_TMM: np.ndarray, members: Iterable[int]) -> list[int]:
    """Sort the checkpoints by their distance from the others in the chosen tensors, relative to that in the rest, the
    farthest first.
    """
    numbers = list(members)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no tensor that two have of their own
        ratio_MM = np.log(np.nanmedian(length_TMM[chosen_T], 0) / np.nanmedian(length_TMM[~chosen_T], 0))
        ratio_MM = ratio_MM[np.ix_(numbers, numbers)]
        off_M = np.nanmedian(np.abs(ratio_MM - np.nanmedian(ratio_MM)), 1)
    return [numbers[k] for k in np.argsort(-np.nan_to_num(off_M), kind="stable")]


def _are_some(chosen_T: np.ndarray, tensors: Tensors) -> bool:
    """Return True if some matrices are chosen, but at most half; more than half show in the curve of the whole."""
    these, rest = _parts(chosen_T, tensors)
    return bool(these.any()) and these.sum() <= rest.sum()


def _parts(chosen_T: np.ndarray, tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen matrices, and the other ones."""
    return chosen_T & tensors.matrices, ~chosen_T & tensors.matrices


def _settled(tensors: Tensors) -> dict[int, Place]:
    """Return the places of the checkpoints that have one, by number."""
    return {i: same.claims[0] for i, same in enumerate(tensors.members) if len(same.claims) == 1 and not same.is_copy}


def _with_vectors(chosen_T: np.ndarray, tensors: Tensors) -> list[str]:
    """Return the names of the chosen matrices, and of chosen vectors in a block with one: vectors alone are weak
    evidence.
    """
    named = list(zip(tensors.names, chosen_T.tolist(), tensors.matrices.tolist(), strict=True))
    chosen = [(name, is_matrix) for name, is_chosen, is_matrix in named if is_chosen]
    blocks = {_block_of(name) for name, is_matrix in chosen if is_matrix} - {""}
    return [name for name, is_matrix in chosen if is_matrix or _block_of(name) in blocks]


def _say_of_part(same: Same, names: Iterable[str], what: str) -> None:
    same.mixed |= set(names)
    for one in same.members:
        one.found("mixed", what)


def _block_of(name: str) -> str:
    """Return the name of the block that a tensor belongs to; "" for none."""
    found = _BLOCK.match(name)
    return found[0][:-1] if found else ""


def _described(names: Iterable[str], tensors: Tensors) -> str:
    """Describe tensors in a few words: whole blocks by number, others by name."""
    left, every = set(names), {name for name in tensors.names if not tensors.is_constant(name)}
    if not (rest := sorted(every - left)):
        return "the weights"
    if len(rest) <= 2 and len(rest) < len(left):
        return f"all tensors but {' and '.join(rest)}"
    of_blocks: dict[str, set[str]] = defaultdict(set)
    for name in every:
        if block := _block_of(name):
            of_blocks[block].add(name)
    blocks = [block for block, own in of_blocks.items() if own <= left]
    parts = []
    if blocks:
        blocks.sort(key=lambda block: int(block.rpartition(".")[2]))
        n = sum(len(of_blocks[block]) for block in blocks)
        left -= {name for block in blocks for name in of_blocks[block]}
        numbers = in_few_words([block.rpartition(".")[2] for block in blocks])
        parts.append(f"block{'s' * (len(blocks) > 1)} {numbers} ({blocks[0]}{' …' * (len(blocks) > 1)}, {n} tensors)")
    named = sorted(left)
    parts += [in_few_words(named)] if named else []
    return " and ".join(parts)
