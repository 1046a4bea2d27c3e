"""The decoder: embeddings, blocks, output head; and text that it writes a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ..errors import UsageError
from .attention.attention import attention_of
from .attention.context_parallel import ContextGroup
from .attention.document_mask import Documents
from .attention.kv_cache import KeyValueCache, LayerCache
from .attention.positions import POSITIONS, Placement
from .config import ModelConfig
from .dropout import Dropout
from .experts.routed_mlp import Mixture
from .experts.routing_losses import GlobalChoices, RoutingCost, RoutingLosses
from .init import Embedding, Linear, ParameterRole
from .linear_cross_entropy import IGNORED, TokenLosses, linear_cross_entropy, soft_capped
from .mlp import MLP
from .norms import NORMS, cast_once, sublayer_norms
from .observe import Observer, show_residual, show_sublayer

# ---------------------------------------------------------------- output of the decoder from its last hidden states
# Logits, or losses of targets.
#
# Both are computed inside one module's forward pass, so that a strategy that shards weights gathers the table once.


def read_out(
    x: Tensor,
    weight_VD: Tensor,
    targets: Tensor | None = None,
    z_loss: float = 0.0,
    cap: float | None = None,
    n_counted: Tensor | None = None,
) -> Tensor | TokenLosses:
    """Compute logits ``[…, D] → […, V]``, soft-capped if ``cap`` is given; or the losses of ``targets`` ``[…]``.

    Computes in the dtype of ``x``, or of autocast: a strategy may have gathered the weights in a narrower one.
    """
    if targets is None:
        narrower = not torch.is_autocast_enabled(x.device.type)
        return soft_capped(F.linear(x, weight_VD.to(x.dtype) if narrower else weight_VD), cap)
    losses = linear_cross_entropy(
        x.flatten(0, -2), weight_VD, targets.flatten(), z_loss=z_loss, cap=cap, n_counted=n_counted
    )
    # Not by _replace: torch 2.11 cannot compile its result.
    return TokenLosses(*losses[:3], per_token=losses.per_token.view(targets.shape))


class Head(Linear):
    """Output head: a separate table of vectors, ``weight`` ``[V, D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.parameter_roles = {"weight": ParameterRole.HEAD}
        self.cap = config.logit_softcap

    @override
    def forward(  # type: ignore[override]
        self, x: Tensor, targets: Tensor | None = None, z_loss: float = 0.0, n_counted: Tensor | None = None
    ) -> Tensor | TokenLosses:
        return read_out(x, self.weight, targets, z_loss, self.cap, n_counted)


# ---------------------------------------------------------------- the decoder: embeddings, blocks, output head
# Parameter names are a file format (definitions §1): renaming one changes every birth.


def _dropped(x_BTD: Tensor, place: str, dropout: Dropout | None) -> Tensor:
    return x_BTD if dropout is None else dropout.of_stream(x_BTD, place)


def _added(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Add to the residual stream, which keeps its dtype: a norm behind a sublayer may be float32 under autocast."""
    return (x_BTD + y_BTD).to(x_BTD.dtype)


class Block(nn.Module):
    """Residual block: attention, then MLP, or both side by side."""

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.layer = block + 1
        self.parallel = config.parallel_residual
        self.norm_attn, self.norm_attn_out = sublayer_norms(config)
        self.attn = attention_of(config)(config, block)
        self.norm_mlp, self.norm_mlp_out = sublayer_norms(config)
        self.mlp = Mixture(config, block) if config.experts.in_block(block) else MLP(config, block)

    def forward(
        self,
        x_BTD: Tensor,
        place: Placement,
        observer: Observer | None = None,
        cache: LayerCache | None = None,
        losses: RoutingLosses | None = None,
    ) -> Tensor:
        """Apply the block, ``[B, T, D] → [B, T, D]``; a router's training losses are added to ``losses``."""
        dropout = place.dropout
        if dropout is not None:
            dropout = dropout.in_block(self.layer)
            place = replace(place, dropout=dropout)
        attention_BTD = self.attn(cast_once(self.norm_attn(x_BTD)), place, observer, cache)
        show_sublayer(observer, "attention", self.layer, attention_BTD)
        attended_BTD = _added(x_BTD, _dropped(self.norm_attn_out(attention_BTD), "attention", dropout))
        show_residual(observer, "attention", self.layer, attended_BTD)
        mlp_BTD = self.mlp(cast_once(self.norm_mlp(x_BTD if self.parallel else attended_BTD)), observer, losses)
        show_sublayer(observer, "mlp", self.layer, mlp_BTD)
        x_BTD = _added(attended_BTD, _dropped(self.norm_mlp_out(mlp_BTD), "mlp", dropout))
        show_residual(observer, "mlp", self.layer, x_BTD)
        return x_BTD


class Decoder(nn.Module):
    """Configurable decoder-only transformer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.narrow_residual = False
        """True if the residual stream has autocast's dtype: ``trainer.residual``."""
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.positions = POSITIONS[config.positions](config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = NORMS[config.norm](config)
        self.head = None if config.tie_embeddings else Head(config)

    @property
    def device(self) -> torch.device:
        """Device that token ids must be on."""
        return next(self.parameters()).device

    @overload
    def forward(
        self,
        tokens_BT: Tensor,
        *,
        last_only: bool = ...,
        observer: Observer | None = ...,
        cache: KeyValueCache | None = ...,
        documents_BT: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets_BS: Tensor,
        z_loss: float = ...,
        dropout: Dropout | None = ...,
        global_choices: GlobalChoices | None = ...,
        cache: KeyValueCache | None = ...,
        documents_BT: Tensor | None = ...,
        context: ContextGroup | None = ...,
    ) -> TokenLosses: ...

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets_BS: Tensor | None = None,
        z_loss: float = 0.0,
        dropout: Dropout | None = None,
        global_choices: GlobalChoices | None = None,
        last_only: bool = False,
        observer: Observer | None = None,
        cache: KeyValueCache | None = None,
        documents_BT: Tensor | None = None,
        context: ContextGroup | None = None,
    ) -> Tensor | TokenLosses:
        """Compute next-token logits, or the losses of targets, for which logits are never held all at once.

        Args:
            tokens_BT: int64 token ids ``[B, T]``, T at most ``max_seq_len`` if positions are learned.
            targets_BS: int64 ids of the tokens that follow the last S positions, −100 for those that do not count.
            z_loss: coefficient of the squared log-sum-exp in the losses.
            dropout: masks of a training pass.
            global_choices: function for the load-balance loss of experts in training: it sums the choices of each
                expert over the global batch that contains these tokens; None: they are the whole batch.
            last_only: compute logits at the last position only.
            observer: shown the places named in ``models/observe.py`` as the pass runs.
            cache: holds the positions before these tokens; these are added.
            documents_BT: for a model with ``attention.documents``, the number of each token's document in its sequence,
                rising, int64 ``[B, T]``, −1 for padding. By default a sequence is one document.
            context: group of processes that each pass a part of these sequences, the same in all of them, in training.
                Losses are those of the part, times the size of the group where they are means: their mean over the
                group is that of the sequences.

        Returns:
            Logits ``[B, T, V]``, or ``[B, V]`` with ``last_only``; losses if targets are given.
        """
        first = 0 if cache is None else cache.length
        if 0 < first < (self.config.attention.prefix or 0):
            raise ValueError(f"{first} positions are in the cache: attention.prefix has more, which see one another")
        documents = None if documents_BT is None else Documents.of(documents_BT)
        if documents is not None and (cache is not None or not self.config.attention.documents):
            raise ValueError("documents_BT is for a model with attention.documents, and goes with no cache")
        counts_BT = n_counted = n_chosen = None
        if self.training and targets_BS is not None and self.config.experts.is_on:
            counts_BT = _counting(tokens_BT, targets_BS)
        if context is not None:
            assert targets_BS is not None
            n_counted = (targets_BS != IGNORED).sum() / context.size
            if counts_BT is not None:
                n_chosen, counts_BT = counts_BT.sum() / context.size, context.part(counts_BT)
            # A prefix has no targets.
            targets_BS = F.pad(targets_BS, (tokens_BT.shape[1] - targets_BS.shape[1], 0), value=IGNORED)
            if dropout is not None:
                dropout = dropout.of_part(context.positions(tokens_BT.shape[1], tokens_BT.device), tokens_BT.shape[1])
            tokens_BT, targets_BS = context.part(tokens_BT), context.part(targets_BS)
        rows_BTD, table_VD = self.embed.with_table(tokens_BT)
        x_BTD, place = self.enter(tokens_BT, observer, first, documents, context, rows_BTD)
        if dropout is not None:
            x_BTD, place = dropout.of_stream(x_BTD, "embedding"), replace(place, dropout=dropout)
        if cache is not None:
            place = cache.placed(place, tokens_BT)
        routed = None if counts_BT is None else RoutingLosses(counts_BT, n_chosen)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, place, observer, None if cache is None else cache.layers[i], routed)
        if targets_BS is not None:
            x_BTD = x_BTD[:, -targets_BS.shape[1] :]
        left = self.leave(x_BTD[:, -1] if last_only else x_BTD, targets_BS, z_loss, n_counted, table_VD)
        return left if routed is None else self._with_routing(left, routed.cost(global_choices))

    def reader(self, n_positions: int) -> Callable[[Tensor], Tensor]:
        """Return a function from the next tokens ``[B, T]`` to the logits behind them ``[B, V]``, with a cache."""
        return CachedReader(self, self.config, n_positions)

    def enter(
        self,
        tokens_BT: Tensor,
        observer: Observer | None = None,
        first: int = 0,
        documents: Documents | None = None,
        context: ContextGroup | None = None,
        rows_BTD: Tensor | None = None,
    ) -> tuple[Tensor, Placement]:
        """Compute the input of the blocks ``[B, T, D]``, and the placement of its positions; from the rows of the
        embedding if given.
        """
        place = self.positions.place(tokens_BT.shape[1], tokens_BT.device, first, documents, context)
        x_BTD = self.positions.embed(self.embed(tokens_BT) if rows_BTD is None else rows_BTD, place)
        show_residual(observer, "embedding", 0, x_BTD)
        return cast_once(x_BTD) if self.narrow_residual else x_BTD, place

    def leave(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        z_loss: float = 0.0,
        n_counted: Tensor | None = None,
        table_VD: Tensor | None = None,
    ) -> Tensor | TokenLosses:
        """Apply the final norm and head to the blocks' output ``[…, D]``: return logits ``[…, V]``, or losses of
        targets. ``table_VD``: the embedding's table as its pass gave it, for a tied head.
        """
        x = self.norm(x)
        if self.head is None:
            table_VD = self.embed.weight if table_VD is None else table_VD
            return read_out(x, table_VD, targets_BS, z_loss, self.config.logit_softcap, n_counted)
        losses_or_logits: Tensor | TokenLosses = self.head(x, targets_BS, z_loss, n_counted)
        return losses_or_logits

    def _with_routing(self, losses: Tensor | TokenLosses, cost: RoutingCost) -> TokenLosses:
        """Add the routers' cost to the losses."""
        assert isinstance(losses, TokenLosses)
        experts = self.config.experts
        added = experts.load_balance * cost.load_balance + (experts.router_z_loss or 0.0) * cost.router_z
        seen = RoutingCost(*(part.detach() for part in cost))
        return TokenLosses(losses.objective + added, *losses[1:4], routing=seen)


def _counting(tokens_BT: Tensor, targets_BS: Tensor) -> Tensor:
    """Mark the positions ``[B, T]`` whose router choices count: those whose loss counts, and a prefix that predicts
    nothing.
    """
    counts_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    counts_BT[:, -targets_BS.shape[1] :] = targets_BS != IGNORED
    return counts_BT


# ---------------------------------------------------------------- text, a token at a time


class CachedReader:
    """Passes over the next tokens of some sequences, with a cache.

    The positions of a prefix see one another: until it is whole, each pass reads all tokens again.

    Args:
        model: the decoder, or a module around it.
        config: its config.
        n_positions: largest number of positions that will be read.
    """

    def __init__(self, model: Callable[..., Tensor], config: ModelConfig, n_positions: int) -> None:
        self.model, self.config, self.n_positions = model, config, n_positions
        self.cache = KeyValueCache(config, n_positions)
        self._in_prefix: list[Tensor] = []

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` behind the next tokens ``[B, T]``."""
        n_prefix = self.config.attention.prefix or 0
        if 0 < self.cache.length < n_prefix:
            tokens_BT = torch.cat([*self._in_prefix, tokens_BT], dim=1)
            self.cache = KeyValueCache(self.config, self.n_positions)
        self._in_prefix = [tokens_BT] if tokens_BT.shape[1] < n_prefix and not self.cache.length else []
        return self.model(tokens_BT, last_only=True, cache=self.cache)


#: Temperature below which float32 logits overflow; all that are not the largest have a weight of 0 long before.
_LEAST_TEMPERATURE = 1e-30


def choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Choose one token id per row, ``[B]``: the likeliest at temperature 0, else drawn from the ``top_k`` likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float()
    # Below the largest one, and finite where the temperature is next to 0.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / max(temperature, _LEAST_TEMPERATURE)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        likeliest = logits_BV.topk(top_k)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]


class TextModel(Protocol):
    """A model that reads on from what it has read."""

    @property
    def config(self) -> Any:
        """Shape of the model, with its ``position_limit``."""

    def reader(self, n_positions: int) -> Callable[[Tensor], Tensor]:
        """Return a function that reads the next tokens ``[B, T]`` and returns the logits ``[B, V]`` behind them."""


@torch.no_grad()
def generate(
    model: TextModel,
    tokens_BT: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Go on from ``tokens_BT``: yields the next token ids ``[B]``, ``n_tokens`` times.

    Args:
        model: a model in evaluation mode.
        tokens_BT: int64 ``[B, T]``, T at least 1.
        n_tokens: number of tokens to write.
        temperature: that logits are divided by; 0 takes the likeliest token.
        top_k: draw from so many of the likeliest only.
        seed: decides the draws, and nothing else.

    Raises:
        UsageError: more positions than the model has.
    """
    n_positions, longest = tokens_BT.shape[1] + n_tokens, model.config.position_limit
    if longest is not None and n_positions - 1 > longest:
        raise UsageError(
            f"{tokens_BT.shape[1]} tokens of prompt and {n_tokens} more: this model reads at most {longest}; ask for "
            f"at most {max(longest - tokens_BT.shape[1] + 1, 0)} tokens"
        )
    read = model.reader(n_positions)
    generator = torch.Generator(tokens_BT.device).manual_seed(seed)
    for _ in range(n_tokens):
        tokens_B = choose(read(tokens_BT), temperature, top_k, generator)
        yield tokens_B
        tokens_BT = tokens_B[:, None]
