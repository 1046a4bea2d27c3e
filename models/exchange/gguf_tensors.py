"""Tensors of a GGUF file under their names in ``transformers``: found by the names of ``gguf``, dequantised one at a
time, and changed back where converters to GGUF changed them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from ...errors import RunError, UsageError
from ...files import check_file
from ...messages import reason_of
from .gguf_header import GgufHeader, StoredTensor

#: Elements that are dequantised at a time: they stay in a processor's cache.
_CHUNK = 1 << 16


# ── what converters to GGUF change ───────────────────────────────────────────────────────────────────────────────────


def _halves(tensor: Tensor, n_heads: int) -> Tensor:
    """Reorder channels from neighbouring rotary pairs to the halves of a head."""
    return tensor.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _by_head(tensor: Tensor, n_heads: int) -> Tensor:
    """Reorder queries, keys and values from side by side in each head to one after the other."""
    return tensor.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2)


#: Change → ``(tensor, heads)`` to the tensor of ``transformers``.
_CHANGES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "halves": _halves,
    "by_head": _by_head,
    "from_0": lambda tensor, n_heads: tensor - 1,
    "transposed": lambda tensor, n_heads: tensor.T,
    "one_row": lambda tensor, n_heads: tensor[None],
}
_PLAIN: Mapping[str, str] = {}
_GAINS = {"norm.weight": "from_0"}
_TRANSPOSED = {f"{name}.weight": "transposed" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}
#: Architecture → end of a tensor's name in the file → its change.
READ: Mapping[str, Mapping[str, str]] = {
    "llama": {"attn_q.weight": "halves", "attn_k.weight": "halves"},
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen2moe": {"ffn_gate_inp_shexp.weight": "one_row"},
    "qwen3moe": _PLAIN,
    "gemma2": _GAINS,
    "gemma3": _GAINS,
    "gpt2": _TRANSPOSED,
    "bloom": {"attn_qkv.weight": "by_head", "attn_qkv.bias": "by_head"},
    "phi3": _PLAIN,
    "starcoder2": _PLAIN,
    "stablelm": _PLAIN,
    "nemotron": _GAINS,
}


# ── their places in the file ─────────────────────────────────────────────────────────────────────────────────────────


class TensorSource(TypedDict):
    """The place of a tensor of ``transformers`` in the file, and the conversion that it needs."""

    file: str
    kind: str
    shape: list[int]
    offset: int
    nbytes: int
    change: str | None
    n_heads: int


def tensor_sources(header: GgufHeader, model: Any) -> dict[str, TensorSource]:
    """Find each tensor of a checkpoint of the model in the file.

    Raises:
        RunError: a tensor is missing, or of another shape than the config says.
        UsageError: a tensor has no place in the model.
    """
    import gguf

    arch, config = header.architecture, model.config
    (number,) = [one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    n_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    found: dict[str, TensorSource] = {}
    used = set()
    for hf_name, shape in _checkpoint_shapes(model):
        stored = _stored_name(names, re.sub(r"\.experts\.\d+\.", ".experts.", hf_name))
        if stored is None or stored not in header.tensors:
            if config.tie_word_embeddings and hf_name == "lm_head.weight":
                continue
            raise RunError(f"{header.file}: {stored or hf_name} is missing; fetch the file again")
        used.add(stored)
        change = next((change for end, change in READ[arch].items() if stored.endswith(end)), None)
        heads = kv_heads if stored.endswith("attn_k.weight") else n_heads
        expert = re.search(r"\.experts\.(\d+)\.", hf_name)
        found[hf_name] = _source(header.tensors[stored], change, heads, None if expert is None else int(expert[1]))
        with suppress(RuntimeError):  # heads do not divide its rows: its shape is another
            if _shape(found[hf_name]) == shape:
                continue
        raise RunError(
            f"{header.file}: {stored} has shape {list(header.tensors[stored].shape)}, its metadata say another"
        )
    if left := sorted(header.tensors.keys() - used):
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise UsageError(
            f"{header.file}: {left[0]}{more} has no place in the {config.model_type} model that transformers reads "
            "from GGUF; give the model as a folder of transformers"
        )
    return found


def _checkpoint_shapes(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a model's tensors in a checkpoint, with separate tensors for every expert."""
    for name, tensor in model.state_dict().items():
        fused = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)
        if fused is None:
            yield name, tuple(tensor.shape)
            continue
        n_experts, rows, columns = tensor.shape
        inner = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
        for expert in range(n_experts):
            for one in inner:
                yield f"{fused[1]}.{expert}.{one}.weight", (rows // len(inner), columns)


def _stored_name(names: Any, hf_name: str) -> str | None:
    """Return the GGUF name of a tensor of ``transformers``; some families were converted without their base's
    prefix.
    """
    for name in (hf_name, hf_name.partition(".")[2]):
        if (stored := names.get_name(name, try_suffixes=(".weight", ".bias"))) is not None:
            return str(stored)
    return None


def _source(tensor: StoredTensor, change: str | None, n_heads: int, expert: int | None) -> TensorSource:
    shape, nbytes = list(tensor.shape), tensor.nbytes
    if expert is not None:
        nbytes //= shape.pop(0)
    return {
        "file": str(tensor.file.absolute()),
        "kind": tensor.kind,
        "shape": shape,
        "offset": tensor.offset + nbytes * (expert or 0),
        "nbytes": nbytes,
        "change": change,
        "n_heads": n_heads,
    }


def _shape(source: TensorSource) -> tuple[int, ...]:
    """Return the shape of the tensor in ``transformers``."""
    empty = torch.empty(source["shape"], device="meta")
    return tuple(_changed(empty, source).shape)


def _changed(tensor: Tensor, source: TensorSource) -> Tensor:
    return tensor if source["change"] is None else _CHANGES[source["change"]](tensor, source["n_heads"]).contiguous()


# ── their values ─────────────────────────────────────────────────────────────────────────────────────────────────────


class GgufSlice:
    """A tensor that is dequantised when indexed, with the interface of a safetensors slice."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(_shape(self._source))

    def get_dtype(self) -> str:
        """Return the safetensors name of the dequantised type."""
        return "F32"

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Dequantise all rows, or a slice of them, to float32 on the CPU."""
        source = self._source
        if isinstance(rows, slice) and source["change"] is None:
            start, stop, _ = rows.indices(source["shape"][0])
            return dequantised(source, start, stop)
        whole = _changed(dequantised(source, 0, source["shape"][0]), source)
        return whole if isinstance(rows, EllipsisType) else whole[rows]


class GgufTensors:
    """Tensors of a model by their names in ``transformers``, with the interface of an open safetensors file."""

    def __init__(self, tensors: Mapping[str, TensorSource]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> GgufSlice:
        """Return a tensor, not yet read."""
        return GgufSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, float32, on the CPU."""
        return self.get_slice(name)[...]


def dequantised(source: TensorSource, start: int, stop: int) -> Tensor:
    """Dequantise rows ``start … stop`` of a tensor in their stored order, float32, by ``gguf``.

    Raises:
        RunError: the file is gone, or was cut short since its header was read.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[source["kind"]]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = [stop - start, *source["shape"][1:]]
    row_bytes = source["nbytes"] // source["shape"][0]
    check_file(Path(source["file"]), mend="fetch it again")
    try:
        raw = np.memmap(source["file"], np.uint8, "r", source["offset"] + start * row_bytes, shape[0] * row_bytes)
    except (OSError, ValueError) as error:
        raise RunError(f"{source['file']}: cannot be read ({reason_of(error)}); fetch the file again") from None
    values = np.empty(math.prod(shape), np.float32)
    n_bytes = _CHUNK // per_block * block_bytes
    for i, first in enumerate(range(0, len(raw), n_bytes)):
        # One long row: the library loops over short ones.
        part = gguf.dequantize(raw[first : first + n_bytes][None], kind)[0]
        values[i * _CHUNK : i * _CHUNK + len(part)] = part
    return torch.from_numpy(values).view(shape)
