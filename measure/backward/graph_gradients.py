"""Gradients by the activations of a model of ``transformers``, from the graph of its own forward pass.

Legend: B sequences, T positions that predict, D width, V vocabulary, H query heads, K head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ...errors import UsageError
from ...metrics.gradient_norms import HEAD_PLACES, GradientNorms
from ...models.observe import Attended, Site
from ..foreign import ForeignModel

#: Sequences whose whole graph is held at once.
_AT_ONCE = 8


class _Places:
    """Observer that keeps the tensors by which gradients are taken, and their places."""

    def __init__(self) -> None:
        self.after_mlp: dict[int, Tensor] = {}
        self.after_attention: dict[int, list[GradientEdge]] = {}
        self.heads: dict[int, Attended] = {}

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site == "attention":
            self.after_attention[layer] = _edges(h_BTD)
        else:
            self.after_mlp[layer] = h_BTD

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        self.heads[layer] = attended

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""


def _edges(h_BTD: Tensor) -> list[GradientEdge]:
    """Find the places in the graph that may hold the gradient by a shown residual stream.

    Either the shown tensor itself continues. Or it is a sum made for display: then its second term, the attention's
    output, continues, and the gradient by a sum equals that by each of its terms.
    """
    node: Any = h_BTD.grad_fn
    while "View" in node.name() or "Alias" in node.name():
        node = node.next_functions[0][0]
    found = [GradientEdge(node, 0)]
    if node.name().startswith("AddBackward"):
        found.append(GradientEdge(*node.next_functions[1]))
    return found


@contextmanager
def _from_embeddings(model: Any) -> Iterator[None]:
    """Begin the graph, within the context, at the token embeddings, whichever parameters are trained."""

    def begin(module: nn.Module, inputs: Any, x_BTD: Tensor) -> Tensor:
        return x_BTD.detach().requires_grad_()

    handle = model.get_input_embeddings().register_forward_hook(begin)
    try:
        yield
    finally:
        handle.remove()


class GraphGradients:
    """Collector of the gradients of batches, for a metric.

    Parameters get no gradients: they are no inputs of the differentiation, and their hooks do not run.

    Args:
        model: the wrapped model, which is left as it was.
        norms: sums that gradients are added to.

    Raises:
        UsageError: the model's parameters are sharded.
    """

    def __init__(self, model: ForeignModel, norms: GradientNorms) -> None:
        # Whoever gathers them does so for their own passes.
        if any(isinstance(p, DTensor) or p.numel() == 0 for p in model.parameters()):
            raise UsageError(
                f"the parameters of this {model.config.model_type} model are sharded over ranks, and its gradients "
                "cannot be measured: leave snapshot.gradients out"
            )
        self.model, self.norms = model, norms

    def add(self, tokens_BT: Tensor, documents_BT: Tensor | None, counts: bool) -> None:
        """Add one batch of sequences. Documents are not separated, as in the model's own passes."""
        if counts:
            for part_BT in tokens_BT.split(_AT_ONCE):
                self._add(part_BT)

    def _add(self, tokens_BT: Tensor) -> None:
        places = _Places()
        with torch.enable_grad(), _from_embeddings(self.model.model):
            logits_BTV = self.model(tokens_BT[:, :-1], observer=places)
        with torch.enable_grad():
            wide = torch.promote_types(logits_BTV.dtype, torch.float32)
            losses = F.cross_entropy(logits_BTV.flatten(0, 1).to(wide), tokens_BT[:, 1:].flatten(), reduction="sum")
            loss_sum = losses / (tokens_BT.shape[1] - 1)
        inputs: list[Any] = [*places.after_mlp.values()]
        for attended in places.heads.values():
            inputs += [attended.q_BHTK, attended.k_BHTK, attended.v_BHTK]
        n_certain = len(inputs)
        for edges in places.after_attention.values():
            inputs += edges
        gradients = torch.autograd.grad(loss_sum, inputs, allow_unused=True)
        found, perhaps = iter(gradients[:n_certain]), iter(gradients[n_certain:])
        self.norms.update(loss_sum.detach(), len(tokens_BT))
        for layer in places.after_mlp:
            self.norms.after_mlp(layer, next(found))
        for layer in places.heads:
            of_heads = {place: next(found) for place in HEAD_PLACES}
            # Some families show a copy that does not continue in the graph.
            if all(g is not None for g in of_heads.values()):
                self.norms.in_heads(layer, of_heads)
        for layer, edges in places.after_attention.items():
            for g in [g for g in [next(perhaps) for _ in edges] if g is not None][:1]:
                self.norms.after_attention(layer, g.view_as(places.after_mlp[layer]))
