"""GGUF files opened like a folder of ``transformers``: ``config.json``, a tokenizer, and tensors under its names.

``transformers`` derives config and tokenizer from the metadata and sees only a copy of the checked header. Its results
are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from typing_extensions import TypedDict

from ...errors import RunError, UsageError
from ...files import atomic_path, read_json, read_sealed_json, save_tensors, tensor_file, write_json, write_sealed_json
from ...locks import hold_lock
from ...messages import reason_of
from ..c_library import cache_folder
from .gguf_header import MAGIC, GgufHeader, LongArray, StoredTensor, read_header
from .gguf_tensors import READ, GgufTensors, TensorSource, tensor_sources
from .weight_files import SHARD_BYTES, aligning_metadata, shard_file_names, split_into_shards, write_index

#: Description of the GGUF file behind a folder in the cache, and the beginning of that folder's name.
GGUF_TENSORS, _FOLDER = "gguf.json", "gguf-"
#: Least versions of the libraries; an earlier transformers fails at a tokenizer that names no BOS.
_LEAST = {"gguf": (0,), "transformers": (5, 18)}
#: Version of the kept content, increased at every change of it.
_FORMAT = 2
#: Keys of ``tokenizer_config.json`` that say how ``transformers`` found it.
_OF_LOADING = ("backend", "is_local", "local_files_only", "name_or_path")
#: Keys of the metadata, behind the architecture, that ``transformers`` leaves out of some configs → their fields.
_NOT_TAKEN = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "context_length": "n_positions",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
#: Architectures whose metadata leave out the scale of scores → blocks of the one size whose heads do not give it. It
#: follows from the size (llama.cpp's ``hparams.f_attention_scale``), and transformers takes 256 for every one.
_BLOCKS_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


# ── the files of a model ─────────────────────────────────────────────────────────────────────────────────────────────

#: llama.cpp's name of one part of a model.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_files(source: Path) -> list[Path]:
    """Return the GGUF files that a path means, in order; empty if it means something else.

    Args:
        source: a file, with the other parts of its model if it is one of several; or a folder that holds one model as
            GGUF and no safetensors.

    Raises:
        UsageError: a part is missing, or a folder holds several models.
    """
    if not source.is_dir():
        if source.suffix != ".gguf":
            return []
        if not source.exists():
            raise UsageError(f"{source}: no such file; give a GGUF file that is there")
        return _parts(source)
    models = {
        file.name if (part := _PART.fullmatch(file.name)) is None else part["stem"]: file
        for file in sorted(source.glob("*.gguf"), reverse=True)
    }
    if not models:
        return []
    if safe := sorted(source.glob("*.safetensors")):
        for file in models.values():
            _check_same(source, safe[0], file)
        return []
    if len(models) > 1:
        listed = ", ".join(sorted(file.name for file in models.values()))
        raise UsageError(f"{source}: holds several GGUF models ({listed}); name one of these files")
    return _parts(*models.values())


def _parts(file: Path) -> list[Path]:
    """List all files of the model that a file belongs to."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part["count"])
    if not 0 < int(part["number"]) <= count:
        raise UsageError(f"{file}: is part {int(part['number'])} of {count} by its name; give it the name it had")
    found = [file.with_name(f"{part['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [one for one in found if not one.exists()]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UsageError(f"{missing[0]}: is missing{more}, part of the {count} of {part['stem']}; put it there")
    return found


#: Sizes that ``config.json`` has under one of several keys → key of the metadata, behind the architecture.
_SIZES = {
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): "block_count",
    ("hidden_size", "n_embd", "d_model", "n_embed"): "embedding_length",
}


def _check_same(folder: Path, safe: Path, file: Path) -> None:
    """Refuse a folder whose safetensors and GGUF are of models of different sizes."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: holds {safe.name} without config.json beside {file.name}; name {file}")
    config, header = read_json(folder / "config.json", dict[str, Any]), read_header(file)
    for names, key in _SIZES.items():
        in_config = next((config[name] for name in names if name in config), None)
        in_header = header.metadata.get(f"{header.architecture}.{key}")
        if None not in (in_config, in_header) and in_config != in_header:
            raise UsageError(
                f"{folder}: {safe.name} and {file.name} are of different models ({names[0]} {in_config} and "
                f"{in_header}); name {file}, or move it elsewhere"
            )


# ── one folder for a model ───────────────────────────────────────────────────────────────────────────────────────────


class GgufFolder(TypedDict):
    """``gguf.json`` of a folder in the cache."""

    kinds: dict[str, int]
    tensors: dict[str, TensorSource]


def gguf_folder(files: Sequence[Path]) -> Path:
    """Return the folder with ``config.json``, the tokenizer, and ``gguf.json``, which locates the tensors of a model.

    The folder is made at first use, and made again if the files changed or its own ``gguf.json`` is damaged.

    Args:
        files: all parts of the model, in order.

    Raises:
        UsageError: a library is missing, an architecture or a type of storage is not read, or the cache cannot be
            written to.
        RunError: a damaged file.
    """
    _check_libraries(files[0])
    states = [(str(file.resolve()), *_state(file)) for file in files]
    digest = hashlib.sha256(repr((_FORMAT, _versions(), states)).encode()).hexdigest()
    folder = cache_folder() / f"{_FOLDER}{digest[:16]}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_suffix(".lock")):
            if not _is_whole(folder):
                header = _joined([read_header(file) for file in files])
                with atomic_path(folder) as new:
                    new.mkdir()
                    _fill(new, header)
    except PermissionError as error:
        raise UsageError(
            f"{folder}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to another folder"
        ) from None
    return folder


def gguf_tensors(folder: Path) -> Path | None:
    """Return ``gguf.json`` of a folder that `gguf_folder` made in the user's cache; None for any other folder.

    The file names files anywhere and places in them, so that one of others would read whatever the user may.
    """
    whole = folder.resolve()
    # By its name first: who reads another folder needs no cache, and may have no home for one.
    if not whole.name.startswith(_FOLDER) or whole.parent != cache_folder().resolve():
        return None
    file = folder / GGUF_TENSORS
    return file if file.is_file() else None


def kinds_of(folder: Path) -> dict[str, int]:
    """Count the types of storage in a GGUF model: type → number of tensors; empty for any other folder."""
    file = gguf_tensors(folder)
    return {} if file is None else _said(file)["kinds"]


def _is_whole(folder: Path) -> bool:
    try:
        _said(folder / GGUF_TENSORS)
    except RunError:
        return False
    return True


@cache
def _said(file: Path) -> GgufFolder:
    """Read ``gguf.json`` of a folder, whose name changes with its content."""
    said: GgufFolder = read_sealed_json(file, GgufFolder)
    return said


def _state(file: Path) -> tuple[int, int, int, int]:
    found = file.stat()
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _versions() -> tuple[str, ...]:
    from importlib.metadata import version

    return tuple(version(name) for name in ("gguf", "transformers", "tokenizers"))


def _check_libraries(file: Path) -> None:
    from importlib.metadata import PackageNotFoundError, version

    for name, least in _LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise UsageError(f"{file}: reading GGUF needs {name}: pip install {name}") from None
        if tuple(map(int, found.split(".")[: len(least)])) < least:
            needed = ".".join(map(str, least))
            raise UsageError(
                f"{file}: reading GGUF needs {name} {needed} or later, and this is {found}: pip install -U {name}"
            )


def _joined(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Join the headers of a whole model: the metadata of its first part, and the tensors of all."""
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if count != len(headers):
        raise UsageError(
            f"{first.file}: is one of {count} parts by its metadata; put all into one folder, named NAME-00001-of-"
            f"{count:05d}.gguf and so on"
        )
    tensors: dict[str, StoredTensor] = {}
    for number, header in enumerate(headers):
        if len(headers) > 1 and header.metadata.get("split.no") != number:
            raise RunError(f"{header.file}: is part {header.metadata.get('split.no')} by its metadata; fetch it again")
        if twice := tensors.keys() & header.tensors.keys():
            raise RunError(f"{header.file}: {min(twice)} is also in {tensors[min(twice)].file.name}; fetch both again")
        tensors |= header.tensors
    said = first.metadata.get("split.tensors.count", len(tensors))
    if said != len(tensors):
        raise RunError(f"{first.file}: its parts hold {len(tensors)} tensors, and it says {said}; fetch them again")
    return GgufHeader(first.file, first.metadata, first.spans, tensors)


def _fill(folder: Path, header: GgufHeader) -> None:
    """Write ``config.json``, the tokenizer and ``gguf.json`` of a model."""
    _check_readable(header)
    import transformers

    try:
        config = _config(transformers, header)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (RunError, UsageError):
        raise
    except Exception as error:  # the library raises a dozen kinds
        raise UsageError(f"{header.file}: transformers cannot read its metadata ({reason_of(error)})") from None
    config.architectures, config.dtype = [type(model).__name__], "float32"
    vars(config).pop("_model_name_or_path", None)  # general.name of the metadata, a title
    config.save_pretrained(folder)
    sources = tensor_sources(header, model)
    _write_tokenizer(transformers, header, folder)
    write_sealed_json(folder / GGUF_TENSORS, {"kinds": header.kinds, "tensors": sources})


def _check_readable(header: GgufHeader) -> None:
    """Refuse a file of another architecture, type or scaling than those that are read, or that contradicts itself."""
    import gguf

    arch, file = header.architecture, header.file
    if arch not in READ:
        raise UsageError(f"{file}: holds a {arch} model, and of GGUF {', '.join(READ)} are read; give another")
    scaling = header.metadata.get(f"{arch}.rope.scaling.type")
    if scaling not in (None, "none") and header.metadata.get(f"{arch}.rope.scaling.factor") != 1:
        raise UsageError(
            f"{file}: {arch}.rope.scaling.type is {scaling}, which transformers does not read from GGUF; give the "
            "model as a folder of transformers"
        )
    for name, tensor in header.tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.kind]
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise UsageError(f"{file}: {name} is of type {tensor.kind}, which gguf does not dequantise") from None
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise RunError(f"{file}: token_embd.weight is missing; fetch the file again")
    blocks = {int(found[1]) for name in header.tensors if (found := re.match(r"blk\.(\d{1,6})\.", name))}
    sizes = {"block_count": 1 + max(blocks, default=-1), "embedding_length": table.shape[-1]}
    for key, size in sizes.items():
        if (said := header.metadata.get(f"{arch}.{key}")) != size:
            raise RunError(f"{file}: damaged ({arch}.{key} is {said}, and its tensors say {size}); fetch it again")


