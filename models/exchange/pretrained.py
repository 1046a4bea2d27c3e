"""Checkpoints of ``transformers``, read and written: a folder with ``config.json`` and safetensors.

Nothing is unpickled, and one tensor is read at a time: a model is never held twice. Names and layouts are in
``families.py`` and ``conversion.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import TypedDict

from ...errors import RunError, UsageError
from ...files import make_folder, path_below, read_bytes, read_json, save_tensors
from ...messages import one_line
from ..birth import Sharder, empty_decoder
from ..config import ModelConfig
from ..decoder import Decoder
from ..tensor_shards import shard_of
from .conversion import TensorMapping
from .gguf_model import gguf_tensors, open_weights
from .hub import pretrained_folder
from .weight_files import FLOATS, INDEX, ONE_FILE, SHARD_BYTES, aligning_metadata, shard_file_names, write_index
from .written_layout import Layout, expected_of, native_layout

_FLOATS = tuple(FLOATS.values())
#: Rows of two tables that are compared at a time.
_ROWS = 4096


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint whose config and tensor names and shapes have been checked; no tensor has been read."""

    folder: Path
    """Folder of the files; for a hub id, the snapshot in the hub's cache, whose name is the commit."""

    config: ModelConfig
    """The model."""

    tokenizer_file: Path | None
    """Path of its ``tokenizers`` JSON, if any."""

    _where: dict[str, tuple[Path, str]]
    """Tensor of ``transformers`` → its file, and its name in the file."""

    _mappings: list[TensorMapping]
    _tied_head: tuple[Path, str] | None
    """File and name of an output head that is stored although it is tied."""
    declared: str | None = None
    """The dtype that ``config.json`` names, if it does."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, and buffer, of ``Decoder(config)`` by name, once, on the CPU, in the dtype of the
        file.

        Each tensor of the file is read in its turn and not kept.

        Raises:
            RunError: a damaged file, or an output head that differs from the table it is tied to.
        """
        by_file: dict[Path, list[TensorMapping]] = {}
        for mapping in self._mappings:
            by_file.setdefault(self._where[mapping.hf_name][0], []).append(mapping)
        for file, held in by_file.items():
            with open_weights(file) as tensors:
                for mapping in held:
                    tensor = tensors.get_tensor(self._where[mapping.hf_name][1])
                    if mapping.names == ("embed.weight",):
                        self._check_tied_head(tensor)
                    yield from mapping.split(tensor)

    def _found(self, name: str) -> tuple[Path, str, TensorMapping]:
        """Return the file of a parameter, the name of the stored tensor that contains it, and their mapping."""
        mapping = next(mapping for mapping in self._mappings if name in mapping.names)
        return *self._where[mapping.hf_name], mapping

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters of this decoder by name, whole, on the CPU, in the dtype of the file; a tensor that holds
        several is read once.

        Raises:
            RunError: a damaged file.
        """
        wanted = list(names)
        while wanted:
            file, stored, mapping = self._found(wanted[0])
            with open_weights(file) as tensors:
                for name, tensor in mapping.split(tensors.get_tensor(stored)):
                    if name in wanted:
                        wanted.remove(name)
                        yield name, tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start … stop`` of the embedding or the head, on the CPU, in the dtype of the file.

        Raises:
            RunError: a damaged file.
        """
        file, stored, mapping = self._found(name)
        assert mapping.names == (name,)
        assert not mapping.transposed
        with open_weights(file) as tensors:
            rows: Tensor = tensors.get_slice(stored)[start:stop]
        return rows

    def check_tables(self) -> None:
        """Make the checks of `tensors`, with only a part of each table in memory.

        Raises:
            RunError: a matrix of another dtype than ``config.json`` names, or an output head that differs from the
                table it is tied to.
        """
        for mapping in self._mappings:
            file, stored = self._where[mapping.hf_name]
            with open_weights(file) as tensors:
                kind = tensors.get_slice(stored).get_dtype()
            # Gains and biases are often kept in float32 beside matrices of half the precision.
            if self.declared is not None and len(mapping.shape) > 1 and kind != FLOATS.get(self.declared, kind):
                raise RunError(f"{file}: {stored} is {kind}, config.json says {self.declared}")
        if self._tied_head is not None:
            file, stored = self._tied_head
            for start in range(0, self.config.vocab_size, _ROWS):
                stop = min(start + _ROWS, self.config.vocab_size)
                with open_weights(file) as tensors:
                    head = tensors.get_slice(stored)[start:stop]
                if not torch.equal(head, self.rows("embed.weight", start, stop)):
                    raise self._untied(file, stored)

    def _untied(self, file: Path, stored: str) -> RunError:
        return RunError(
            f"{file}: {stored} differs from the embeddings that config.json ties it to; "
            "set tie_word_embeddings to false there"
        )

    def _check_tied_head(self, table: Tensor) -> None:
        if self._tied_head is not None:
            file, name = self._tied_head
            with open_weights(file) as tensors:
                if not torch.equal(tensors.get_tensor(name), table):
                    raise self._untied(file, name)


