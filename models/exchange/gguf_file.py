"""A model as one GGUF file, the layout of llama.cpp and its descendants, written by its library ``gguf``.

Names and metadata are those of its converters. Its ``llama`` rotates channels in neighbouring pairs, so that queries
and keys are written in that order; the others rotate halves, as this decoder does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import RunError, UsageError
from ...files import read_json
from ..config import ModelConfig, dotted
from .conversion import family_of, tensor_mappings

GGUF_FILE = "model.gguf"


@dataclass(frozen=True)
class _Architecture:
    """An architecture of llama.cpp, for a family of ``transformers``."""

    constant: str
    """Name in ``gguf.MODEL_ARCH``."""
    fixed: Mapping[str, Any]
    """Fields of a model, dotted, that it knows with one value alone, where the family knows others."""
    pairs_neighbours: bool = False
    """True if rotary positions rotate neighbouring channels."""
    is_read: bool = False
    """True if ``transformers`` reads such a file as the same function."""


_GATED = {"mlp": "swiglu"}
_ARCHITECTURES = {
    "gpt2": _Architecture("GPT2", {"mlp": "gelu_tanh"}),
    "llama": _Architecture("LLAMA", _GATED | {"bias": False}, pairs_neighbours=True, is_read=True),
    "qwen2": _Architecture("QWEN2", _GATED, is_read=True),
    "qwen3": _Architecture("QWEN3", _GATED, is_read=True),
    "olmo2": _Architecture("OLMO2", _GATED),
    "gpt_neox": _Architecture("GPTNEOX", {"mlp": "gelu_tanh"}),
    "arcee": _Architecture("ARCEE", {"mlp": "relu2", "bias": False}, pairs_neighbours=True),
    "mixtral": _Architecture("LLAMA", _GATED | {"attention.window": None}, pairs_neighbours=True),
    "olmoe": _Architecture("OLMOE", _GATED | {"experts.renormalise": False}),
    "qwen3_moe": _Architecture("QWEN3MOE", _GATED | {"experts.renormalise": True}),
}
#: Dtypes of weights → their names in the library; vectors are always float32, as its converters write them.
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
#: So are a router and a table of positions.
_WIDE = ("ffn_gate_inp.weight", "position_embd.weight")
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def check_gguf(config: ModelConfig) -> str:
    """Return the family under which a model is written.

    Raises:
        UsageError: there is none, or the library is not installed.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UsageError("--gguf needs gguf: pip install gguf") from None
    name = family_of(config).model_type
    if name not in _ARCHITECTURES:
        raise UsageError(f"--gguf: {name} models are not written as GGUF: {', '.join(_ARCHITECTURES)} are")
    fields = dotted(asdict(config))
    for field, value in _ARCHITECTURES[name].fixed.items():
        if fields[field] != value:
            in_family, in_model = (json.dumps(one).strip('"') for one in (value, fields[field]))
            raise UsageError(
                f"--gguf: llama.cpp's {name} has model.{field} {in_family}, and the model has {in_model}: export "
                "without --gguf"
            )
    return name


def is_read_by_transformers(config: ModelConfig) -> bool:
    """Return True if ``transformers`` reads a model's GGUF file as the same function, as llama.cpp does."""
    return _ARCHITECTURES[check_gguf(config)].is_read


