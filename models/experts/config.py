"""Config of a mixture of experts: their number, the router, and the losses that keep them all in use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...schema import outside
from ..attention.config import Setting


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts in place of the MLP: a router sends each token through a few of them (arXiv 1701.06538)."""

    n_experts: int | None = None
    """Experts in a block, each an MLP of the kind of model.mlp; by default none, and the MLP is dense (Switch
    Transformers, arXiv 2101.03961)."""

    top_k: int = 2
    """Experts that a token passes: those to which the softmax of the router's logits gives most. No token is dropped
    (Mixtral, arXiv 2401.04088)."""

    renormalise: bool = True
    """Divide the weights of a token's experts by their sum, as Mixtral does (arXiv 2401.04088); otherwise they are
    shares of the softmax over all experts, as in OLMoE (arXiv 2409.02060).
    """

    d_ff: int | None = None
    """Hidden width of one expert; by default that of the dense MLP (fine-grained experts are narrower, DeepSeekMoE,
    arXiv 2401.06066)."""

    d_shared: int | None = None
    """Hidden width of an expert that every token passes beside those of the router, its output added with weight 1; n
    shared experts of width w are one of width n·w. By default there is none (DeepSeekMoE, arXiv 2401.06066)."""

    n_dense: int | None = None
    """The first blocks, so many, have a dense MLP of width model.d_ff; by default none has (DeepSeekMoE,
    arXiv 2401.06066)."""

    load_balance: float = 0.01
    """Coefficient of the load-balance loss in what training minimises: in each block n_experts · Σ_e f_e · P_e, mean
    over blocks, where f_e is expert e's share of the choices of the global batch (arXiv 2501.11873) and P_e the mean of
    its softmax share, both over the tokens whose loss counts. It is 1 where all get as much (Switch Transformers,
    arXiv 2101.03961). With several micro-batches in a step it takes one more forward pass of each."""

    router_z_loss: float | None = None
    """Coefficient of the mean square of the log-sum-exp of the router's logits, mean over blocks; by default 0 (ST-MoE,
    arXiv 2202.08906)."""

    @property
    def is_on(self) -> bool:
        """True if any block has experts."""
        return self.n_experts is not None

    @property
    def balances_load(self) -> bool:
        """True if training minimises a load-balance loss."""
        return self.is_on and self.load_balance > 0

    def in_block(self, block: int) -> bool:
        """Return True if block ``block``, from 0, has experts."""
        return self.is_on and block >= (self.n_dense or 0)

    def problems(self, n_layers: int) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        bounds = {
            "n_experts": (2, 1 << 12),
            "top_k": (1, 1 << 12),
            "d_ff": (1, 1 << 24),
            "d_shared": (1, 1 << 24),
            "n_dense": (1, 1 << 11),
            "load_balance": (0, 1e6),
            "router_z_loss": (0, 1e6),
        }
        found = outside("model.experts", self, bounds)
        if self.n_experts is not None and self.top_k > self.n_experts >= 2:
            found.append(f"model.experts.top_k is {self.top_k}: give at most model.experts.n_experts {self.n_experts}")
        if self.is_on and self.n_dense is not None and self.n_dense >= n_layers:
            found.append(
                f"model.experts.n_dense is {self.n_dense}: give fewer than model.n_layers {n_layers}, or no "
                "model.experts.n_experts"
            )
        return found

    def conditional_settings(self) -> list[Setting]:
        """List fields that depend on other fields."""
        return [
            Setting(
                f"experts.{field.name}",
                getattr(self, field.name) != field.default,
                self.is_on,
                "model.experts.n_experts 2 or more",
            )
            for field in fields(self)
            if field.name != "n_experts"
        ]
