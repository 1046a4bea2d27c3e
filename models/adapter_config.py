"""An adapter, as a config. Light: it is read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ..schema import outside
from .config import ModelConfig

AdapterKind = Literal["none", "lora", "prefix", "prefix_plus"]
LinearMap = Literal["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
FeatureMap = Literal["elu", "relu", "identity"]

#: Kind → the fields that it reads.
READS: dict[AdapterKind, tuple[str, ...]] = {
    "none": (),
    "lora": ("rank", "alpha", "maps"),
    "prefix": ("length",),
    "prefix_plus": ("feature_map",),
}


@dataclass(frozen=True)
class AdapterConfig:
    """A small part that is trained in place of the model to which it is attached (definitions §12)."""

    kind: AdapterKind = "none"
    """``none``: the model itself is trained. Else it is frozen, and what is trained is: ``lora``, a product of two thin
    matrices beside linear maps (arXiv 2106.09685); ``prefix``, keys and values in every block that all queries see
    (prefix tuning, arXiv 2101.00190); ``prefix_plus``, a matrix per head that maps features of its queries and is added
    to its output, outside of the softmax (Prefix-Tuning+, arXiv 2506.13674). Needs a model to start from: init_from, or
    birthmark adapt."""

    rank: int | None = None
    """For ``lora``: inner width of the product, less than that of the maps; by default 8."""

    alpha: float | None = None
    """For ``lora``: the product is multiplied by alpha/rank; by default 16."""

    maps: list[LinearMap] | None = None
    """For ``lora``: linear maps of every block that get one; by default attn.q and attn.v."""

    length: int | None = None
    """For ``prefix``: keys of every block and key/value head; by default 16."""

    feature_map: FeatureMap | None = None
    """For ``prefix_plus``: φ, which is applied to queries; by default ``elu``, as in the paper."""

    @property
    def is_on(self) -> bool:
        """True if there is an adapter."""
        return self.kind != "none"

    @property
    def has_keys(self) -> bool:
        """True if queries give weight to keys of the adapter, so that their weights on tokens do not sum to 1."""
        return self.kind == "prefix"

    @property
    def changes_outputs(self) -> bool:
        """True if the adapter adds something to the outputs of heads, after the value aggregation."""
        return self.kind == "prefix_plus"

    @property
    def is_of_matrices(self) -> bool:
        """True if all that it trains are matrices."""
        return self.kind in ("lora", "prefix_plus")

    @property
    def lora_rank(self) -> int:
        """The rank, resolved."""
        return 8 if self.rank is None else self.rank

    @property
    def lora_alpha(self) -> float:
        """Alpha, resolved."""
        return 16.0 if self.alpha is None else self.alpha

    @property
    def lora_maps(self) -> list[LinearMap]:
        """The maps, resolved."""
        return ["attn.q", "attn.v"] if self.maps is None else self.maps

    @property
    def prefix_length(self) -> int:
        """The number of keys, resolved."""
        return 16 if self.length is None else self.length

    @property
    def phi(self) -> FeatureMap:
        """The feature map, resolved."""
        return "elu" if self.feature_map is None else self.feature_map

    def problems(self) -> list[str]:
        """List values out of range and fields that the kind does not read, one line each, with the remedy."""
        found = []
        for field in fields(self):
            if field.name != "kind" and getattr(self, field.name) is not None and field.name not in READS[self.kind]:
                readers = [kind for kind, reads in READS.items() if field.name in reads]
                found.append(
                    f"adapter.{field.name} is set, but only adapter.kind {readers[0]} reads it: leave it out or change "
                    "that"
                )
        found += outside("adapter", self, {"rank": (1, 1 << 16), "length": (1, 1 << 16)})
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            found.append(f"adapter.alpha is {self.alpha}: give a positive number")
        if self.maps is not None and not self.maps:
            found.append("adapter.maps is empty: name a map, or give adapter.kind none")
        if twice := sorted({name for name in self.maps or [] if (self.maps or []).count(name) > 1}):
            found.append(f"adapter.maps names {', '.join(twice)} twice: name each map once")
        return found

    def misfits(self, model: ModelConfig) -> list[str]:
        """List the reasons why it cannot be attached to this model, one line each, with the remedy."""
        attention = model.attention
        if self.kind == "prefix" and not attention.rows.takes_keys:
            return [
                f"adapter.kind prefix brings keys, and model.attention.normaliser {attention.normaliser} takes none"
            ]
        if model.attention.latent.is_on and self.kind in ("prefix", "prefix_plus"):
            return [
                f"adapter.kind {self.kind} reads and brings heads of one width, and those of latent attention have two"
            ]
        if self.kind != "lora":
            return []
        missing = [name for name in self.lora_maps if name in ("attn.q", "attn.k", "attn.v")]
        if model.attention.latent.is_on and missing:
            return [f"adapter.maps names {missing[0]}, which latent attention maps in two steps: leave it out"]
        of_mlp = [name for name in self.lora_maps if name.startswith("mlp.")]
        if of_mlp and model.experts.is_on:
            return [f"adapter.maps names {of_mlp[0]}, and model.experts.n_experts is set: name maps of attention alone"]
        if "mlp.gate" in self.lora_maps and not model.gated:
            return [f"adapter.maps names mlp.gate, but model.mlp {model.mlp} has none: leave it out"]
        widths: dict[str, tuple[int, int]] = {
            "attn.q": (model.d_model, model.n_heads * model.d_head),
            "attn.k": (model.d_model, model.kv_heads * model.d_head),
            "attn.v": (model.d_model, model.kv_heads * model.d_head),
            "attn.o": (model.n_heads * model.d_value, model.d_model),
            **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), (model.d_model, model.ff)),
        }
        least, narrowest = min((min(widths[name]), name) for name in self.lora_maps)
        if self.lora_rank >= least:
            return [
                f"adapter.rank is {self.lora_rank}, and {narrowest} has a side of {least}: give less than {least}, the "
                "product is as large as the map itself"
            ]
        return []
