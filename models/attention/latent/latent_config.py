"""Config of latent attention, and the fields that it excludes."""

from __future__ import annotations

from dataclasses import dataclass

from ....schema import outside

#: Fields that are read where ``kv_rank`` is set.
LATENT_WIDTHS = ("q_rank", "rope_width", "nope_width", "value_width")


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads come from one narrow vector of each
    token (definitions §9). It is on where kv_rank is set."""

    kv_rank: int | None = None
    """Width of the vector of a token that the keys and values of all heads are mapped from, behind an RMSNorm
    (DeepSeek-V2, arXiv 2405.04434); by default each head has maps of its own."""

    q_rank: int | None = None
    """Width of the vector that queries are mapped from in the same way (DeepSeek-V2, arXiv 2405.04434); by default they
    are mapped from the input, as in DeepSeek-V2-Lite."""

    rope_width: int | None = None
    """Channels that rotate, in each query and in the one key of a token that all heads share (DeepSeek-V2, arXiv
    2405.04434); by default half the width of a head.
    """

    nope_width: int | None = None
    """Channels of queries and keys beside these, which know no positions (DeepSeek-V2, arXiv 2405.04434); by default
    the width of a head."""

    value_width: int | None = None
    """Channels of a head's values (DeepSeek-V2, arXiv 2405.04434), at most those of its keys; by default nope_width."""

    @property
    def is_on(self) -> bool:
        """True if attention is latent."""
        return self.kv_rank is not None

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        bounds = dict.fromkeys(("kv_rank", *LATENT_WIDTHS), (1, 1 << 16))
        return outside("model.attention.latent", self, bounds)

    def excludes(self, *, qk_norm: str, v_norm: str, gate_at: str, gate_input: str) -> list[str]:
        """List the given parts of attention that contradict it, one line each, with the remedy."""
        if not self.is_on:
            return []
        found = [
            f"model.attention.{name} {value} with model.attention.latent, which has norms of its own: leave it out"
            for name, value in (("qk_norm", qk_norm), ("v_norm", v_norm))
            if value != "none"
        ]
        kept = "with model.attention.latent: a token leaves its narrow vector alone to later ones"
        if gate_at in ("key", "value"):
            found.append(f"model.attention.gate_at {gate_at} {kept}, give output, query or projection")
        if gate_input == "value":
            found.append(f"model.attention.gate_input value {kept}, give input")
        return found
