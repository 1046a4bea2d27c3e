"""Gradients by the activations of the decoder, a block at a time, for any sharding of the weights.

The pass runs a copy of the decoder without values (on the meta device); each call gets the whole, detached weights of
one block. So no hook of a strategy runs, no parameter gets a gradient, and only one block's weights are in memory
beside the residual stream. The forward pass keeps only the residual stream; the backward pass runs each block again.
Gradients by weights, half of a backward pass, are never computed.

Legend: B sequences, T positions that predict, S targets, D width, H query heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...metrics.gradient_norms import HEAD_PLACES, GradientNorms
from ...models.adapters.attach import adapter_of, attach
from ...models.attention.document_mask import Documents
from ...models.attention.positions import Placement
from ...models.decoder import Decoder
from ...models.linear_cross_entropy import TokenLosses
from ...models.observe import Attended, Site
from ...models.tensor_shards import full_tensor


class _Enter(nn.Module):
    """The steps before the blocks as a module, so that its weights can be supplied per call."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, documents: Documents | None) -> tuple[Tensor, Placement]:
        return self.model.enter(tokens_BT, documents=documents)


class _Leave(nn.Module):
    """The steps after the blocks as a module, for the same reason."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BSD: Tensor, targets_BS: Tensor) -> TokenLosses:
        losses = self.model.leave(x_BSD, targets_BS)
        assert isinstance(losses, TokenLosses)
        return losses


class _Seen:
    """Observer of one block that keeps the tensors by which gradients are taken."""

    attended_BTD: Tensor
    attended: Attended

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site == "attention":
            self.attended_BTD = h_BTD

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        self.attended = attended

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""


class BlockGradients:
    """Collector of the gradients of batches, for a metric.

    Args:
        model: the decoder in any state; it is only read. If its weights are sharded, every rank must pass the same
            number of batches.
        norms: metric that the gradients are added to.
    """

    def __init__(self, model: Decoder, norms: GradientNorms) -> None:
        self.model, self.norms = model, norms
        with torch.device("meta"):
            plain = Decoder(model.config)
        attach(plain, adapter_of(model))
        # State that evaluation freezes, such as running moments, stays unchanged.
        self.plain = plain.eval()
        self.enter, self.leave = _Enter(plain), _Leave(plain)

    def _lent(self, *names: str) -> dict[str, Tensor]:
        """Gather whole parameters and buffers of some parts, by their names in :class:`_Enter` and :class:`_Leave`."""
        found = {}
        for name in names:
            part = self.model.get_submodule(name)
            for inside, tensor in [*part.named_parameters(), *part.named_buffers()]:
                found[f"model.{name}.{inside}"] = full_tensor(tensor)
        return found

    def _block(self, i: int, *arguments: Any) -> Tensor:
        """Run block ``i``, from 0, on its whole weights."""
        part = self.model.blocks[i]
        lent = {name: full_tensor(x) for name, x in [*part.named_parameters(), *part.named_buffers()]}
        out: Tensor = functional_call(self.plain.blocks[i], lent, arguments)
        return out

    def add(self, tokens_BT: Tensor, documents_BT: Tensor | None, counts: bool) -> None:
        """Add one batch of sequences.

        Args:
            tokens_BT: int64 token ids; the last column is predicted only.
            documents_BT: the number of each token's document, for a model with ``attention.documents``.
            counts: False to pass the batch without adding it, on a rank that has none left.
        """
        inputs_BT = tokens_BT[:, :-1]
        documents = None if documents_BT is None else Documents.of(documents_BT[:, :-1])
        states_BTD, place = self._forwards(inputs_BT, documents)
        targets_BS = tokens_BT[:, 1 + self.model.config.attention.first_prediction :]
        g_BTD = self._of_loss(states_BTD.pop(), targets_BS, counts)
        for i in reversed(range(len(states_BTD))):
            if counts:
                self.norms.after_mlp(i + 1, g_BTD)
            g_BTD = self._through_block(i, states_BTD.pop(), place, g_BTD, counts)
        if counts:
            self.norms.after_mlp(0, g_BTD)

    def _forwards(self, inputs_BT: Tensor, documents: Documents | None) -> tuple[list[Tensor], Placement]:
        """Return the input of every block and the output of the last, and the placement of positions."""
        x_BTD, place = functional_call(self.enter, self._lent("embed", "positions"), (inputs_BT, documents))
        states_BTD = [x_BTD]
        for i in range(len(self.plain.blocks)):
            states_BTD.append(self._block(i, states_BTD[-1], place))
        return states_BTD, place

    def _of_loss(self, x_BTD: Tensor, targets_BS: Tensor, counts: bool) -> Tensor:
        """Return the gradient of each sequence's mean loss by the last block's output."""
        x_BTD = x_BTD.detach().requires_grad_()
        last = self._lent("norm", "embed" if self.model.head is None else "head")
        with torch.enable_grad():
            losses = functional_call(self.leave, last, (x_BTD[:, -targets_BS.shape[1] :], targets_BS))
            # Sequences do not see one another: the gradient of the sum has that of each one.
            loss_sum = losses.objective * len(x_BTD)
            (g_BTD,) = torch.autograd.grad(loss_sum, x_BTD)
        if counts:
            self.norms.update(loss_sum.detach(), len(x_BTD))
        return g_BTD

    def _through_block(self, i: int, x_BTD: Tensor, place: Placement, g_BTD: Tensor, counts: bool) -> Tensor:
        """Map the gradient by a block's output to the one by its input, and add those inside."""
        x_BTD, seen = x_BTD.detach().requires_grad_(), _Seen()
        with torch.enable_grad():
            out_BTD = self._block(i, x_BTD, place, seen)
            attended = seen.attended
            inside = (seen.attended_BTD, attended.q_BHTK, attended.k_BHTK, attended.v_BHTK)
            # A part of the user's own may not use all of them.
            g_BTD, of_attended, *of_heads = torch.autograd.grad(
                out_BTD, (x_BTD, *inside), g_BTD, allow_unused=True, materialize_grads=True
            )
        if counts:
            self.norms.after_attention(i + 1, of_attended)
            self.norms.in_heads(i + 1, dict(zip(HEAD_PLACES, of_heads, strict=True)))
        return g_BTD
