"""The weights of a model that face its residual stream, read for the null ``matched`` (definitions §10)."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..metrics.matched_weights import StreamWeights, spread_rows
from ..models.by_block import BlockWeights, DecoderByBlock, HeldWeights, chosen_rows
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.parameter_shapes import parameter_shapes
from ..models.tensor_shards import full_tensor
from .hf import HFModel
from .hf.observed_pass import first_of

# ---------------------------------------------------------------- gains of the norms before the maps
# Gains of the norms through which the maps of a model of ``transformers`` read its residual stream.
#
# The norm before a map is found in a pass: it is the one whose output the map receives. So families need no table.


@torch.no_grad()
def gains_before(model: HFModel) -> tuple[dict[int, Tensor], Tensor | None]:
    """Return gains ``[D]``, float32 on their norm's device, of the norm before each block's MLP, by block from 1, and
    before the language-model head. A map that does not read a norm's output has none.
    """
    readers: dict[int | None, nn.Module] = {None: model.model.get_output_embeddings()}
    readers.update(model.mlp_readers().items())
    given: list[tuple[Tensor, nn.Module]] = []
    before: dict[int | None, nn.Module] = {}

    def gave(module: nn.Module, args: Any, output: Any) -> None:
        given.append((first_of(output), module))

    def reads(layer: int | None, module: nn.Module, args: Any) -> None:
        # The head may read the last position alone: a view of the norm's output.
        where = args[0].untyped_storage().data_ptr()
        found = [norm for output, norm in given if output.untyped_storage().data_ptr() == where]
        if found:
            before[layer] = found[-1]

    with ExitStack() as stack:
        for module in model.model.modules():
            if _is_norm(module, model.config.d_model):
                stack.callback(module.register_forward_hook(gave).remove)
        for layer, module in readers.items():
            stack.callback(module.register_forward_pre_hook(partial(reads, layer)).remove)
        model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), last_only=True)
    gains = {layer: _gain(norm, model.config.d_model) for layer, norm in before.items()}
    head = gains.pop(None, None)
    return {layer: gain for layer, gain in gains.items() if layer is not None}, head


def _is_norm(module: nn.Module, width: int) -> bool:
    """Return True if a module holds vectors of the stream's width and nothing else."""
    own = list(module.parameters())
    return bool(own) and all(tuple(parameter.shape) == (width,) for parameter in own)


def _gain(norm: nn.Module, width: int) -> Tensor:
    """Return the factor of a norm: some families store the gain less 1. The test input, alternating ±1, has mean 0 and
    mean square 1.
    """
    weight, hook = next(norm.parameters()), getattr(norm, "_hf_hook", None)
    # Weights that accelerate keeps elsewhere are on the meta device, between passes.
    device = torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device
    signs_11D = torch.ones(1, 1, width, dtype=weight.dtype, device=device)
    signs_11D[..., 1::2] = -1
    gain_11D: Tensor = (norm(signs_11D) - norm(-signs_11D)) / 2 * signs_11D
    return gain_11D.flatten().float()


# ---------------------------------------------------------------- weights that face the residual stream
# Weights of a model that face its residual stream, read for the null ``matched`` (definitions §10).
#
# A decoder's weights are read by name, a block at a time, so that a model larger than memory can be read too.
#
# Legend: V tokens, R of them, D width, F hidden units, N of them, H heads, K width of a head.

#: Tokens that are read: enough to align the widest models.
MOST_TOKENS = 16_384
#: Hidden units of a block that are read: z of kin grows with the square root of their number.
MOST_UNITS = 512
#: Heads of a block whose maps of values are read.
MOST_HEADS = 4

EMBEDDING, HEAD = "embedding", "head"


def stream_weights(model: Decoder | HFModel) -> StreamWeights:
    """Return tables and units of a model in float32; at D 4096 and 32 blocks 1.9 GB. The model is left unchanged."""
    return _of_hf(model) if isinstance(model, HFModel) else _of_decoder(model)


def _array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().float().cpu().numpy()
    return found


def _units(maps: list[Tensor]) -> np.ndarray:
    """Stack M maps ``[F, D]`` to units ``[N, M, D]``."""
    rows = torch.from_numpy(spread_rows(len(maps[0]), MOST_UNITS))
    return np.stack([_array(x_FD[rows.to(x_FD.device)]) for x_FD in maps], axis=1)


