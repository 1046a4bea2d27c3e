"""What the decoder's named places are fed into as a pass runs: every metric of the snapshot, and a watch for NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metrics.alignment import SeedAlignment
from ..metrics.contraction import Contraction
from ..metrics.neurons import SuperNeurons
from ..metrics.qk_lock import QKLock
from ..metrics.sinks import AttentionSinks, key_sums
from ..metrics.states import DominanceRatio, EffectiveRank, MassiveActivations
from ..metrics.variance import EffectiveTokens, PositionalVariance
from ..models.config import ModelConfig
from ..models.observe import Attended, Site
from .foreign import ForeignConfig
from .ranks import summed

#: The values of ε at which sink rates are told beside the configured one.
SINK_EPSILONS = tuple(i / 10 for i in range(1, 10))
#: How many massive activations and how many hidden units of a layer are listed.
N_MASSIVE, N_NEURONS = 10, 10


class ReferenceObserver:
    """Feeds the mean direction alone."""

    def __init__(self, config: ModelConfig | ForeignConfig, device: torch.device) -> None:
        self.alignment = SeedAlignment(torch.zeros(0, config.n_layers + 1, config.d_model)).to(device)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.alignment.update(layer, h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """Not read."""

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Not read."""


_SITES = {
    "attention": "the residual stream after the attention of block {}",
    "heads": "the queries, keys, values or outputs of the attention of block {}",
    "neurons": "the hidden activations of the MLP of block {}",
    "mlp": "the residual stream after the MLP of block {}",
}


class FiniteWatch:
    """Which places of a forward pass have shown NaN or inf. Asks the device nothing before the end."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.names = {("embedding", 0): "the embeddings"}
        for layer in range(1, n_layers + 1):
            for site in ("heads", "attention", "neurons", "mlp"):
                self.names[site, layer] = _SITES[site].format(layer)
        self.names["logits", n_layers] = "the logits"
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.totals = dict.fromkeys(self.names, zero)

    def see(self, site: str, layer: int, x: Tensor) -> None:
        """Look at a tensor; one pass over it, no copy."""
        # NaN and inf survive every sum.
        total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
        self.totals[site, layer] = self.totals[site, layer] + total

    def first(self, *, everywhere: bool = False) -> str | None:
        """The first place of the pass that has shown any, in words, here or on any rank; None where all was finite."""
        broken = ~torch.stack(list(self.totals.values())).isfinite()
        shown = (summed(broken.int()) if everywhere else broken).tolist()
        return next((name for name, broken in zip(self.names.values(), shown, strict=True) if broken), None)


class BiasObserver(ReferenceObserver):
    """Feeds every metric of definitions §3 and §5–7 as a pass runs."""

    def __init__(
        self,
        config: ModelConfig | ForeignConfig,
        references_RSD: Tensor,
        seq_len: int,
        epsilon: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        n_layers, n_heads, width = config.n_layers, config.n_heads, config.d_model
        self.seq_len, self.rows_sum_to_one = seq_len, config.attention.rows_sum_to_one
        self.finite = FiniteWatch(n_layers, device)
        self.alignment = SeedAlignment(references_RSD).to(device)
        self.after_mlp = Contraction(n_layers + 1, width).to(device)
        self.after_attention = Contraction(n_layers, width).to(device)
        self.dominance = DominanceRatio(n_layers + 1, seq_len).to(device)
        self.massive = MassiveActivations(n_layers + 1, seq_len, width, N_MASSIVE).to(device)
        self.rank = EffectiveRank(n_layers + 1, width).to(device)
        self.sinks = AttentionSinks(
            n_layers, n_heads, seq_len, epsilon, SINK_EPSILONS, rows_sum_to_one=self.rows_sum_to_one
        ).to(device)
        self.tokens = EffectiveTokens(n_layers, n_heads, seq_len).to(device)
        self.lock = QKLock(n_layers, n_heads, config.d_head).to(device)
        self.units = SuperNeurons(n_layers, config.ff).to(device)
        shape = n_layers, n_heads, seq_len, config.d_head
        wide = torch.promote_types(dtype, torch.float32)
        self.variance = PositionalVariance(*shape, dtype=wide).to(device)
        # Of what norm, calibration and gate make of the value aggregation; where there are none it is the same.
        plain = config.attention.aggregation == "plain" and config.attention.gate == "none"
        self.variance_out = self.variance if plain else PositionalVariance(*shape, dtype=wide).to(device)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        super().residual(site, layer, h_BTD)
        self.finite.see(site, layer, h_BTD)
        if site == "attention":
            self.after_attention.update(layer - 1, h_BTD)
        else:
            self.after_mlp.update(layer, h_BTD)
            self.dominance.update(layer, h_BTD)
            self.massive.update(layer, h_BTD)
            self.rank.update(layer, h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        # Fused kernels may give finite outputs for queries that are not. Values that are not make outputs that are not.
        for x_BHTK in (attended.q_BHTK, attended.k_BHTK, attended.out_BHTK):
            self.finite.see("heads", layer, x_BHTK)
        sums = key_sums(attended.weights, self.seq_len)
        self.sinks.update(layer - 1, sums)
        raw_BHT, normalised_BHT = sums.squares_2BHT
        self.tokens.update(layer - 1, raw_BHT, None if self.rows_sum_to_one else normalised_BHT)
        self.lock.update(layer - 1, attended.q_BHTK, attended.k_BHTK)
        self.variance.update(layer - 1, attended.o_BHTK)
        if self.variance_out is not self.variance:
            self.variance_out.update(layer - 1, attended.out_BHTK)

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""
        self.finite.see("neurons", layer, a_BTF)
        self.units.update(layer - 1, a_BTF)
