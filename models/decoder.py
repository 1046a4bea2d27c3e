"""The decoder: embeddings, blocks, output head.

Parameter names are a file format (definitions §1): renaming one changes every birth.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .attention.attention import Attention
from .attention.kv_cache import KeyValueCache, LayerCache
from .attention.positions import POSITIONS, Placement
from .config import ModelConfig
from .init import Embedding, Linear
from .mlp import MLP
from .norms import NORMS, sublayer_norms
from .observe import Observer, show_residual


class Block(nn.Module):
    """Residual block: attention, then MLP, or both side by side."""

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.layer = block + 1
        self.parallel = config.parallel_residual
        self.norm_attn, self.norm_attn_out = sublayer_norms(config)
        self.attn = Attention(config, block)
        self.norm_mlp, self.norm_mlp_out = sublayer_norms(config)
        self.mlp = MLP(config, block)

    def forward(
        self, x_BTD: Tensor, place: Placement, observer: Observer | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """``[B, T, D] → [B, T, D]``."""
        attention_BTD = self.attn(self.norm_attn(x_BTD), place, observer, cache)
        attended_BTD = x_BTD + self.norm_attn_out(attention_BTD)
        show_residual(observer, "attention", self.layer, attended_BTD)
        mlp_BTD = self.mlp(self.norm_mlp(x_BTD if self.parallel else attended_BTD), observer)
        x_BTD = attended_BTD + self.norm_mlp_out(mlp_BTD)
        show_residual(observer, "mlp", self.layer, x_BTD)
        return x_BTD


class Decoder(nn.Module):
    """One configurable decoder-only transformer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.positions = POSITIONS[config.positions](config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = NORMS[config.norm](config)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        last_only: bool = False,
        observer: Observer | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Next-token logits.

        Args:
            tokens_BT: int64 token ids ``[B, T]``, T at most ``max_seq_len`` where positions are learned.
            last_only: compute logits at the last position only.
            observer: is shown the places named in ``models/observe.py`` as the pass runs.
            cache: holds the positions before these tokens, and these from now on.

        Returns:
            Logits ``[B, T, V]``, or ``[B, V]`` with ``last_only``.
        """
        first = 0 if cache is None else cache.length
        x_BTD = self.positions.embed(self.embed(tokens_BT), first)
        place = self.positions.place(tokens_BT.shape[1], tokens_BT.device, first)
        show_residual(observer, "embedding", 0, x_BTD)
        for i, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, place, observer, None if cache is None else cache.layers[i])
        x = self.norm(x_BTD[:, -1] if last_only else x_BTD)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)