@torch.no_grad()
def write_gguf(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    tokenizer_file: Path | None = None,
    eos_token_id: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write the file.

    Args:
        config: a model that :func:`check_gguf` accepts.
        tensors: every parameter by name.
        file: new.
        tokenizer_file: a ``tokenizers`` JSON.
        eos_token_id: id of the token that ends a document, if there is one.
        dtype: type of the matrices; by default float32.

    Returns:
        Notes for readers of the file, one line each; usually none.

    Raises:
        UsageError: see :func:`check_gguf`.
        RunError: a tensor that the layout has no name for.
    """
    name = check_gguf(config)
    import gguf

    architecture, kind = _ARCHITECTURES[name], _TYPES[dtype or torch.float32]
    arch = getattr(gguf.MODEL_ARCH, architecture.constant)
    names = gguf.get_tensor_name_map(arch, config.n_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch], use_temp_file=True)
    _write_sizes(writer, config)
    writer.add_name("birthmark")
    writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[kind]))
    notes = _write_tokenizer(writer, config, tokenizer_file, eos_token_id)
    for hf_name, tensor in _joined(config, tensors, architecture.pairs_neighbours):
        found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RunError(f"{hf_name}: GGUF has no name for it in {name}; export without --gguf")
        values = np.ascontiguousarray(tensor.numpy())
        narrow = "F32" if tensor.ndim == 1 or found.endswith(_WIDE) else kind
        if narrow == "BF16":
            stored = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(found, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(found, values.astype(np.float16) if narrow == "F16" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes


def _joined(config: ModelConfig, tensors: Mapping[str, Tensor], pairs_neighbours: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the family's names and float32 tensors, ``[out, in]``, with queries, keys and values of one name joined,
    and the experts of a block in one tensor ``[E, out, in]``.
    """
    experts: dict[str, list[Tensor]] = {}
    for mapping in tensor_mappings(config, family_of(config)):
        parts = [tensors[one].detach().to("cpu", torch.float32) for one in mapping.names]
        heads = {"q_proj": config.n_heads, "k_proj": config.kv_heads}.get(mapping.hf_name.split(".")[-2])
        if heads is not None and pairs_neighbours:
            parts = [part.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for part in parts]
        tensor = torch.cat(parts)
        of_all = _EXPERT.sub(".experts.", mapping.hf_name)
        if of_all == mapping.hf_name:
            yield mapping.hf_name, tensor
            continue
        experts.setdefault(of_all, []).append(tensor)
        if len(experts[of_all]) == config.experts.n_experts:
            yield of_all, torch.stack(experts.pop(of_all))


def _write_sizes(writer: Any, config: ModelConfig) -> None:
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.d_head)
    writer.add_value_length(config.d_head)
    if config.positions == "rope":
        writer.add_rope_dimension_count(config.d_rope)
        writer.add_rope_freq_base(config.rope_base)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_parallel_residual(config.parallel_residual)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.experts.n_experts:
        writer.add_expert_count(config.experts.n_experts)
        writer.add_expert_used_count(config.experts.top_k)
        writer.add_expert_feed_forward_length(config.experts.d_ff or config.ff)
    writer.add_vocab_size(config.vocab_size)


def filler(index: int) -> str:
    """Return the token that stands at an id without one, as llama.cpp's converter names it."""
    return f"[PAD{index}]"


def _write_tokenizer(writer: Any, config: ModelConfig, file: Path | None, eos_token_id: int | None) -> list[str]:
    """Write tokens and merges of byte-level BPE that splits text like GPT-2, as this project's tokenizers do; return a
    note for any other.
    """
    import gguf

    if file is None:
        writer.add_tokenizer_model("none")
        return ["the file has no tokenizer: give token ids"]
    content = read_json(file, dict[str, Any])
    model = content.get("model") or {}
    splits = content.get("pre_tokenizer") or {}
    as_gpt2 = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
    if model.get("type") != "BPE" or not as_gpt2 or content.get("normalizer") is not None:
        writer.add_tokenizer_model("none")
        return ["the file has no tokenizer: this one does not split text as GPT-2's does; give token ids"]
    special = {token["id"] for token in content.get("added_tokens") or [] if token["special"]}
    by_id = {index: token for token, index in model["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    tokens = [by_id.get(index, filler(index)) for index in range(config.vocab_size)]
    kinds = [gguf.TokenType.NORMAL if index in by_id else gguf.TokenType.UNUSED for index in range(config.vocab_size)]
    for index in special & set(range(config.vocab_size)):
        kinds[index] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_add_bos_token(False)
    if eos_token_id is None:
        # llama.cpp would take token 11 for the end of a text: one that text never has is named in its place.
        never = [index for index, kind in enumerate(kinds) if kind != gguf.TokenType.NORMAL]
        if not never:
            return ["the model has no end token, and llama.cpp takes token 11 for one: give it --ignore-eos"]
        eos_token_id = never[-1]
    writer.add_eos_token_id(eos_token_id)
    return []