def _config(library: Any, header: GgufHeader) -> Any:
    """Read the config that ``transformers`` finds in the metadata, with sizes from the tensors."""
    arch = header.architecture
    # The library decides by names of tensors which weights are tied, and walks through arrays element by element.
    kept = [
        key for key, value in header.metadata.items() if not isinstance(value, LongArray) and "chat_template" not in key
    ]
    with _header_alone(header, kept, list(header.tensors)) as (folder, name):
        config = library.AutoConfig.from_pretrained(folder, gguf_file=name)
    config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    said = {key.removeprefix(f"{arch}."): value for key, value in header.metadata.items()}
    for key, field in _NOT_TAKEN.items():
        if key in said and hasattr(config, field):
            setattr(config, field, said[key])
    if arch in _BLOCKS_SCALED_BY_WIDTH:
        by_width = config.num_hidden_layers == _BLOCKS_SCALED_BY_WIDTH[arch]
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if by_width else config.head_dim
    rope = getattr(config, "rope_parameters", None)
    if rope and "rope_theta" in rope:
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["rope_theta"] = said.get("rope.freq_base", rope["rope_theta"])
        rotated = said.get("rope.dimension_count", d_head)
        if "partial_rotary_factor" in rope:
            rope["partial_rotary_factor"] = rotated / d_head
        elif rotated != d_head:
            raise UsageError(
                f"{header.file}: {arch}.rope.dimension_count is {rotated}, and {config.model_type} models of "
                f"transformers rotate all {d_head} channels of a head; give the model as a folder of transformers"
            )
    return config


