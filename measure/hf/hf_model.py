"""A causal language model of ``transformers``, seen at the same named places as our own decoder."""

from __future__ import annotations

import inspect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import UsageError
from ...messages import one_line
from ...models.config import AttentionConfig, dotted
from ...models.observe import Attended, Observer, Site, Sublayer, Unseen, UnseenPlace
from ...models.tensor_shards import compute_dtype, full_shape, full_tensor
from .family_places import EXPERTS, FamilyPlaces, places_of
from .observed_pass import (
    Chain,
    ChangeAttention,
    ObservedPass,
    evaluating,
    expert_width,
    find,
    refusing,
    transformers_library,
    weights_in_memory,
)
from .same_attention import SameAttention, times_of_logits

_NO_INTERFACE = "it does not run through the attention interface of transformers"
_NO_ROW = "a model type without a row in Birthmark's table"
_OUTPUTS: tuple[tuple[Sublayer, UnseenPlace], ...] = (("attention", "attention_output"), ("mlp", "mlp_output"))


@dataclass
class Record:
    """Observer that records the places that a pass shows, and their shapes."""

    stream: dict[tuple[Site, int], torch.Size] = field(default_factory=dict)
    attentions: list[tuple[int, tuple[int, int, int]]] = field(default_factory=list)
    """Block, heads, and widths of queries and of values, for each attention."""
    n_units: dict[int, int] = field(default_factory=dict)
    outputs: set[tuple[Sublayer, int]] = field(default_factory=set)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.stream[site, layer] = h_BTD.shape

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        q_BHTK = attended.q_BHTK
        self.attentions.append((layer, (q_BHTK.shape[1], q_BHTK.shape[-1], attended.o_BHTK.shape[-1])))

    def sublayer(self, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.outputs.add((site, layer))

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""
        self.n_units[layer] = a_BTF.shape[-1]


def unseen_places(
    record: Record,
    blocks: Sequence[nn.Module],
    places: FamilyPlaces | None,
    shape: tuple[int, int, int],
    n_units: int,
    why_no_attention: str,
) -> tuple[Unseen, ...]:
    """List the places that an observed pass did not show.

    Args:
        record: record of the pass.
        blocks: blocks of the model.
        places: names of modules, if known.
        shape: query heads, and the widths of their queries and values.
        n_units: hidden units of a block's MLP.
        why_no_attention: reason of a block that has an attention and shows none.

    Raises:
        UsageError: the heads differ from the model's config.
    """
    layers = range(1, len(blocks) + 1)
    calls = Counter(layer for layer, _ in record.attentions)
    if wrong := [found for found in record.attentions if found[1] != shape]:
        layer, found = wrong[0]
        raise UsageError(
            f"block {layer} has {found[0]} heads of width {found[1]} and {found[2]}, the model's config says "
            f"{shape[0]} of {shape[1]} and {shape[2]}; it cannot be measured"
        )
    why: dict[tuple[UnseenPlace, str], list[int]] = {}
    for layer, block in zip(layers, blocks, strict=True):
        if calls[layer] != 1:
            has_none = places is not None and find(block, places.attn) is None
            reason = "it has no matrix of weights" if has_none else why_no_attention
            why.setdefault(("attention", "several in a block" if calls[layer] else reason), []).append(layer)
        if record.n_units.get(layer) != n_units or not n_units:
            why.setdefault(("neurons", _why_no_units(block, record.n_units.get(layer), places)), []).append(layer)
        if ("attention", layer) not in record.stream:
            why.setdefault(("after_attention", _NO_ROW), []).append(layer)
        for site, place in _OUTPUTS:
            if (site, layer) not in record.outputs:
                reason = _NO_ROW if places is None else "its last map is not in Birthmark's table"
                why.setdefault((place, reason), []).append(layer)
    return tuple(Unseen(place, tuple(of), reason) for (place, reason), of in why.items())


def _has_experts(block: nn.Module) -> bool:
    """Return True if a block's MLP is a mixture of experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in block.named_modules())


def _why_no_units(block: nn.Module, n_units: int | None, places: FamilyPlaces | None) -> str:
    if n_units is not None:
        return f"there are {n_units} of them, in other blocks another number"
    if _has_experts(block):
        return "a mixture of experts"
    return _NO_ROW if places is None else "no dense MLP"


@dataclass(frozen=True)
class Looked:
    """Findings of the first look at a model, none of which holds the model."""

    list: int
    """Number of the list that holds its blocks, among those of the right length."""
    unseen: tuple[Unseen, ...]
    attends: bool
    """True if attentions are seen."""
    sees_later: bool
    """True if queries see later keys."""


# ---------------------------------------------------------------- model of transformers
# Causal language models of ``transformers``, observed at the same named places as the decoder.
#
# Attention runs as this package's softmax, whose weights can be read; forward hooks show the residual stream and the
# hidden units. Both are in place only during an observed pass. Places that a model does not show are :class:`Unseen`,
# by name.

#: Number of tokens of the one sequence that shows which places can be seen.
_LOOK = 64


@dataclass(frozen=True)
class HFConfig:
    """Shape of a model of ``transformers``, under the names of ModelConfig."""

    model_type: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    """Width of queries and keys of a head."""
    ff: int
    """Hidden units of a block's MLP; 0 where none is seen."""
    vocab_size: int
    max_seq_len: int | None
    """The most positions of a learned table; None where any length can be read."""
    d_value: int
    """Width of values and outputs of a head."""
    n_experts: int = 0
    """Number of experts of a block, if any block has some."""
    d_expert: int = 0
    """Hidden units of an expert; 0 where they are not seen."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Features of the attention that decide which figures exist: sinks in the softmax, a gate."""

    @property
    def position_limit(self) -> int | None:
        """See `ModelConfig.position_limit`."""
        return self.max_seq_len


#: Fields of a config that no pass of a causal model in evaluation mode reads, among those that the library and other
#: tools write; ends and beginnings of their names.
_UNREAD = {
    *("_name_or_path", "transformers_version", "unsloth_version", "architectures", "auto_map", "tokenizer_class"),
    *("dtype", "torch_dtype", "torchscript", "use_cache", "return_dict", "gradient_checkpointing", "pretraining_tp"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "_attn_implementation_autoset"),
    *("router_aux_loss_coef", "router_jitter_noise", "layerdrop", "initializer_range", "init_std", "n_ctx"),
    *("finetuning_task", "problem_type", "decoder_start_token_id"),
}
_UNREAD_ENDS = ("dropout", "pdrop", "_token_id")
_UNREAD_BEGINNINGS = ("id2label", "label2id", "task_specific_params", "summary_")


class HFModel(nn.Module):
    """A ``transformers`` model with a language-model head, called and observed like a Decoder.

    The model itself is shared, not copied, and unchanged after a pass: hooks and attention are restored.

    Args:
        model: a ``…ForCausalLM`` or ``…LMHeadModel``. All places of the families of ``MODEL_TYPES`` are seen; for any
            other model, the residual stream after each block, and attentions that run through the library's interface.

    Raises:
        UsageError: not such a model, or its blocks cannot be found.
    """

    decoder: nn.Module
    """The model without its head: gives final hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = getattr(model, "_orig_mod", model)  # hooks would break a compiled graph
        transformers_library(f"a {type(self.model).__name__}")
        kinds = (kind.__name__ for module in self.model.modules() for kind in type(module).__mro__)
        if masked := next((kind for kind in kinds if kind.endswith("ForMaskedLM")), None):
            raise UsageError(
                f"{masked} is not measured: it fills masked tokens, and sinks and token preference are defined for "
                "causal language models; give one that predicts next tokens (…ForCausalLM)"
            )
        whole = self.model.config
        if getattr(whole, "is_encoder_decoder", False):
            raise UsageError(
                f"{type(self.model).__name__} is an encoder and a decoder, which reads other tokens than it is given: "
                "measure a decoder alone, as the …ForCausalLM classes have it"
            )
        config = whole.get_text_config(decoder=True)
        self._type = config.model_type or whole.model_type
        self._places = places_of(self._type, config)
        self.__dict__["decoder"] = self.model.get_decoder()  # once among the modules is enough
        if not isinstance(getattr(self.embeddings, "weight", None), Tensor):
            raise self._refusal("it has no one table of token embeddings")
        head = self.model.get_output_embeddings()
        if head is None:
            raise self._refusal("it has no language-model head")
        # The decoder of a family with encoders has sizes of its own; the plain names are the encoder's.
        n_blocks = getattr(config, "decoder_layers", config.num_hidden_layers)
        self._lists = _lists(self.decoder, n_blocks, self._places)
        if not self._lists:
            raise self._refusal(f"no list of {n_blocks} blocks in it")
        self._blocks = self._lists[0]
        devices = {str(where) for where in getattr(self.model, "hf_device_map", {}).values()} - {"cpu", "disk", "meta"}
        if len(devices) > 1:
            raise UsageError(
                f"the blocks of this {self._type} model run on several devices ({', '.join(sorted(devices))}); load it "
                "on one: what does not fit may lie on the CPU or on disk (device_map, max_memory)"
            )
        # Many families run through the interface and do not declare it: `unseen` finds those that do not.
        self._why_no_attention = _NO_INTERFACE
        self.config = _shape(config, self._type, self._blocks, self._places)
        self._looked: Looked | None = None
        self.change_attention: ChangeAttention | None = None
        """Function that changes the value aggregations of observed passes, where it is set
        (measure/interventions.py).
        """

    @property
    def definition(self) -> dict[str, str]:
        """Class and config, as JSON by dotted names: with its weights and buffers, all that decides the results of a
        pass.
        """
        fields = dotted(self.model.config.to_dict())
        kind = type(self.model)
        # Code that comes with a model lies in a module of its folder.
        return {"class": f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"} | {
            name: json.dumps(value, sort_keys=True, default=str)
            for name, value in fields.items()
            if not (
                name.rpartition(".")[2] in _UNREAD or name.endswith(_UNREAD_ENDS) or name.startswith(_UNREAD_BEGINNINGS)
            )
        }

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks, first to last."""
        return self._blocks

    @property
    def embeddings(self) -> nn.Embedding:
        """The table of token embeddings."""
        table: nn.Embedding = self.model.get_input_embeddings()
        return table

    @property
    def final_width(self) -> int:
        """Width of the input of the language-model head."""
        return full_shape(_weight(self.model.get_output_embeddings()))[1]

    @property
    def device(self) -> torch.device:
        """Device that token ids must be on."""
        table, hook = self.embeddings.weight, getattr(self.embeddings, "_hf_hook", None)
        # Weights that accelerate keeps elsewhere are on the meta device, between passes.
        return torch.device(hook.execution_device) if table.is_meta and hook is not None else table.device

    def forward(self, tokens_BT: Tensor, *, last_only: bool = False, observer: Observer | None = None) -> Tensor:
        """Compute next-token logits ``[B, T, V]``, or ``[B, V]`` with ``last_only``, like a Decoder.

        Raises:
            UsageError: see :meth:`unseen`.
        """
        if observer is None:
            return self._logits(tokens_BT, last_only)
        looked = self.look(tokens_BT.shape[1])  # before the observer holds anything
        with self._pass(observer, attends=looked.attends, change=self.change_attention).running():
            return self._logits(tokens_BT, last_only)

    def unseen(self, seq_len: int = _LOOK) -> tuple[Unseen, ...]:
        """List the places that this model does not show; see :meth:`look`."""
        return self.look(seq_len).unseen

    @property
    def sees_later(self) -> bool:
        """True if queries see later keys; see :meth:`look`."""
        return self.look().sees_later

    def remember(self, looked: Looked) -> None:
        """Take over the findings of an earlier look at the same model."""
        self._looked, self._blocks = looked, self._lists[looked.list]

    @torch.no_grad()
    def look(self, seq_len: int = _LOOK) -> Looked:
        """Look at the model the first time, by one sequence, read once without and once with observation. Collective:
        call on every rank.

        Raises:
            UsageError: observation changes the results of a model of a known family, or a pass fails.
        """
        if self._looked is None:
            length = min(seq_len, _LOOK, self.config.max_seq_len or _LOOK)
            with refusing(self.model), evaluating(self.model):  # dropout would make each pass another
                tokens_1T = torch.arange(length, device=self.device)[None] % self.config.vocab_size
                record, attends, sees_later = self._look(tokens_1T)
            config = self.config
            shape = config.n_heads, config.d_head, config.d_value
            unseen = unseen_places(record, self._blocks, self._places, shape, config.ff, self._why_no_attention)
            self._looked = Looked(self._lists.index(self._blocks), unseen, attends, sees_later)
        return self._looked

    @property
    def routed(self) -> tuple[int, ...]:
        """Blocks, from 1, whose experts are seen."""
        if self._places is None:
            return ()
        return tuple(layer for layer, block in enumerate(self._blocks, start=1) if find(block, EXPERTS) is not None)

    def mlp_weights(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return a block's (from 1) up ``[F, d]``, down ``[d, F]`` and gate ``[F, d]`` maps; None if its hidden units
        are not seen. Collective: call on every rank.
        """
        hidden = {layer for unseen in self.unseen() if unseen.place == "neurons" for layer in unseen.layers}
        if self._places is None or layer in hidden:
            return None
        return _mlp_weights(self._blocks[layer - 1], self._places)

    def output_weights(self, layer: int) -> Tensor | None:
        """Return the map ``[d, C]`` of a block (from 1) from its head outputs, joined over heads, to the residual
        stream; None if it is unknown or does not exist. Collective: call on every rank.
        """
        module = None if self._places is None else find(self._blocks[layer - 1], self._places.o)
        if self._places is None or module is None:
            return None
        return _linear_map(module, self._places.mlp.transposed)

    def unit_readers(self) -> dict[int, nn.Module]:
        """Return, by block from 1, the map that reads the hidden units, if known."""
        return self._maps(lambda places: places.mlp.down)

    def mlp_readers(self) -> dict[int, nn.Module]:
        """Return, by block from 1, the map from the residual stream to the hidden units, if known."""
        return self._maps(lambda places: places.mlp.up)

    def _maps(self, name: Callable[[FamilyPlaces], str]) -> dict[int, nn.Module]:
        if self._places is None:
            return {}
        found = ((layer, find(block, name(self._places))) for layer, block in enumerate(self._blocks, start=1))
        return {layer: module for layer, module in found if module is not None}

    # ---------------------------------------------------------------- passes

    def _look(self, tokens_1T: Tensor) -> tuple[Record, bool, bool]:
        """Observe one sequence. An unknown model whose attention differs from the observed one is then measured without
        its attention.

        Returns:
            The record; True if attentions are seen; True if queries see later keys.
        """
        same = SameAttention(self._attention_modules(tokens_1T))
        without, seen = Record(), Record()
        chains = [Chain(blocks) for blocks in self._lists]
        with ExitStack() as stack:
            for chain in chains:
                stack.enter_context(chain.watching())
            with self._pass(without, attends=False).running(), same.keeping():
                logits = self._logits(tokens_1T, last_only=False)
        if (blocks := self._chosen(chains)) is not self._blocks:
            self._blocks, self._why_no_attention = blocks, _NO_INTERFACE
            return self._look(tokens_1T)
        self._check_shapes(without, logits, tokens_1T)
        if not same.modules:
            return without, False, False
        observed = self._pass(seen, attends=True)
        with observed.running(), same.comparing(observed):
            off = self._logits(tokens_1T, last_only=False) - logits
        found = same.first_other()
        where = None if found is None else f"after the attention of block {found[0]}, by {found[1]:.2g} times"
        if where is None and bool(off.any()):
            with same.moving():
                allowed = self._logits(tokens_1T, last_only=False) - logits
            times = times_of_logits(off, allowed)
            where = f"in the logits, by {times:.2g} times" if times > 1 else None
        if where is None:
            return seen, True, observed.sees_later
        if self._places is not None:
            dtype = str(compute_dtype(self.model)).removeprefix("torch.")
            raise UsageError(
                f"this {self._type} model's attention is not what it should be: observed, it first differs {where} "
                f"what rounding in {dtype} allows; load it with attn_implementation='eager', or with another version "
                "of transformers"
            )
        self._why_no_attention = f"observed, it differs {where} what rounding allows"
        return without, False, observed.sees_later

    def _chosen(self, chains: Sequence[Chain]) -> list[nn.Module]:
        """Choose the blocks: the list whose modules hand the residual stream on from one to the next; else the only
        list of a model that ``transformers`` itself has, which may change the stream in between.
        """
        for blocks, chain in zip(self._lists, chains, strict=True):
            if chain.hands_on:
                return blocks
        is_library = len(chains) == 1 and type(self.decoder).__module__.startswith("transformers.models.")
        if chains[0].repeats or not (self._places is not None or is_library):
            why = "it calls one of its blocks more than once" if chains[0].repeats else "none reads what another gives"
            raise UsageError(
                f"this {self._type} model is not measured: in no list of {len(self._blocks)} modules does the output "
                f"of each enter the next ({why})"
            )
        return self._lists[0]

    def _check_shapes(self, record: Record, logits_1TV: Tensor, tokens_1T: Tensor) -> None:
        """Refuse a model with several residual streams, with positions of its own, or with logits of another size."""
        sizes, config = tokens_1T.shape, self.config
        shown = [(f"block {layer}" if layer else "the embedding", x) for (_, layer), x in record.stream.items()]
        expected = [(*sizes, config.d_model)] * len(shown) + [(*sizes, config.vocab_size)]
        for (place, shape), wanted in zip([*shown, ("its head", logits_1TV.shape)], expected, strict=True):
            if shape != wanted:
                raise UsageError(
                    f"this {self._type} model is not measured: {place} gives {list(shape)} where its config says "
                    f"{list(wanted)} (sequences, tokens, channels)"
                )

    def _attention_modules(self, tokens_1T: Tensor) -> dict[nn.Module, None]:
        """Return the attention modules of the blocks that have one, each once."""
        if self._places is not None:
            found = (find(block, self._places.attn) for block in self._blocks)
            return dict.fromkeys(module for module in found if module is not None)
        observed = self._pass(Record(), attends=True)
        try:
            with observed.running():
                self._logits(tokens_1T, last_only=True)
        except Exception as error:  # of any kind: the code of a model that looks its attention up elsewhere
            self._why_no_attention = f"it fails in Birthmark's place: {type(error).__name__}: {one_line(error)}"
            return {}
        return observed.attention_modules

    def _pass(self, observer: Observer, *, attends: bool, change: ChangeAttention | None = None) -> ObservedPass:
        return ObservedPass(
            observer, self._type, self._places, self._blocks, self.decoder, attends=attends, change=change
        )

    @property
    def _arguments(self) -> Mapping[str, inspect.Parameter]:
        """Arguments that the model's forward pass names."""
        return inspect.signature(type(self.model).forward).parameters

    def _logits(self, tokens_BT: Tensor, last_only: bool) -> Tensor:
        more = {
            "use_cache": False,
            "output_attentions": False,
            "output_hidden_states": False,
            "return_dict": True,
            "logits_to_keep": 1 if last_only else 0,
        }
        named = self._arguments
        hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
        # Granite's language-model classes hand the cache's field on without naming it.
        given = {name: more[name] for name in more if name in named or (hands_on and name == "use_cache")}
        with _forward_without_autocast(self.model):
            output = self.model(input_ids=tokens_BT, **given)
        logits: Tensor = output.logits
        return logits[:, -1] if last_only else logits

    def reader(self, n_positions: int) -> Callable[[Tensor], Tensor]:
        """Return a function from the next tokens ``[B, T]`` to the logits behind them ``[B, V]``, with a cache."""
        cache: Any = None
        # The name of it since version 5.24, and before.
        name = "cache" if "cache" in self._arguments else "past_key_values"

        def read(tokens_BT: Tensor) -> Tensor:
            nonlocal cache
            passed = self.model(input_ids=tokens_BT, **{name: cache}, use_cache=True)
            cache = passed[name]
            logits_BV: Tensor = passed.logits[:, -1]
            return logits_BV

        return read

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"this is not the {self._type} model that transformers has ({why})")


def _lists(decoder: nn.Module, n_layers: int, places: FamilyPlaces | None) -> list[list[nn.Module]]:
    """Find the lists that may be the decoder's blocks: those with the right number of modules, and of a known family
    the first with attentions in them, if any.
    """
    found = [list(m) for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    attending = [blocks for blocks in found if places is not None and any(find(block, places.o) for block in blocks)]
    return attending[:1] or found


def _shape(config: Any, model_type: str, blocks: list[nn.Module], places: FamilyPlaces | None) -> HFConfig:
    n_heads = getattr(config, "decoder_attention_heads", getattr(config, "num_attention_heads", 1))
    d_model = config.hidden_size
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError as error:  # the library's, for a field that differs from block to block
        raise UsageError(f"this {model_type} model is not measured: {one_line(error)}") from None
    width = getattr(config, "qk_head_dim", None) or head_dim or d_model // n_heads
    value_width = getattr(config, "v_head_dim", None) or width
    ff, limit, parts, n_experts, d_expert = 0, None, AttentionConfig(), 0, 0
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if (places is None or places.limited) and longest is not None and longest > 0:  # XLNet says −1 for none
        limit = longest
    if places is not None:
        transposed = places.mlp.transposed
        attentions = [found for block in blocks if (found := find(block, places.o)) is not None]
        if not attentions:
            raise UsageError(f"this is not the {model_type} model that transformers has (no {places.o} in its blocks)")
        value_width = _input_width(attentions[0], transposed) // n_heads
        # Latent attention alone has two widths.
        width = config.qk_nope_head_dim + config.qk_rope_head_dim if _is_latent(config) else value_width
        downs = [found for block in blocks if (found := find(block, places.mlp.down)) is not None]
        ff = _input_width(downs[0], transposed) if downs else 0
        mixtures: list[Any] = [found for block in blocks if (found := find(block, EXPERTS)) is not None]
        n_experts, d_expert = (mixtures[0].num_experts, expert_width(mixtures[0])) if mixtures else (0, 0)
        has_sinks = any(hasattr(find(block, places.attn), "sinks") for block in blocks)
        parts = AttentionConfig(
            normaliser="softmax_sink" if has_sinks else "softmax", gate="channel" if places.gated else "none"
        )
    heads = n_heads, d_model, width
    experts = n_experts, d_expert
    return HFConfig(
        model_type, len(blocks), *heads, ff, config.vocab_size, limit, value_width, *experts, attention=parts
    )


def _is_latent(config: Any) -> bool:
    return getattr(config, "qk_rope_head_dim", None) is not None


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _mlp_weights(block: nn.Module, places: FamilyPlaces) -> tuple[Tensor, Tensor, Tensor | None]:
    names = places.mlp

    def weight(name: str) -> Tensor:
        return _linear_map(block.get_submodule(name), names.transposed)

    up, down = weight(names.up), weight(names.down)
    if names.both:
        gate, up = up.chunk(2)
        return up, down, gate
    return up, down, None if names.gate is None else weight(names.gate)


#: Number of inputs at a time that show a map.
_INPUTS = 1024
#: Dtypes in which models run: those of weights that are no codes.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _is_stored(module: nn.Module) -> bool:
    """Return True if the weight of a linear map is all of it: no codes that need scales, no base of an adapter."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype in WEIGHT_DTYPES and not hasattr(module, "base_layer")


def _input_width(module: nn.Module, transposed: bool) -> int:
    if _is_stored(module):
        return full_shape(_weight(module))[0 if transposed else 1]
    width = getattr(module, "in_features", None)
    if not isinstance(width, int):
        raise UsageError(f"a {type(module).__name__} shows neither weights nor in_features: it cannot be measured")
    return width


@torch.no_grad()
def _linear_map(module: nn.Module, transposed: bool) -> Tensor:
    """Return the whole matrix ``[out, in]`` of a linear map.

    Adapters of ``peft`` and quantised weights have many forms: they are read as what the module makes of unit vectors.

    Args:
        module: the map.
        transposed: True if weights are stored as ``[in, out]``.
    """
    with weights_in_memory(module):
        if _is_stored(module):
            stored = full_tensor(_weight(module))
            stored = stored.clone() if hasattr(module, "_hf_hook") else stored
            return stored.T if transposed else stored
        parameters = dict(module.named_parameters())
        # ZeRO 3 gathers in the module's call.
        whole = {name: full_tensor(x) for name, x in parameters.items() if isinstance(x, DTensor)}
        dtypes = {x.dtype for x in parameters.values()} & {*WEIGHT_DTYPES}
        dtype, width = min(dtypes, key=lambda of: of.itemsize, default=torch.float32), _input_width(module, transposed)
        # Some quantised maps hold neither; they are for the CPU.
        device = next((x.device for x in itertools.chain(parameters.values(), module.buffers())), torch.device("cpu"))

        def outputs(x_ND: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(module, whole, (x_ND,))
            return found

        with evaluating(module):  # adapters have dropout
            zero_1D = torch.zeros(1, width, dtype=dtype, device=device)
            eye_DD = torch.eye(width, dtype=dtype, device=device)
            columns = [outputs(x_ND) - outputs(zero_1D) for x_ND in eye_DD.split(_INPUTS)]
        return torch.cat(columns).T


@contextmanager
def _forward_without_autocast(model: nn.Module) -> Iterator[None]:
    """Call the model, within the context, without the autocast that ``accelerate`` puts around its forward, in the
    dtype of its weights.
    """
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
