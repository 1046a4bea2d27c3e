"""Oracles of several tests: observers that keep what a pass shows, and slow formulas on whole matrices."""

import math
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from birthmark.models.attention.config import SIMILARITIES
from birthmark.models.attention.kv_cache import KeyValueCache


class Seen:
    """An observer that keeps what it is shown: residual streams by (site, block), the rest by block."""

    def __init__(self):
        self.residuals, self.attended, self.units = {}, {}, {}

    def residual(self, site, layer, h_BTD):
        self.residuals[site, layer] = h_BTD

    def attention(self, layer, attended):
        self.attended[layer] = attended

    def neurons(self, layer, a_BTF):
        self.units[layer] = a_BTF


class Rows:
    """An explicit matrix of weights ``[B, H, T, T]`` as metrics are given one."""

    def __init__(self, weights_BHTT, sums=False):
        self.weights = torch.as_tensor(weights_BHTT)
        self.sums = self.weights.abs().sum(-1) if sums else None

    def rows(self, start, stop):
        return self.weights[:, :, start:stop].clone()

    def row_sum(self):
        return self.sums


class Operators(TorchDispatchMode):
    """Inside, ``note(function, args, result)`` is called with every operator that runs."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.note(function, args, result)
        return result


def _nbytes(values):
    """Bytes of the tensors among these, each once; an axis that repeats one element has one."""
    tensors = {id(x): x for x in tree_leaves(values) if isinstance(x, torch.Tensor)}.values()
    return sum(x[tuple(slice(None if step else 1) for step in x.stride())].nbytes for x in tensors)


class Traffic(Operators):
    """Operators that compute something and the bytes that they read and write, by name; views and allocations do
    neither. A fused operator, one of Triton too, counts its inputs and outputs, as if what it keeps cost nothing.
    """

    FREE = (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias",
        "promote_types", "lift_fresh",
    )  # fmt: skip
    #: In place, without a look at what was there.
    WRITES = ("copy_", "fill_", "zero_")
    #: Of another tensor's type or shape, without a look at its values.
    LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")

    def __init__(self):
        super().__init__(self._count)
        self.operators, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # A product is not added to what is there by a factor of 0.
        self._adds = (kwargs or {}).get("beta", 1) != 0
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _count(self, function, args, result):
        name = function._schema.name.removeprefix("aten::")
        if function.is_view or name in self.FREE:
            return
        # In place: read and written.
        twice = args[0] if name.endswith("_") and name not in self.WRITES and self._adds else None
        self.operators[name] += 1
        self.bytes[name] += _nbytes(result if name in self.LIKE else (args, result)) + _nbytes(twice)

    @property
    def total(self):
        """Operators and gigabytes."""
        return self.operators.total(), self.bytes.total() / 1e9


def routing_cost(model, inputs_BT, real_BT=None, dropout=None):
    """The load balance and what routers add to the loss of a batch, over its real tokens, and the experts that each
    router chose ``[N, K]``: logits from hooks, and a loop over experts."""
    experts, logits, chosen = model.config.experts, [], []
    routers = [block.mlp.router for block in model.blocks if hasattr(block.mlp, "router")]
    handles = [router.register_forward_hook(lambda module, inputs, z_BTE: logits.append(z_BTE)) for router in routers]
    model(inputs_BT, dropout=dropout)
    for handle in handles:
        handle.remove()
    balance, z_loss = torch.zeros(()), torch.zeros(())
    for z_BTE in logits:
        z_NE = z_BTE.flatten(0, 1) if real_BT is None else z_BTE[real_BT]
        p_NE = z_NE.exp() / z_NE.exp().sum(-1, keepdim=True)
        chosen.append(p_NE.argsort(-1, descending=True)[:, : experts.top_k])
        for e in range(experts.n_experts):
            f = (chosen[-1] == e).float().mean()
            balance = balance + experts.n_experts * f * p_NE[:, e].mean() / len(logits)
        z_loss = z_loss + z_NE.exp().sum(-1).log().square().mean() / len(logits)
    return balance, experts.load_balance * balance + experts.router_z_loss * z_loss, chosen


def in_pieces(model, tokens_BT, sizes=(9, 1, 8, 1, 1)):
    """The logits of a text that comes piece by piece, through a cache of keys and values."""
    cache = KeyValueCache(model.config, tokens_BT.shape[1])
    return torch.cat([model(piece, cache=cache) for piece in tokens_BT.split(sizes, dim=1)], dim=1)


def assert_gradients(out, expected, leaves, upstream, atol=1e-10, rtol=1e-7):
    """The gradients of the sum of both, weighed by ``upstream``, are those of each other; ``leaves`` by name."""
    got, wanted = (
        torch.autograd.grad((y * upstream).sum(), [*leaves.values()], allow_unused=True) for y in (out, expected)
    )
    for name, g, w in zip(leaves, got, wanted, strict=True):
        assert g is not None, name
        torch.testing.assert_close(g, w, atol=atol, rtol=rtol, msg=lambda m, name=name: f"gradient of {name}: {m}")


def turn(x, angles):
    """Channel pairs (i, i + K/2) as complex numbers times e^(i·angle)."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def slow_correlation(v_BTK):
    """The mean correlation of different positions' values of one head."""
    v, length = v_BTK - v_BTK.mean((0, 1)), v_BTK.shape[1]
    products = (v @ v.mT).mean(0)
    apart = products.diagonal().mean()
    together = (products.sum() - products.trace()) / (length * (length - 1))
    return (together / apart).clamp(0, 0.999)


