"""The decoder for ``transformers``: its forward pass, its cache, and the arguments that it refuses.

Legend: B sequences, T tokens of this call, S tokens so far with these, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...attention.document_mask import Documents
from ...attention.kv_cache import LayerCache
from ...decoder import Decoder
from ...linear_cross_entropy import IGNORED
from ...observe import Attended
from .hub_config import BirthmarkConfig

#: The library's name of the cache in outputs, and in calls of ``generate``: "past_key_values" before version 5.24.
_CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


class CachedLayer(LayerCache):
    """Keys and values of one block in a cache of ``transformers``."""

    def __init__(self, cache: Any, layer: int, length: int) -> None:
        self.cache, self.layer, self.length = cache, layer, length

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the next T positions; return all so far."""
        k_BGSK, v_BGSK = self.cache.update(k_BGTK, v_BGTK, self.layer)
        # A static cache returns the room for later positions too.
        return k_BGSK[:, :, : self.length], v_BGSK[:, :, : self.length]


class KeptTensors:
    """Observer that keeps the tensors for ``output_hidden_states`` and ``output_attentions``."""

    def __init__(self, wants_attentions: bool) -> None:
        self.wants_attentions = wants_attentions
        self.hidden_states: list[Tensor] = []
        self.attentions: list[Tensor] = []

    def residual(self, site: str, layer: int, h_BTD: Tensor) -> None:
        """Keep the embeddings and the outputs of blocks."""
        if site != "attention":
            self.hidden_states.append(h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """Keep the weights on tokens ``[B, H, T, S]``; with extra keys or similarities, rows need not sum to 1."""
        if self.wants_attentions:
            self.attentions.append(attended.weights.rows(0, attended.q_BHTK.shape[2]))

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """Ignore hidden activations, which nothing requests."""


def documents_of_mask(attention_mask: Tensor | None, n_sequences: int, n_queries: int, first: int) -> Documents | None:
    """Express tokens and padding as two documents: neither sees the other, and positions count from the first token.

    Args:
        attention_mask: ``[B, S]``, 1 for tokens and 0 for padding on one side; None if all are tokens. Or the form that
            ``generate`` builds for a static cache, ``[B, 1, T, S or more]``: true, or 0, where a query may see a key.
        n_sequences: B.
        n_queries: T.
        first: positions before these.

    Raises:
        ValueError: another shape, or padding between tokens.
    """
    if attention_mask is None:
        return None
    shape = (n_sequences, first + n_queries)
    if attention_mask.ndim == 4:
        # The last query may look at every token.
        last_BS = attention_mask[:, 0, -1, : shape[1]]
        attention_mask = last_BS if last_BS.dtype == torch.bool else last_BS == 0
    if tuple(attention_mask.shape) != shape:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}: give {list(shape)}, 1 of tokens")
    number_BS = attention_mask.long() - 1
    if not number_BS.any():
        return None
    ends_BS = number_BS[:, 1:] < number_BS[:, :-1]
    begins_BS = number_BS[:, 1:] > number_BS[:, :-1]
    if bool((ends_BS.sum(1) + begins_BS.sum(1) > 1).any()):
        raise ValueError("attention_mask has padding between tokens: pad on one side")
    documents = Documents.of(number_BS)
    return Documents(number_BS, documents.position_BT[:, first:])


class BirthmarkForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with the methods of ``transformers``: loading, saving, ``generate``, ``Trainer``."""

    config_class = BirthmarkConfig
    config: BirthmarkConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 - as the library declares it
    # Moments of values, if an arm has them: differences that bfloat16 would lose.
    _keep_in_fp32_modules_strict = {"rho"}  # noqa: RUF012

    def __init__(self, config: BirthmarkConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.model_config())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding table."""
        return self.decoder.embed

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output head; None if the embedding table is the head."""
        return self.decoder.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refuse the call: the sizes of tables are part of the architecture."""
        raise ValueError("resize_token_embeddings: the vocabulary of this model is fixed; use the ids that it has")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache: Any = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Compute next-token logits, and the loss if labels are given.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, S]``, 1 for tokens and 0 for padding, which is on one side; for a static cache also
                the library's own ``[B, 1, T, S]``.
            past_key_values: a cache of the library; holds the positions before these tokens; these are added.
            labels: int64 ``[B, T]``, −100 for those that do not count; token t + 1 is compared with the logits of t.
            use_cache: return a cache; by default in evaluation mode.
            logits_to_keep: number of last positions that get logits, or their indices; 0 means all.
            output_hidden_states: return the embeddings and each block's output, the last one after the final norm.
            output_attentions: return each block's weights on tokens ``[B, H, T, S]``.
            return_dict: False for a tuple.
            cache: ``past_key_values``, by the name that the library has for it since version 5.24.

        Raises:
            ValueError: a cache by both names; an impossible mask; in a model whose first positions see one another,
                padding, or a cache that holds a part of them.
        """
        model, config = self.decoder, self.decoder.config
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one: give it by one of them")
        cache = past_key_values if cache is None else cache
        if cache is None and (not self.training if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        n_sequences, n_queries = input_ids.shape
        first = 0 if cache is None else int(cache.get_seq_length())
        if 0 < first < (config.attention.prefix or 0):
            raise ValueError(
                f"the first {config.attention.prefix} positions of this model see one another, and the cache has "
                f"{first}: give as many tokens at once, or use_cache=False"
            )
        documents = documents_of_mask(attention_mask, n_sequences, n_queries, first)
        if documents is not None and config.attention.prefix is not None:
            raise ValueError("attention_mask with padding: the first positions of this model see one another, pad none")
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        shown = KeptTensors(bool(wants_weights)) if wants_states or wants_weights else None

        x_BTD, place = model.enter(input_ids, shown, first, documents)
        for i, block in enumerate(model.blocks):
            x_BTD = block(x_BTD, place, shown, None if cache is None else CachedLayer(cache, i, first + n_queries))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        logits = model.leave(x_BTD[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else kept])
        assert isinstance(logits, Tensor)
        loss = None
        if labels is not None:
            # Positions of a prefix that see their target predict nothing.
            at_T = torch.arange(first, first + n_queries, device=labels.device)
            labels = labels.masked_fill(at_T <= config.attention.first_prediction, IGNORED)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size)
        if shown is not None:
            shown.hidden_states[-1] = model.norm(x_BTD)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{_CACHE: cache},
            hidden_states=tuple(shown.hidden_states) if shown is not None and wants_states else None,
            attentions=tuple(shown.attentions) if shown is not None and wants_weights else None,
        )
        return output.to_tuple() if return_dict is False else output
