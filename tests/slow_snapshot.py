"""Every quantity of a snapshot, the slow way: its definition in float64, applied to the whole tensors of one pass."""

import numpy as np
import torch
from scipy import special

from birthmark.metrics.quantities import MEASURED

#: What counts, or belongs to what was chosen by rank: moves by whole sequences or to another unit.
CHOSEN = {
    "sink_rate", "sink_rate_grid", "sink_rate_by_key", "sink_share", "sinks_per_sequence", "secondary_sinks",
    "secondary_sink_importance", "secondary_sink_heads", "argmax_share", "top1_share", "coverage_80", "entropy_argmax",
    "key_norm_sink", "value_norm_sink", "super_neurons", "neuron_first", "neuron_others", "neuron_z", "neuron_ratio",
    "neuron_is_super", "neuron_gate_norm", "neuron_up_norm", "neuron_down_sparsity", "residual_outlier_channels",
    "attention_outlier_channels", "mlp_outlier_channels",
}  # fmt: skip
#: What counts the favourite tokens, of four sequences: one that flips moves a share by as much as itself.
FAVOURITES = {"argmax_share", "top1_share", "coverage_80", "entropy_argmax"}
#: What names units, positions, channels and tokens.
NAMED = {
    "sink_position", "neuron_index", "neuron_down_dimension", "massive_position", "massive_channel",
    "secondary_sink_position", "secondary_sink_token",
}  # fmt: skip
#: Roots of small eigenvalues beside one of massive activations.
SPECTRAL = {"effective_rank", "singular_values"}
#: Means of cosines, which may cancel nearly to 0, each with the array that has its rounding and gives the size.
CANCELLING = {"inter": "inter_mlp", "intra": "intra_mlp"}


def mean_cosine(x):
    """Average the cosine over all pairs of rows ``[…, n, D]``, and over the rest."""
    u = torch.nn.functional.normalize(x, dim=-1)
    n = u.shape[-2]
    return ((u.sum(-2).square().sum(-1) - u.square().sum((-1, -2))) / (n * (n - 1))).mean()


def moments(x):
    """Kurtosis, by position, with the published constant, ∞-norm, by position, share of outlier channels."""
    mean, std = x.mean((1, 2), keepdim=True), x.flatten(1).std(1)
    fourth = (x - mean).square().square()
    power = std**4
    outliers = ((x - mean).abs().amax(1) > 6 * std[:, None]).double().mean()
    return (
        (fourth.mean((1, 2)) / power).mean(), (fourth.mean(2) / power[:, None]).mean(0),
        (fourth.mean((1, 2)) / (power + 1e-6)).mean(), x.abs().amax((1, 2)).mean(), x.abs().amax(2).mean(0), outliers,
    )  # fmt: skip