@contextmanager
def _header_alone(header: GgufHeader, keys: Sequence[str], tensors: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Write a temporary file with these entries of the metadata and tensors of one element, for libraries to read;
    yield (folder, name).
    """
    described = b"".join(
        struct.pack("<Q", len(encoded)) + encoded + struct.pack("<IQIQ", 1, 1, 0, 32 * number)
        for number, encoded in enumerate(name.encode() for name in tensors)
    )
    with tempfile.TemporaryDirectory(prefix="birthmark-gguf-") as folder:
        with (Path(folder) / "header.gguf").open("wb") as new, header.file.open("rb") as old:
            new.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys)))
            for key in keys:
                start, end = header.spans[key]
                old.seek(start)
                new.write(old.read(end - start))
            new.write(described)
            alignment = header.metadata.get("general.alignment", 32)
            new.write(bytes(-new.tell() % alignment + 32 * len(tensors)))
        yield folder, "header.gguf"


def _write_tokenizer(library: Any, header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer that ``transformers`` builds from the metadata, if it holds one."""
    metadata = header.metadata
    if metadata.get("tokenizer.ggml.model", "none") == "none" or "tokenizer.ggml.tokens" not in metadata:
        return
    keys = [
        key for key in metadata if key.startswith("tokenizer.") or key in ("general.architecture", "general.alignment")
    ]
    try:
        with _header_alone(header, keys) as (inner, name):
            made = library.PreTrainedTokenizerFast.from_pretrained(inner, gguf_file=name)
            made.save_pretrained(folder)
    except Exception as error:  # the library raises a dozen kinds
        raise RunError(f"{header.file}: transformers cannot read its tokenizer ({reason_of(error)})") from None
    file = folder / "tokenizer_config.json"
    about = read_json(file, dict[str, Any]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("add_bos_token", "add_eos_token"):
        if (adds := metadata.get(f"tokenizer.ggml.{name}")) is not None:
            about[name] = adds
    write_json(file, {key: value for key, value in about.items() if key not in _OF_LOADING})


def write_dequantised(folder: Path, new: Path, dtype: torch.dtype, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write a GGUF model in the layout of ``transformers``: config, tokenizer and safetensors, a shard in memory at a
    time.

    Args:
        folder: folder from :func:`gguf_folder`.
        new: an empty folder.
        dtype: type of the weights.
        max_shard_bytes: size of the largest file, unless one tensor is larger.

    Raises:
        RunError: a damaged file.
    """
    for file in folder.iterdir():
        if file.name != GGUF_TENSORS:
            shutil.copyfile(file, new / file.name)
    config = read_json(new / "config.json", dict[str, Any]) | {"dtype": str(dtype).removeprefix("torch.")}
    write_json(new / "config.json", config)
    with open_weights(folder / GGUF_TENSORS) as tensors:
        sizes = {name: math.prod(tensors.get_slice(name).get_shape()) * dtype.itemsize for name in tensors.keys()}  # noqa: SIM118
        shards = split_into_shards(sizes, max_shard_bytes)
        names = shard_file_names(len(shards))
        for shard, name in zip(shards, names, strict=True):
            held = {one: tensors.get_tensor(one).to(dtype) for one in shard}
            save_tensors(save_file, held, new / name, metadata=aligning_metadata(held))
    file_of = {one: name for shard, name in zip(shards, names, strict=True) for one in shard}
    write_index(new, file_of, sum(sizes.values()))


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open the tensors of one file of a folder, safetensors or ``gguf.json``; only tensors that are read are loaded.

    Raises:
        RunError: the file, which is named, is missing or damaged, also if found while reading in the block.
    """
    if file.name == GGUF_TENSORS and file == gguf_tensors(file.parent):
        yield GgufTensors(_said(file)["tensors"])
        return
    with tensor_file(file, "pt") as tensors:
        yield tensors
