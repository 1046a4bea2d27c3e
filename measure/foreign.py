"""A causal language model of ``transformers``, seen at the same named places as our own decoder.

Its attention runs through the library's attention interface as our fused softmax with its log-sum-exp; the residual
stream and the hidden units are seen by forward hooks. Both are there during an observed pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..models.attention.normalisers import FusedSoftmax
from ..models.attention.positions import Placement
from ..models.attention.scores import Scores
from ..models.config import AttentionConfig
from ..models.exchange.families import FAMILIES
from ..models.observe import Attended, Observer, show_sublayer

_NAME = "birthmark"

#: Model types → the family of ``models/exchange/families.py`` whose modules have the same names, whatever else differs.
_ALIKE = {
    "mistral": "llama",
    "gemma": "llama",
    "olmo": "llama",
    "smollm3": "llama",
    "gemma2": "olmo2",
    "gemma3_text": "olmo2",
    "olmo3": "olmo2",
}
#: Model types that can be measured.
MODEL_TYPES = (*(family.model_type for family in FAMILIES), *_ALIKE)

#: Arguments of an attention of ``transformers`` that change what softmax sees, with what they are.
_NOT_OURS = {
    "softcap": "caps its attention scores",
    "position_bias": "adds to its attention scores",
    "s_aux": "has sinks in its softmax",
}

#: How far the logits of an observed pass may be from the model's own, over their standard deviation. In half precision
#: another kernel alone moves them by some per cent.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.3


@dataclass(frozen=True)
class ForeignConfig:
    """The shape of a foreign model, under the names of ModelConfig."""

    model_type: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    ff: int
    vocab_size: int
    max_seq_len: int | None
    """The most positions of a learned table; None where any length can be read."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """A plain softmax: other attentions are refused."""


@dataclass(frozen=True)
class _Places:
    """Names of the modules that are looked at: of all blocks, and inside one."""

    layers: str
    attn: str
    attn_added: str
    """What the residual stream is added: the attention's output, or the norm after it."""
    o: str
    up: str
    down: str
    gate: str | None
    transposed: bool
    """Whether weights are ``[in, out]``."""

    @classmethod
    def of(cls, model_type: str) -> _Places:
        """From the table of families."""
        families = {family.model_type: family for family in FAMILIES}
        family = families[_ALIKE.get(model_type, model_type)]
        layers = family.modules["blocks.*.attn.o"].split(".*.")[0]
        inside = {
            ours.removeprefix("blocks.*."): theirs.removeprefix(f"{layers}.*.")
            for ours, theirs in family.modules.items()
        }
        attn = inside["attn.o"].rpartition(".")[0]
        added = inside.get("norm_attn_out", attn)
        mlp = inside["mlp.up"], inside["mlp.down"], inside.get("mlp.gate")
        return cls(layers, attn, added, inside["attn.o"], *mlp, bool(family.transposed))