def of_states(found, kept):
    for layer, h in enumerate(kept.states):
        h = h.double()
        put(found, "inter_mlp", mean_cosine(h[:, -1]))
        put(found, "intra_mlp", mean_cosine(h))
        direction = h[:, -1].mean(0)
        put(found, "mean_direction", direction / direction.norm())
        size = h.abs()
        put(found, "dominance", (size.amax(-1) / size.mean(-1)).mean(0))
        largest = size.amax(0)
        value, index = largest.flatten().sort(descending=True, stable=True)
        put(found, "massive_value", value[:10])
        put(found, "massive_position", index[:10] // h.shape[-1])
        put(found, "massive_channel", index[:10] % h.shape[-1])
        singular = torch.linalg.svdvals(h.flatten(0, 1))
        padded = torch.zeros(h.shape[-1], dtype=torch.float64)
        padded[: len(singular)] = singular / (h.shape[0] * h.shape[1]) ** 0.5
        put(found, "singular_values", padded)
        put(found, "effective_rank", torch.special.entr(singular / singular.sum()).sum().exp())
        names = "kurtosis kurtosis_by_position kurtosis_published inf_norm inf_norm_by_position outlier_channels"
        for name, value in zip(names.split(), moments(h), strict=True):
            put(found, f"residual_{name}", value)
        if layer:
            after = kept.after_attention[layer - 1].double()
            put(found, "inter_attention", mean_cosine(after[:, -1]))
            put(found, "intra_attention", mean_cosine(after))
    for place, by_block in (("attention", kept.attention), ("mlp", kept.mlp)):
        for x in by_block:
            kurtosis, _, published, largest, _, outliers = moments(x.double())
            put(found, f"{place}_kurtosis", kurtosis)
            put(found, f"{place}_kurtosis_published", published)
            put(found, f"{place}_inf_norm", largest)
            put(found, f"{place}_outlier_channels", outliers)


def of_attention(found, kept, tokens, epsilon):
    grid = torch.arange(1, 10).double() / 10
    rates = []
    for block, weights in enumerate(kept.weights):
        a = weights.double()
        length, n_heads = a.shape[-1], a.shape[1]
        query = torch.arange(length, 0, -1).double()
        importance = a.sum(2) / query
        put(found, "sink_mass", a[..., 1:, 0].mean((0, 2)))
        put(found, "importance", importance.mean(0))
        put(found, "sink_position", importance.mean(0).argmax(-1))
        put(found, "sink_rate", 100 * (importance[..., 0] > epsilon).double().mean(0))
        above = 100 * (importance > grid[:, None, None, None]).double()
        put(found, "sink_rate_grid", above[..., 0].mean(1))
        rates.append(above.mean((1, 2)))
        put(found, "n_eff", (1 / a.square().sum(-1)).mean(0))
        step = -(-length // 64)
        some = a[:, :, list(range(length - 1, -1, -step))]
        some = some / some.sum(-1, keepdim=True)
        put(found, "attention_entropy", torch.special.entr(some).sum(-1).mean((0, 2)))
        put(found, "largest_logit", kept.scores[block])
        o = a @ kept.v[block].double()
        out = kept.outputs[block].double().unflatten(-1, (n_heads, -1)).transpose(1, 2)
        for suffix, x in (("", o), ("_out", out)):
            variance = x.var(0).mean(-1)
            put(found, f"positional_variance{suffix}", variance)
            by_position = variance.mean(0)
            put(found, f"variance_discrepancy{suffix}", by_position[0] / by_position[-(-length // 2) :].mean())
        judged = length - -(-length // 4) + 1
        for name, x in (("key", kept.k[block]), ("value", kept.v[block])):
            norm = x.double().norm(dim=-1)
            put(found, f"{name}_norms", norm.mean((0, 1)))
            put(found, f"{name}_norm_first", norm[..., 0].mean(0) / norm[..., 1:].mean((0, 2)))
            sink = importance[..., :judged].argmax(-1, keepdim=True)
            at = norm.gather(-1, sink)[..., 0]
            put(found, f"{name}_norm_sink", at.mean(0) / ((norm.sum(-1) - at) / (length - 1)).mean(0))
        is_sink = (importance > epsilon) & (torch.arange(length) < judged)
        put(found, "sink_share", is_sink.any(1).double().mean(0))
        put(found, "sinks_per_sequence", is_sink.any(1).double().sum(-1).mean())
        put(found, "secondary_sinks", is_sink.any(1)[:, 1:].double().sum(-1).mean())
        largest = importance.amax(1)[:, 1:judged]
        value, order = largest.amax(0).sort(descending=True)
        order, sequence = order[:10], largest.argmax(0)[order[:10]]
        put(found, "secondary_sink_importance", value[:10])
        put(found, "secondary_sink_position", order + 1)
        put(found, "secondary_sink_token", tokens[sequence, order + 1])
        put(found, "secondary_sink_heads", is_sink[sequence, :, order + 1].sum(-1))
        q, k = kept.q[block].double(), kept.k[block].double()
        u = torch.linalg.eigh(torch.einsum("bhtk,bhtl->hkl", q, q))[1][..., -1]
        u = u * (u * q.mean((0, 2))).sum(-1, keepdim=True).sign()
        cosine = (k[:, :, 0] * u).sum(-1) / k[:, :, 0].norm(dim=-1)
        put(found, "qk_cosine", cosine.square().mean(0).sqrt())
        put(found, "qk_cosine_signed", cosine.mean(0))
        put(found, "qk_positive", (q[:, :, 1:] @ k[:, :, 0, :, None] > 0).double().mean((0, 2, 3)))
    found["sink_rate_by_key"] = [torch.stack(rates).mean(0)]
    found["sink_epsilons"] = [grid]


def of_units(found, kept):
    for x, (up, gate, down) in zip(kept.units, kept.maps, strict=True):
        size = x.double().abs()
        at, others = size[:, 0].mean(0).numpy(), size[:, 1:].mean((0, 1)).numpy()
        z = (at - np.median(at)) / (1.4826 * np.median(np.abs(at - np.median(at))))
        is_super = (z >= 10) & (at / others >= 5)
        order = np.argsort(-z, kind="stable")[:10]
        up, gate, down = (
            torch.full_like(up, torch.nan) if w is None else w.detach().double() for w in (up, gate, down)
        )
        row = down.T[order.copy()].abs()
        listed = {
            "index": order, "first": at[order], "others": others[order], "z": z[order],
            "ratio": at[order] / others[order], "is_super": is_super[order], "up_norm": up[order.copy()].norm(dim=1),
            "gate_norm": gate[order.copy()].norm(dim=1), "down_sparsity": row.amax(1) / row.mean(1),
            "down_dimension": row.argmax(1),
        }  # fmt: skip
        put(found, "activation_first", at)
        put(found, "activation_others", others)
        put(found, "super_neurons", is_super.sum())
        for name, value in listed.items():
            put(found, f"neuron_{name}", value)


def put(found, name, value):
    found.setdefault(name, []).append(np.asarray(value))


def slow_quantities(kept, tokens, epsilon):
    """Every array of a snapshot, and the scalars that are no reduction of one.

    ``kept`` has, as a list of blocks, ``states`` (the embeddings first), ``after_attention``, the outputs ``attention``
    and ``mlp`` of sublayers, ``units``, ``outputs`` (what the last map of attention reads), ``q``, ``k``, ``v``,
    ``weights``, the largest ``scores`` of heads, and ``maps`` (up, gate, down); and the last ``logits``.
    """
    found = {}
    of_states(found, kept)
    of_attention(found, kept, tokens, epsilon)
    of_units(found, kept)
    arrays = {name: np.stack(values) for name, values in found.items()}
    for name in ("sink_rate_by_key", "sink_epsilons"):
        arrays[name] = arrays[name][0]
    arrays["sink_rate_grid"] = arrays["sink_rate_grid"].swapaxes(0, 1)
    p, n_tokens = kept.logits.softmax(-1).mean(0).numpy(), kept.logits.shape[-1]
    best = kept.logits == kept.logits.amax(-1, keepdim=True)
    w = (best.double() / best.sum(-1, keepdim=True)).mean(0).numpy()
    arrays |= {"mean_prob": p, "argmax_share": w}
    length, step = tokens.shape[1], -(-tokens.shape[1] // 64)
    strongest = arrays["dominance"][:, 0].argmax()
    scalars = {
        "inter": arrays["inter_mlp"][-1], "intra": arrays["intra_mlp"][-1],
        "kl_uniform": special.rel_entr(p, 1 / n_tokens).sum(), "preference_ratio": n_tokens * p.max(),
        "top1_share": w.max(), "coverage_80": ((np.cumsum(np.sort(w)[::-1]) < 0.8 - 1e-9).sum() + 1) / n_tokens,
        "entropy": special.entr(p).sum() / np.log(n_tokens), "entropy_argmax": special.entr(w).sum() / np.log(n_tokens),
        "sink_uniform": np.mean(1 / np.arange(2, length + 1)), "sink_epsilon": epsilon,
        "sink_mass_max": arrays["sink_mass"].max(), "dominance_first": arrays["dominance"][strongest, 0],
        "dominance_median": np.median(arrays["dominance"][strongest]), "massive_max": arrays["massive_value"].max(),
        "attention_entropy_uniform": np.log(np.arange(length, 0, -step)).mean(),
    }  # fmt: skip
    for name in arrays:
        if (reduction := MEASURED[name].scalar) and name != "n_eff":
            values = arrays[name]
            scalars[name] = {"mean": np.mean, "max": np.max, "sum": np.sum, "last": lambda x: x[-1]}[reduction](values)
    scalars["n_eff"] = arrays["n_eff"][..., -1].mean()
    return arrays, scalars


def difference(name, found, expected, size=1e-9):
    """The largest one over the largest value of the block, ``size`` at least; of what is chosen the mean one over the
    mean value; of names the share that differs."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if name in NAMED:
        return (found != expected).mean()
    assert (np.isnan(found) == np.isnan(expected)).all(), name
    found, expected = np.nan_to_num(found), np.nan_to_num(expected)
    off = np.abs(found - expected)
    if name in CHOSEN:
        return off.mean() / max(np.abs(expected).mean(), 1e-9)
    blocks = np.abs(expected).reshape(len(expected) if expected.ndim > 1 else 1, -1).max(1)
    return (off.reshape(len(blocks), -1).max(1) / np.maximum(blocks, size)).max()


def kind(name):
    """The kind of a quantity, or of its scalar."""
    kinds = {"chosen": CHOSEN, "named": NAMED, "spectral": SPECTRAL}
    return next((kind for kind, names in kinds.items() if name.removesuffix(", scalar") in names), "other")


def differences(found, expected):
    """Return the difference of every array and scalar of a measurement from those expected."""
    arrays, scalars = expected
    of_arrays = {name: difference(name, found.arrays[name], value) for name, value in arrays.items()}
    sizes = {name: np.abs(arrays[array]).max() for name, array in CANCELLING.items()}
    of_scalars = {
        f"{name}, scalar": difference(name, [found.scalars[name]], [value], sizes.get(name, 1e-9))
        for name, value in scalars.items()
    }
    return of_arrays | of_scalars
