"""The backward snapshot: norms of the loss gradient by place and position, of our decoder and of ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F

from ..errors import RunError, UsageError
from ..metrics.declarations.outliers_and_gradients import GRADIENTS
from ..metrics.gradient_norms import HEAD_PLACES, GradientNorms, GradientResult, first_over_others
from ..models.adapters import adapter_of, attach
from ..models.attention.document_mask import Documents
from ..models.attention.positions import Placement
from ..models.decoder import Decoder
from ..models.linear_cross_entropy import TokenLosses
from ..models.observe import Attended, Site
from ..models.tensor_shards import full_tensor
from .hf import HFModel
from .measurement import Batches, Measurement, evaluation_mode
from .observed_metrics import sizes_of

# ---------------------------------------------------------------- block gradients
# Gradients by the activations of the decoder, a block at a time, for any sharding of the weights.
#
# The pass runs a copy of the decoder without values (on the meta device); each call gets the whole, detached weights
# of one block. So no hook of a strategy runs, no parameter gets a gradient, and only one block's weights are in
# memory beside the residual stream. The forward pass keeps only the residual stream; the backward pass runs each
# block again. Gradients by weights, half of a backward pass, are never computed.
#
# Legend: B sequences, T positions that predict, S targets, D width, H query heads, K head width.


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


# ---------------------------------------------------------------- graph gradients
# Gradients by the activations of a model of ``transformers``, from the graph of its own forward pass.
#
# Legend: B sequences, T positions that predict, D width, V vocabulary, H query heads, K head width.

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
        # A copy: models may scale their embeddings in place, which torch forbids where a graph begins.
        return x_BTD.detach().requires_grad_().clone()

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

    def __init__(self, model: HFModel, norms: GradientNorms) -> None:
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


# ---------------------------------------------------------------- the backward snapshot
# Norms of the loss gradient by place and position, beside the results of the forward pass.


@torch.inference_mode(False)
def measure_gradients(
    model: Decoder | HFModel,
    probe_NT: np.ndarray,
    *,
    batch_size: int = 64,
    documents_NT: np.ndarray | None = None,
) -> Measurement:
    """Measure the norms of the gradient of the next-token loss by a model's activations (definitions §16, [GS]).

    Collective: call on every rank. Each passes its part of the probe and returns the result of the whole probe.

    Args:
        model: the decoder, sharded or not, or a wrapped one of ``transformers``; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``, T at least 3.
        batch_size: sequences in one pass; the result does not depend on it.
        documents_NT: the number of each token's document, int64 ``[N, T]``; by default a sequence is one document.

    Raises:
        UsageError: the model was made in ``torch.inference_mode``.
        RunError: a gradient is NaN or inf; names the first place in the backward pass.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UsageError("gradients: the model was made in torch.inference_mode, which has none; load it outside")
    sizes = sizes_of(model.config, probe_NT.shape[1])
    norms = GradientNorms(sizes.n_layers, sizes.n_heads, sizes.seq_len).to(model.device)
    apart = documents_NT is not None and isinstance(model, Decoder) and model.config.attention.documents
    with evaluation_mode(model):
        way = BlockGradients(model, norms) if isinstance(model, Decoder) else GraphGradients(model, norms)
        if apart:
            assert documents_NT is not None
            for both_B2T, counts in Batches(model, np.stack([probe_NT, documents_NT], 1), batch_size):
                tokens_BT, documents_BT = both_B2T.unbind(1)
                way.add(tokens_BT, documents_BT, counts)
        else:
            for tokens_BT, counts in Batches(model, probe_NT, batch_size):
                way.add(tokens_BT, None, counts)
        # Every rank has the sums of all, and raises with the others.
        found = norms.compute()
    _check_finite(found)
    return _named(found)


def with_gradients(found: Measurement, gradients: Measurement) -> Measurement:
    """Merge the forward and the backward measurement of a probe."""
    return replace(found, scalars=found.scalars | gradients.scalars, arrays=found.arrays | gradients.arrays)


def _named(found: GradientResult) -> Measurement:
    """Return the results under their declared names."""
    sinks = {place: first_over_others(found.heads[place]) for place in ("key", "value")}
    arrays = {
        "gradient_sink": first_over_others(found.mlp),
        **{f"gradient_sink_{place}": ratio for place, ratio in sinks.items()},
        "gradient_mlp": found.mlp,
        "gradient_attention": found.attention,
        **{f"gradient_{place}": found.heads[place] for place in HEAD_PLACES},
    }
    # Places that a model of transformers does not show have no arrays.
    arrays = {name: array for name, array in arrays.items() if not np.isnan(array).all()}
    scalars = {"gradient_loss": found.loss}
    for quantity in GRADIENTS:
        if quantity.scalar and quantity.name in arrays:
            seen = arrays[quantity.name][~np.isnan(arrays[quantity.name])]
            scalars[quantity.name] = quantity.reduced(seen)
    return Measurement(scalars, arrays)


def _check_finite(found: GradientResult) -> None:
    """Raise RunError that names the first place, from the last block on, where a gradient is NaN or inf."""
    for state in reversed(range(len(found.mlp))):
        places = {f"the residual stream after block {state}" if state else "the embeddings": found.mlp[state]}
        if state:
            places[f"the residual stream after the attention of block {state}"] = found.attention[state - 1]
            for place, norms in found.heads.items():
                plural = {"query": "queries", "key": "keys", "value": "values"}[place]
                places[f"the {plural} of block {state}"] = norms[state - 1]
        for name, norms in places.items():
            if np.isinf(norms).any():
                raise RunError(f"the loss gradient is NaN or inf, first by {name}")