#: Attention modules of passes under way → the number of their block, and who watches.
_WATCHED: dict[nn.Module, tuple[int, Observer]] = {}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function as ``transformers`` calls it: ``[B, H, T, K]`` and ``[B, G, T, K]`` → ``[B, T, H, K]``.

    The mask is not read: a probe has no padding, and causality and window are known without it.
    """
    layer, observer = _WATCHED[module]
    for name, what in _NOT_OURS.items():
        if more.get(name) is not None:
            raise UsageError(f"block {layer} {what} ({name}), which cannot be measured")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UsageError(f"block {layer} sees what comes after a token, which cannot be measured")
    repeats = query.shape[1] // key.shape[1]
    k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))
    window = sliding_window if sliding_window and sliding_window < query.shape[2] else None
    scores = Scores(query, k, query.shape[-1] ** -0.5 if scaling is None else scaling, Placement(), window)
    weighted = FusedSoftmax(scores, v, [], needs_weights=True)
    observer.attention(layer, Attended(query, k, v, weighted.o_BHTK, weighted.o_BHTK, weighted))
    return weighted.o_BHTK.transpose(1, 2).contiguous(), None


class ForeignModel(nn.Module):
    """A ``transformers`` model with a language-model head, called and observed like our Decoder.

    The model itself is shared, not copied, and is the same after a pass: hooks and the attention in use are put back.

    Args:
        model: a ``…ForCausalLM`` or ``…LMHeadModel``, of one of ``MODEL_TYPES``.

    Raises:
        UsageError: another model, or one whose modules are not where they should be.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = getattr(model, "_orig_mod", model)  # hooks would break a compiled graph
        config = self.model.config
        if config.model_type not in MODEL_TYPES:
            raise UsageError(
                f"model type {config.model_type!r} cannot be measured; there are: {', '.join(MODEL_TYPES)}"
            )
        self._places = places = _Places.of(config.model_type)
        try:
            self._blocks = list(self.model.get_submodule(places.layers))
            o, down = (self._blocks[0].get_submodule(name).weight for name in (places.o, places.down))
        except AttributeError as error:
            raise UsageError(f"this is not the {config.model_type} model that transformers has ({error})") from None
        inputs = 0 if places.transposed else 1
        self.config = ForeignConfig(
            config.model_type,
            len(self._blocks),
            config.num_attention_heads,
            config.hidden_size,
            o.shape[inputs] // config.num_attention_heads,
            down.shape[inputs],
            config.vocab_size,
            config.max_position_embeddings if config.model_type == "gpt2" else None,
        )
        self._checked = False

    def forward(self, tokens_BT: Tensor, *, last_only: bool = False, observer: Observer | None = None) -> Tensor:
        """Next-token logits ``[B, T, V]``, or ``[B, V]`` with ``last_only``, as the Decoder's.

        Before the first observed pass the model runs once as it is, on one sequence, and the logits are compared.

        Raises:
            UsageError: an attention that is no plain causal softmax.
        """
        if observer is None:
            return self._logits(tokens_BT, last_only)
        # Before the observer holds anything.
        own = None if self._checked else self._logits(tokens_BT[:1], last_only)
        with self._observed(observer):
            logits = self._logits(tokens_BT, last_only)
        if own is not None:
            self._check(logits[:1], own)
            self._checked = True
        return logits

    def mlp_weights(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Each block's up ``[F, d]``, down ``[d, F]`` and gate ``[F, d]`` maps."""
        places = self._places

        def weight(block: nn.Module, name: str) -> Tensor:
            stored = block.get_submodule(name).weight
            assert isinstance(stored, Tensor)
            return stored.T if places.transposed else stored

        return [
            (weight(b, places.up), weight(b, places.down), None if places.gate is None else weight(b, places.gate))
            for b in self._blocks
        ]

    def _logits(self, tokens_BT: Tensor, last_only: bool) -> Tensor:
        with _own_forward(self.model):
            output = self.model(
                input_ids=tokens_BT,
                use_cache=False,
                output_attentions=False,
                output_hidden_states=False,
                return_dict=True,
                logits_to_keep=1 if last_only else 0,
            )
        return output.logits[:, -1] if last_only else output.logits

    def _check(self, observed: Tensor, own: Tensor) -> None:
        """Whether the attention that was observed is the model's own."""
        wide = torch.promote_types(own.dtype, torch.float32)
        observed, own = observed.to(wide), own.to(wide)
        worst, scale = (observed - own).abs().max(), own.std()
        # Logits that are not finite are refused by the measurement, which knows where they come from.
        if worst > _TOLERANCE.get(next(self.model.parameters()).dtype, _TOLERANCE_HALF) * scale + 1e-6:
            raise UsageError(
                f"this {self.config.model_type} model's attention is no plain causal softmax: measured as one, its "
                f"logits are off by {float(worst / scale):.2g} of their standard deviation"
            )

    @contextmanager
    def _observed(self, observer: Observer) -> Iterator[None]:
        """Our attention and hooks, for one pass."""
        _register()
        configs = [
            config for m in self.model.modules() if hasattr(config := getattr(m, "config", None), _IMPLEMENTATION)
        ]
        before = [(config, getattr(config, _IMPLEMENTATION)) for config in configs]
        watched = [block.get_submodule(self._places.attn) for block in self._blocks]
        handles = []
        try:
            for layer, (block, attn) in enumerate(zip(self._blocks, watched, strict=True), start=1):
                _WATCHED[attn] = layer, observer
                handles += _hook(block, layer, self._places, observer)
            for config in configs:
                setattr(config, _IMPLEMENTATION, _NAME)
            yield
        finally:
            for config, implementation in before:
                setattr(config, _IMPLEMENTATION, implementation)
            for handle in handles:
                handle.remove()
            for attn in watched:
                _WATCHED.pop(attn, None)


_IMPLEMENTATION = "_attn_implementation"


def _register() -> None:
    """Make our attention known to ``transformers``; again is no different."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        raise UsageError("measuring this model needs transformers 4.48 or later: pip install -U transformers") from None
    AttentionInterface.register(_NAME, _attend)


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """``accelerate`` puts an autocast around the forward of a model that it trains: without it, as the weights are."""
    attributes = vars(model)
    wrapped, own = attributes.get("forward"), attributes.get("_original_forward")
    if wrapped is None or own is None:
        yield
        return
    attributes["forward"] = own
    try:
        yield
    finally:
        attributes["forward"] = wrapped


def _hook(block: nn.Module, layer: int, places: _Places, observer: Observer) -> list[Any]:
    """Hooks that show an observer what passes through a block."""
    x_BTD: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x_BTD[:] = [args[0] if args else kwargs["hidden_states"]]
        if layer == 1:
            observer.residual("embedding", 0, x_BTD[0])

    def attended(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        observer.residual("attention", layer, x_BTD[0] + _first(output))

    def activated(module: nn.Module, args: tuple[Any, ...]) -> None:
        observer.neurons(layer, args[0])

    def attention_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        show_sublayer(observer, "attention", layer, output)

    def mlp_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        show_sublayer(observer, "mlp", layer, output)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x_BTD.clear()
        observer.residual("mlp", layer, _first(output))

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.get_submodule(places.o).register_forward_hook(attention_output),
        block.get_submodule(places.attn_added).register_forward_hook(attended),
        block.get_submodule(places.down).register_forward_pre_hook(activated),
        block.get_submodule(places.down).register_forward_hook(mlp_output),
        block.register_forward_hook(leave),
    ]


def _first(output: Any) -> Tensor:
    """Modules of ``transformers`` give a tensor, or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) else output