def slow_attention(p, x, config, angles=None, added_HS=None, training=True):
    """One attention by its definition, from its parameters by name: a head at a time, with whole matrices of weights.

    ``angles [T, K/2]`` turn queries and keys; ``added_HS`` are additions to scores by head and distance.
    """
    kind, width, length = config.attention, config.d_head, x.shape[1]

    def rms(y):
        return y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def mapped(name):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def gated(place, y):
        """The gate as a plain factor, where it stands."""
        if kind.gate == "none" or place != kind.gate_at:
            return y
        raw = (mapped("v") if kind.gate_input == "value" else x) @ p["gate.map.weight"].T + p.get("gate.map.bias", 0)
        opening = (raw if kind.gate_activation == "silu" else 1) / (1 + torch.exp(-raw))
        return y * (opening if kind.gate == "channel" else opening.repeat_interleave(width, -1))

    def heads_of(place, norm):
        y = gated(place, mapped(place[0]))
        if norm == "width":
            y = rms(y) * p[f"{place[0]}.norm.gain"]
        y = y.unflatten(-1, (-1, width))
        return rms(y) * p[f"{place[0]}.norm.gain"] if norm == "head" else y

    sigmoid_bias = math.log(config.max_seq_len) if kind.sigmoid_bias != "none" else 0
    similarities = {
        "sigmoid": lambda s: 1 / (1 + torch.exp(sigmoid_bias - s)),
        "relu": lambda s: s * (s > 0),
        "elu": lambda s: torch.where(s > 0, s + 1, s.exp()),
        "identity": lambda s: s,
        "softpick": lambda s: s.exp() - 1,
    } | dict.fromkeys(("softmax", "softmax_off_by_one", "softmax_sink", "softmax_clipped"), torch.exp)
    similarity = similarities[kind.normaliser]

    def weights(shares):
        """Shares of a row's sum, as the normaliser gives them out."""
        if kind.normaliser == "softpick":
            return shares.clamp_min(0)
        if kind.normaliser == "softmax_clipped":
            below = kind.clip_alpha / config.max_seq_len
            return (((kind.clip_zeta or 1) + below) * shares - below).clamp(0, 1)
        return shares

    q, k, v = heads_of("query", kind.qk_norm), heads_of("key", kind.qk_norm), heads_of("value", kind.v_norm)
    if angles is not None:
        q, k = turn(q, angles[:, None]), turn(k, angles[:, None])
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = (key <= query) & (key > query - (kind.window or length)) | (torch.maximum(query, key) < (kind.prefix or 0))
    outputs = []
    for h in range(config.n_heads):
        group = h // (config.n_heads // config.kv_heads)  # neighbouring query heads share keys and values
        of_group = torch.arange(kind.kv_bias_tokens or 1)
        if not kind.kv_bias_shared:
            of_group = of_group * config.kv_heads + group
        scores = q[:, :, h] @ k[:, :, group].mT / width**0.5
        if added_HS is not None:
            scores = scores + added_HS[h, (query - key).abs()]
        a = torch.where(seen, similarity(scores), 0)
        learned = a[..., :0]
        if kind.kv_bias in ("key", "key_value"):
            learned = similarity(q[:, :, h] @ p["bias.key"][of_group].T / width**0.5)
        # Beside the tokens: what counts in the sum, and has no value.
        others = [learned] if kind.kv_bias == "key" else []
        if kind.normaliser == "softmax_off_by_one":
            others.append(torch.ones_like(a[..., :1]))
        if kind.normaliser == "softmax_sink":
            others.append(p["normaliser.logit"][h].exp().expand_as(a[..., :1]))
        without_value = torch.cat(others, -1) if others else a[..., :0]
        counted = abs if kind.normaliser == "softpick" else (lambda shares: shares)
        total = counted(a).sum(-1, keepdim=True) + counted(without_value).sum(-1, keepdim=True)
        if kind.kv_bias == "key_value":
            total = total + counted(learned).sum(-1, keepdim=True)
        if kind.normaliser in SIMILARITIES:
            least = 1.0 if kind.normaliser == "identity" else 1e-6
            total = total.abs().clamp_min(least) if kind.normalise_rows else torch.ones_like(total)
        a = weights(a / total)
        o = a @ v[:, :, group]
        if kind.kv_bias == "key_value":
            o = o + weights(learned / total) @ p["bias.value"][of_group]
        if kind.kv_bias == "value":
            o = o + p["bias.value"][of_group[0]]
        if kind.aggregation == "headnorm":
            o = rms(o) * p["aggregate.gain"]
        if kind.aggregation == "headnorm_released":
            o = rms(o) * p["aggregate.gain"][h]
        if kind.aggregation == "calibrated":
            c, n_eff, rho = kind.calibration, torch.arange(1.0, length + 1).double(), torch.zeros(()).double()
            if c.n_eff == "exact":
                n_eff = 1 / ((a * a).sum(-1) + (weights(without_value / total) ** 2).sum(-1))
            if c.correlation == "learned":
                rho = 1 / (1 + torch.exp(-p["aggregate.rho.logit"][h]))
            if c.correlation == "estimated" and training:
                rho = slow_correlation(v[:, :, group].detach())
            factor = (rho + (1 - rho) / n_eff) ** -0.5
            if c.direction == "attenuate":
                factor = factor / (rho + (1 - rho) / (c.t_ref or config.max_seq_len)) ** -0.5
            o = o * (factor if c.gradient else factor.detach())[..., None]
        outputs.append(o)
    out = gated("output", torch.cat(outputs, -1)) @ p["o.weight"].T
    return gated("projection", out) + p.get("o.bias", 0)
