"""Gradients by the activations of our decoder, a block at a time, of weights that may be sharded in any way.

The pass runs a copy of the decoder without values (on the meta device), whose modules are lent the whole, detached
weights of one block for one call. So no hook of a strategy runs, no parameter gets a gradient, and there is room for
one block's weights beside the residual stream. Forwards nothing but the residual stream is kept; backwards each block
runs again. Gradients by weights, half of a backward pass, are never computed.

Legend: B sequences, T positions that predict, S targets, D width, H query heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...metrics.backward.gradient_norms import HEAD_PLACES, GradientNorms
from ...models.adapters.attach import adapter_of, attach
from ...models.attention.document_mask import Documents
from ...models.attention.positions import Placement
from ...models.decoder import Decoder
from ...models.linear_cross_entropy import TokenLosses
from ...models.observe import Attended, Site
from ...models.tensor_shards import full_tensor


class _Enter(nn.Module):
    """What comes before the blocks, as a module: its weights can be lent."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, documents: Documents | None) -> tuple[Tensor, Placement]:
        return self.model.enter(tokens_BT, documents=documents)


class _Leave(nn.Module):
    """What comes after them, as one."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BSD: Tensor, targets_BS: Tensor) -> TokenLosses:
        losses = self.model.leave(x_BSD, targets_BS)
        assert isinstance(losses, TokenLosses)
        return losses


class _Seen:
    """An observer of one block: the tensors that gradients are taken by."""

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
    """Adds the gradients of batches to a metric.

    Args:
        model: the decoder in any state, which is only read from. Where its weights are sharded, every rank passes as
            many batches.
        norms: what they are added to.
    """

    def __init__(self, model: Decoder, norms: GradientNorms) -> None:
        self.model, self.norms = model, norms
        with torch.device("meta"):
            plain = Decoder(model.config)
        attach(plain, adapter_of(model))
        # What is frozen in evaluation, such as running moments, stays as it is.
        self.plain = plain.eval()
        self.enter, self.leave = _Enter(plain), _Leave(plain)

    def _lent(self, *names: str) -> dict[str, Tensor]:
        """Whole parameters and buffers of some parts, by their names in :class:`_Enter` and :class:`_Leave`."""
        found = {}
        for name in names:
            part = self.model.get_submodule(name)
            for inside, tensor in [*part.named_parameters(), *part.named_buffers()]:
                found[f"model.{name}.{inside}"] = full_tensor(tensor)
        return found

    def _block(self, i: int, *arguments: Any) -> Tensor:
        """Block ``i``, from 0, on the whole weights."""
        part = self.model.blocks[i]
        lent = {name: full_tensor(x) for name, x in [*part.named_parameters(), *part.named_buffers()]}
        out: Tensor = functional_call(self.plain.blocks[i], lent, arguments)
        return out

    def add(self, tokens_BT: Tensor, documents_BT: Tensor | None, counts: bool) -> None:
        """One batch of sequences.

        Args:
            tokens_BT: int64 token ids; the last column is predicted only.
            documents_BT: the number of each token's document, for a model with ``attention.documents``.
            counts: whether it is added; a rank that has none left passes one all the same.
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
        """The input of every block and the output of the last, and what blocks know about positions."""
        x_BTD, place = functional_call(self.enter, self._lent("embed", "positions"), (inputs_BT, documents))
        states_BTD = [x_BTD]
        for i in range(len(self.plain.blocks)):
            states_BTD.append(self._block(i, states_BTD[-1], place))
        return states_BTD, place

    def _of_loss(self, x_BTD: Tensor, targets_BS: Tensor, counts: bool) -> Tensor:
        """The gradient of each sequence's mean loss by the last block's output."""
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
        """From the gradient by a block's output to the one by its input; those inside are added."""
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