class WeightIndex(TypedDict):
    """Content of ``model.safetensors.index.json``: tensor → file."""

    weight_map: dict[str, str]


def read_pretrained(source: str | Path) -> Pretrained:
    """Open a checkpoint of ``transformers`` and check that it is one model, whole.

    Args:
        source: a folder; or a hub id, ``NAME`` or ``ORG/NAME``, with ``@REVISION`` if not the main branch, which is
            taken from the hub's cache or fetched into it (``HF_HUB_OFFLINE`` is respected).

    Raises:
        UsageError: nothing there, only pickled weights, or an architecture that ModelConfig cannot express.
        RunError: a damaged file; a tensor that is missing, unknown or of another shape. Names file and tensor.
    """
    folder = pretrained_folder(source)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UsageError(f"{folder}: no config.json in it; give a folder that transformers' save_pretrained wrote")
    content = read_json(config_file, dict[str, Any])
    expected = expected_of(content, str(config_file))
    config, head = expected.config, expected.head
    wanted = {mapping.hf_name: mapping for mapping in expected.mappings}

    where: dict[str, tuple[Path, str]] = {}
    tied_head: tuple[Path, str] | None = None
    for file in weight_files(folder):
        with open_weights(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118, the library's object is no mapping
                name = expected.aliases.get(stored, stored)
                name = name if name in wanted or name == head else f"{expected.base}{name}"
                if name == head and config.tie_embeddings:
                    tied_head = (file, stored)
                elif name in wanted:
                    _check(file, stored, tensors.get_slice(stored), wanted[name].shape)
                    if name in where:
                        raise RunError(f"{file}: {stored} is also in {where[name][0].name}")
                    where[name] = (file, stored)
                elif not f".{stored}".endswith(tuple(f".{end}" for end in expected.not_parameters)):
                    raise RunError(f"{file}: {stored} is no tensor of this {expected.model_type} model")
    if missing := [name for name in wanted if name not in where]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise RunError(f"{folder}: {missing[0]} is in none of the safetensors files{more}")
    tokenizer = folder / "tokenizer.json"
    declared = content.get("dtype", content.get("torch_dtype"))
    return Pretrained(
        folder,
        config,
        tokenizer if tokenizer.is_file() else None,
        where,
        list(wanted.values()),
        tied_head,
        declared if isinstance(declared, str) else None,
    )


def _between(flat: Tensor, start: int, stop: int) -> Tensor:
    return flat[start:stop]


@torch.no_grad()
def load_pretrained(
    source: str | Path | Pretrained,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Sharder | None = None,
) -> Decoder:
    """Load the model of a checkpoint of ``transformers``, allocated once, filled tensor by tensor.

    Args:
        source: a folder or hub id, or an opened checkpoint.
        dtype: type of the parameters.
        device: device of this process's shard, or of the whole model.
        shard: function that shards the model over ranks; each keeps its shard of every tensor.

    Raises:
        UsageError, RunError: see :func:`read_pretrained`.
    """
    pretrained = source if isinstance(source, Pretrained) else read_pretrained(source)
    model = empty_decoder(pretrained.config, device, shard, dtype)
    held = model.state_dict(keep_vars=True)
    for name, tensor in pretrained.tensors():
        shard_of(held[name]).fill(partial(_between, tensor.reshape(-1)))
    return model


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    *,
    tokenizer_file: str | Path | None = None,
    eos_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load: :func:`write_pretrained` of a model."""
    return write_pretrained(
        model.config,
        model.state_dict(),
        folder,
        tokenizer_file=tokenizer_file,
        eos_token_id=eos_token_id,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


@torch.no_grad()
def write_pretrained(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    *,
    tokenizer_file: str | Path | None = None,
    eos_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    layout: Layout | None = None,
) -> list[str]:
    """Write config, weights and tokenizer as ``transformers`` reads them. The caller makes the folder atomic.

    Args:
        config: the model.
        tensors: every parameter, and buffer, by name; read one by one, so that a lazy mapping need not hold them all.
        folder: new, or empty.
        tokenizer_file: a ``tokenizers`` JSON, copied.
        eos_token_id: id of the token that ends a document, if there is one.
        dtype: type of the weights; by default unchanged.
        max_shard_bytes: size above which weights go into several files.
        layout: written form of the model; by default that of the family of ``transformers`` that has it.

    Returns:
        Notes for readers of the folder, one line each; usually none.

    Raises:
        UsageError: an architecture that no family of ``transformers`` has, with the fields that prevent it; a folder
            that is not empty; a tokenizer that is none, or has more tokens than the model.
        RunError: a tensor of another shape than the config says.
        KeyError: a parameter is not among ``tensors``.
    """
    layout, folder = layout or native_layout(config), Path(folder)
    more: dict[str, Any] = {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}
    tokenizer = None if tokenizer_file is None else _tokenizer_config(Path(tokenizer_file), config, eos_token_id)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists already; give a new folder")
    make_folder(folder)

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    dtypes: set[torch.dtype] = set()
    total = size = 0

    def flush() -> None:
        save_tensors(save_file, held, folder / f"{len(shards)}.part", metadata=aligning_metadata(held))
        shards.append(list(held))
        held.clear()

    for mapping in layout.mappings:
        narrow = None if mapping.hf_name in layout.buffers else dtype
        tensor = mapping.join([tensors[name].detach().to("cpu", narrow) for name in mapping.names])
        if tuple(tensor.shape) != mapping.shape:
            raise RunError(f"{', '.join(mapping.names)}: not of the shape that the model's config says")
        n_bytes = tensor.numel() * tensor.element_size()
        if held and size + n_bytes > max_shard_bytes:
            flush()
            size = 0
        held[mapping.hf_name] = tensor
        if mapping.hf_name not in layout.buffers:
            dtypes.add(tensor.dtype)
        size, total = size + n_bytes, total + n_bytes
    flush()

    files = shard_file_names(len(shards))
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    write_index(folder, {tensor: file for file, shard in zip(files, shards, strict=True) for tensor in shard}, total)
    more["torch_dtype"] = str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")
    _write_json(folder / "config.json", layout.config | more)
    for file, text in layout.files.items():
        (folder / file).write_text(text, encoding="utf-8")
    if tokenizer_file is None:
        return []
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", tokenizer)
    if not layout.own_tokenizer:
        return []
    return [
        f"AutoTokenizer of transformers 5 splits text by the rules of {layout.model_type}, whatever tokenizer.json "
        "says: load this tokenizer with PreTrainedTokenizerFast.from_pretrained"
    ]


def _tokenizer_config(file: Path, config: ModelConfig, eos_token_id: int | None) -> dict[str, Any]:
    stored = read_bytes(file)
    try:
        tokenizer = Tokenizer.from_str(stored.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{file}: not a tokenizers JSON file ({one_line(error)})") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= config.vocab_size:
        raise UsageError(
            f"{file}: token {largest} is outside model.vocab_size {config.vocab_size}: give the model's own"
        )
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    end = None if eos_token_id is None else tokenizer.id_to_token(eos_token_id)
    return content if end is None else content | {"eos_token": end}


def weight_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint's weights: safetensors, or ``gguf.json`` of a GGUF model. Several safetensors must
    hold the tensors that their index names.
    """
    if (sources := gguf_tensors(folder)) is not None:
        return [sources]
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        raise UsageError(
            f"{folder}: no {ONE_FILE} and no {INDEX} in it; pickled weights (pytorch_model.bin) are never loaded: "
            "convert them with transformers, from_pretrained then save_pretrained"
        )
    weight_map = read_json(index, WeightIndex)["weight_map"]
    names = sorted(set(weight_map.values()))

    def damaged(why: str) -> RunError:
        return RunError(f"{index}: damaged (weight_map has {why})")

    files = [path_below(folder, name, damaged) for name in names]
    for file in files:
        with open_weights(file) as tensors:
            held = set(tensors.keys())
        for name in sorted(held ^ {name for name, file_name in weight_map.items() if file_name == file.name}):
            raise RunError(f"{file}: {name} is {'not in' if name in held else 'only in'} {index.name}")
    return files


def _check(file: Path, name: str, stored: Any, shape: tuple[int, ...]) -> None:
    """Check a tensor's entry ``stored`` in the file's header: shape and dtype."""
    if tuple(stored.get_shape()) != shape:
        raise RunError(f"{file}: {name} has shape {list(stored.get_shape())}, config.json says {list(shape)}")
    if stored.get_dtype() not in _FLOATS:
        raise RunError(f"{file}: {name} is {stored.get_dtype()}, which is none of {', '.join(_FLOATS)}")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