def _value_units(value_CD: Tensor, n_heads: int) -> list[Tensor]:
    """Return one map ``[K, D]`` per head: channel k of all heads is one unit, since heads may share the maps
    behind it.
    """
    value_HKD = value_CD.unflatten(0, (n_heads, -1))
    return [value_HKD[head] for head in spread_rows(n_heads, MOST_HEADS).tolist()]


def _of_decoder(model: Decoder) -> StreamWeights:
    config = model.config
    weights: BlockWeights = model.weights if isinstance(model, DecoderByBlock) else HeldWeights(model)
    known = {name for name, _ in parameter_shapes(config)}
    ids = torch.from_numpy(spread_rows(config.vocab_size, MOST_TOKENS))
    tables = {EMBEDDING: _array(chosen_rows(weights, "embed.weight", ids, config.d_model))}
    if not config.tie_embeddings:
        head_RD = chosen_rows(weights, "head.weight", ids, config.d_model)
        tables[HEAD] = _array(_read(weights, known, ["norm.gain"]).fold(head_RD, "norm.gain"))
    units: dict[str, np.ndarray] = {}
    for i in range(config.n_layers):
        units |= _block_units(config, weights, known, i)
        if isinstance(model, DecoderByBlock):
            model.streaming.advance(1)
    return StreamWeights(tables, units)


class _Read:
    """Parameters read by name."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self.found = found

    def fold(self, map_FD: Tensor, gain: str) -> Tensor:
        """Multiply a map by the gain of the norm before or behind it, if there is such a norm."""
        return map_FD.float() * self.found[gain].float() if gain in self.found else map_FD


def _read(weights: BlockWeights, known: set[str], names: list[str]) -> _Read:
    return _Read(dict(weights.read([name for name in names if name in known])))


def _block_units(config: ModelConfig, weights: BlockWeights, known: set[str], block: int) -> dict[str, np.ndarray]:
    at = f"blocks.{block}."
    norms = [f"{at}{norm}.gain" for norm in ("norm_attn", "norm_attn_out", "norm_mlp", "norm_mlp_out")]
    maps = [f"{at}{part}.weight" for part in ("attn.v", "attn.o", "mlp.up", "mlp.gate", "mlp.down")]
    read = _read(weights, known, norms + maps)
    (before_v, behind_o, before_mlp, behind_mlp), (v, o, up, gate, down) = norms, maps
    # Latent attention's values come from another vector than the residual stream's.
    values = _value_units(read.fold(read.found[v], before_v), config.kv_heads) if v in read.found else []
    values += _value_units(read.fold(read.found[o].T, behind_o), config.n_heads)
    units = {f"{at}attn": _units(values)}
    if down in read.found:  # else it has experts
        mlp = [read.fold(read.found[name], before_mlp) for name in (up, gate) if name in read.found]
        units = {f"{at}mlp": _units([*mlp, read.fold(read.found[down].T, behind_mlp)]), **units}
    return units


def _of_hf(model: HFModel) -> StreamWeights:
    gains, head_gain = gains_before(model)
    embedding_RD, head_RD = (_rows(x.weight) for x in (model.embeddings, model.model.get_output_embeddings()))
    width, config = embedding_RD.shape[1], model.config
    if width != config.d_model:
        raise UsageError(
            f"this {config.model_type} model has embeddings of width {width}, its residual stream {config.d_model}: "
            "the null matched aligns channels by embeddings; give another --null"
        )
    tables = {EMBEDDING: _array(embedding_RD)}
    if head_RD.shape != embedding_RD.shape or not torch.equal(head_RD, embedding_RD):
        tables[HEAD] = _array(head_RD if head_gain is None else head_RD.float() * head_gain)
    units: dict[str, np.ndarray] = {}
    for layer in range(1, config.n_layers + 1):
        at = f"blocks.{layer - 1}."
        if (maps := model.mlp_weights(layer)) is not None:
            up, down, gate = maps
            readers = [x_FD.float() * gains.get(layer, 1.0) for x_FD in (up, gate) if x_FD is not None]
            units[f"{at}mlp"] = _units([*readers, down.T])
        if (output_DC := model.output_weights(layer)) is not None:
            units[f"{at}attn"] = _units(_value_units(output_DC.T, config.n_heads))
    return StreamWeights(tables, units)


def _rows(table_VD: Tensor) -> Tensor:
    table_VD = full_tensor(table_VD.detach())
    return table_VD[torch.from_numpy(spread_rows(len(table_VD), MOST_TOKENS)).to(table_VD.device)]
