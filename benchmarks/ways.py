"""Three ways to compute every quantity of a snapshot, on the same model and probe: ``usual_way.py`` compares them.

*As published* (:func:`as_published`): eager attention with ``output_attentions=True, output_hidden_states=True``, one
sequence after another, the attentions of all layers and sequences put together, and the formulas on what this gives, as
the released scripts have them (github.com/sail-sg/Attention-Sink: ``eval_sink_open_source.py`` for what is kept and for
importance; singular values by ``svdvals``), float32, under ``torch.no_grad``.

*At its best* (:func:`at_its_best`) is the same way with everything spared that can be: all sequences in one batch, no
copy of the attentions, logits of the last position only, singular values from the second moment, Σ a² without squares.

Hooks give what the kept tensors lack in both, as is usual: the residual stream after attention and before
the last norm, the heads' outputs before the output projection, and of the MLP's hidden units only the two means that
are wanted. Mean cosines are from sums of unit vectors in both.

*Ours* is ``measure(HFModel(model), probe)``. It also takes what the usual way has no tensors for, and is not
compared: the query-key lock, and a watch for NaN and inf. The model is wrapped once, as a training does it: the check
of its attention against the model's own, on one sequence, comes with the first measurement, which is not timed.

Torch is imported inside of functions: a worker's peak begins with what the process that spawned it held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

SINK_EPSILONS = [i / 10 for i in range(1, 10)]
Numbers = dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------------------------------
# The usual way


class Kept(NamedTuple):
    """Tensors of one pass that hooks keep, by layer."""

    after_attention: list[Tensor]
    heads: list[Tensor]
    units: list[tuple[Tensor, Tensor]]
    before_norm: list[Tensor]


@contextmanager
def hooked(model: Any) -> Iterator[Kept]:
    """Keep by hooks the tensors that the library does not return."""
    kept = Kept([], [], [], [])

    def keep_units(module: Any, args: tuple[Tensor]) -> None:
        size_BTF = args[0].abs()
        kept.units.append((size_BTF[:, 0].mean(0), size_BTF[:, 1:].mean((0, 1))))

    hooks = [model.model.norm.register_forward_pre_hook(lambda module, args: kept.before_norm.append(args[0]))]
    for block in model.model.layers:
        hooks += [
            block.post_attention_layernorm.register_forward_pre_hook(
                lambda module, args: kept.after_attention.append(args[0])
            ),
            block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: kept.heads.append(args[0])),
            block.mlp.down_proj.register_forward_pre_hook(keep_units),
        ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def at_its_best(model: Any, tokens_BT: Tensor) -> Numbers:
    """Compute every quantity of docs/definitions.md §3–7 that kept attentions, hidden states and simple hooks give."""
    import torch

    with hooked(model) as kept, torch.no_grad():
        output = model(tokens_BT, use_cache=False, output_attentions=True, output_hidden_states=True, logits_to_keep=1)
        after_mlp = [*output.hidden_states[:-1], kept.before_norm[0]]  # the library's last one is normed
        return {
            **_preference(output.logits[:, -1]),
            **_contraction(after_mlp, kept.after_attention),
            **_sinks(output.attentions),
            **_variance(kept.heads, model.config.num_attention_heads),
            **_units(kept.units),
            **_states(after_mlp),
        }


def as_published(model: Any, tokens_BT: Tensor) -> Numbers:
    """Compute the same quantities from the same tensors, kept and evaluated as the released scripts do."""
    import torch

    attentions, logits, passes = [], [], []
    with torch.no_grad():
        for sequence_1T in tokens_BT.split(1):
            with hooked(model) as kept:
                output = model(sequence_1T, use_cache=False, output_attentions=True, output_hidden_states=True)
            attentions.append(torch.cat(output.attentions)[None])
            logits.append(output.logits[:, -1])
            passes.append(kept._replace(before_norm=[*output.hidden_states[:-1], kept.before_norm[0]]))
        a_BLHTS = torch.cat(attentions)
        del attentions, output

        def joined(name: str) -> list[Tensor]:
            """Join one kind of states over all sequences, layer by layer."""
            return [torch.cat(of_layer) for of_layer in zip(*(getattr(one, name) for one in passes), strict=True)]

        after_mlp = joined("before_norm")
        units = [
            tuple(torch.stack(means).mean(0) for means in zip(*of_layer, strict=True))
            for of_layer in zip(*(one.units for one in passes), strict=True)
        ]
        return {
            **_preference(torch.cat(logits)),
            **_contraction(after_mlp, joined("after_attention")),
            **_sinks_of_all(a_BLHTS),
            **_variance(joined("heads"), model.config.num_attention_heads),
            **_units(units),
            **_states(after_mlp, _singular_values),
        }


def _stack(values: list[Any]) -> np.ndarray:
    return np.stack([value.numpy() if hasattr(value, "numpy") else np.asarray(value) for value in values])


def _preference(logits_BV: Tensor) -> Numbers:
    p_V, vocab_size = logits_BV.softmax(-1).mean(0), logits_BV.shape[-1]
    w_V = logits_BV.argmax(-1).bincount(minlength=vocab_size) / len(logits_BV)
    kl = (p_V * (p_V * vocab_size).log()).sum()
    entropy = 1 - kl / np.log(vocab_size)
    return {
        "mean_prob": p_V.numpy(),
        "argmax_share": w_V.numpy(),
        "kl_uniform": kl.numpy(),
        "entropy": entropy.numpy(),
        "preference_ratio": (vocab_size * p_V.max()).numpy(),
    }


def _mean_cosine(u_XND: Tensor) -> float:
    """Average the cosine over pairs of different unit vectors, and over the groups."""
    n = u_XND.shape[1]
    return float(((u_XND.sum(1).square().sum(-1) - n) / (n * (n - 1))).mean())


def _contraction(after_mlp: list[Tensor], after_attention: list[Tensor]) -> Numbers:
    from torch.nn.functional import normalize

    found: dict[str, list[float]] = {}
    for name, states in (("mlp", after_mlp), ("attention", after_attention)):
        units = [normalize(h_BTD, dim=-1) for h_BTD in states]
        found[f"inter_{name}"] = [_mean_cosine(u_BTD[None, :, -1]) for u_BTD in units]
        found[f"intra_{name}"] = [_mean_cosine(u_BTD) for u_BTD in units]
    directions = [normalize(h_BTD[:, -1].mean(0), dim=-1) for h_BTD in after_mlp]
    return {name: np.array(values) for name, values in found.items()} | {"mean_direction": _stack(directions)}


def _sinks(attentions: tuple[Tensor, ...]) -> Numbers:
    import torch

    length = attentions[0].shape[-1]
    queries_T = length - torch.arange(length)
    by_layer: dict[str, list[Tensor]] = {}
    rates = []
    for a_BHTS in attentions:
        importance_BHT = a_BHTS.sum(-2) / queries_T
        n_eff_BHT = 1 / torch.linalg.vector_norm(a_BHTS, dim=-1).square()
        found = {
            "sink_mass": a_BHTS[:, :, 1:, 0].mean((0, 2)),
            "importance": importance_BHT.mean(0),
            "sink_position": importance_BHT.mean(0).argmax(-1),
            "n_eff": n_eff_BHT.mean(0),
        }
        for name, value in found.items():
            by_layer.setdefault(name, []).append(value)
        rates.append(torch.stack([100 * (importance_BHT > e).float().mean(0) for e in SINK_EPSILONS]))
    grid_ELHT = torch.stack(rates, dim=1)
    return {name: _stack(values) for name, values in by_layer.items()} | {
        "sink_rate_grid": grid_ELHT[..., 0].numpy(),
        "sink_rate_by_key": grid_ELHT.mean((1, 2)).numpy(),
    }


def _sinks_of_all(a_BLHTS: Tensor) -> Numbers:
    import torch

    length = a_BLHTS.shape[-1]
    queries_T = torch.arange(length, 0, -1)
    importance_BLHT = (a_BLHTS / queries_T).sum(-2)
    grid_ELHT = torch.stack([100 * (importance_BLHT > e).float().mean(0) for e in SINK_EPSILONS])
    return {
        "sink_mass": a_BLHTS[..., 1:, 0].mean((0, 3)).numpy(),
        "importance": importance_BLHT.mean(0).numpy(),
        "sink_position": importance_BLHT.mean(0).argmax(-1).numpy(),
        "n_eff": (1 / (a_BLHTS**2).sum(-1)).mean(0).numpy(),
        "sink_rate_grid": grid_ELHT[..., 0].numpy(),
        "sink_rate_by_key": grid_ELHT.mean((1, 2)).numpy(),
    }


def _variance(heads: list[Tensor], n_heads: int) -> Numbers:
    variance_LHT = _stack([o_BTD.unflatten(-1, (n_heads, -1)).var(0).mean(-1).T for o_BTD in heads])
    over_heads_LT = variance_LHT.mean(1)
    late_L = over_heads_LT[:, (variance_LHT.shape[-1] + 1) // 2 :].mean(-1)
    return {"positional_variance": variance_LHT, "variance_discrepancy": over_heads_LT[:, 0] / late_L}


def _units(units: list[tuple[Tensor, Tensor]]) -> Numbers:
    first_LF, others_LF = (_stack([unit[i] for unit in units]) for i in (0, 1))
    middle_L1 = np.median(first_LF, axis=-1, keepdims=True)
    spread_L1 = 1.4826 * np.median(np.abs(first_LF - middle_L1), axis=-1, keepdims=True)
    is_super_LF = ((first_LF - middle_L1) / spread_L1 >= 10) & (first_LF >= 5 * others_LF)
    return {"activation_first": first_LF, "activation_others": others_LF, "super_neurons": is_super_LF.sum(-1)}


def _singular_values(h_ND: Tensor) -> Tensor:
    import torch

    value_D = torch.linalg.svdvals(h_ND).double() / len(h_ND) ** 0.5
    return torch.nn.functional.pad(value_D, (0, h_ND.shape[1] - len(value_D)))  # fewer states than channels


def _from_second_moment(h_ND: Tensor) -> Tensor:
    import torch

    return (torch.linalg.eigvalsh((h_ND.T @ h_ND).double()).clamp_min(0) / len(h_ND)).sqrt().flip(0)


def _states(after_mlp: list[Tensor], singular_values: Callable[[Tensor], Tensor] = _from_second_moment) -> Numbers:
    import torch

    dominance, massive, positions, channels, singular, ranks = [], [], [], [], [], []
    for h_BTD in after_mlp:
        size_BTD = h_BTD.abs()
        dominance.append((size_BTD.amax(-1) / size_BTD.mean(-1)).mean(0))
        value_K, index_K = size_BTD.amax(0).flatten().topk(10)
        massive.append(value_K)
        positions.append(index_K // h_BTD.shape[-1])
        channels.append(index_K % h_BTD.shape[-1])
        value_D = singular_values(h_BTD.flatten(0, 1))
        singular.append(value_D)
        ranks.append(torch.special.entr(value_D / value_D.sum()).sum().exp())
    return {
        "dominance": _stack(dominance),
        "massive_value": _stack(massive),
        "massive_position": _stack(positions),
        "massive_channel": _stack(channels),
        "singular_values": _stack(singular),
        "effective_rank": _stack(ranks),
    }


# ------------------------------------------------------------------------------------------------------------------
# Ours


def ours(model: Any, tokens_BT: Tensor) -> Numbers:
    """Compute the same quantities and more, in one pass."""
    from birthmark.measure.measurement import measure

    found = measure(_wrapped(model), tokens_BT.numpy())
    return found.arrays | {name: np.array(value) for name, value in found.scalars.items() if name not in found.arrays}


@cache
def _wrapped(model: Any) -> Any:
    from birthmark.measure.hf import HFModel

    return HFModel(model)


WAYS: dict[str, tuple[str, Callable[[Any, Tensor], Numbers]]] = {
    "as published": ("eager", as_published),
    "at its best": ("eager", at_its_best),
    "ours": ("sdpa", ours),
}
"""Attention to load the model with, and the function that measures it, by way."""
