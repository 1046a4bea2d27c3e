"""Certificates: a run's statement of its checkpoints, which commits to its seed without revealing it.

A certificate is written from a run, and read from a file of any origin. A commitment is a hash that reveals nothing
about a value until the value and a secret salt are shown, and that fits no other value.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Len
from torch import Tensor
from typing_extensions import TypedDict

from ..data.config import HOW_READ
from ..errors import RunError, UsageError
from ..files import atomic_path, content_digest, read_json, read_sealed_json, write_sealed_json
from ..measure.records import RunDir
from ..messages import one_line
from ..models.birth import Digest, certificate_of
from ..models.by_block import BlockWeights
from ..models.config import ModelConfig
from ..models.parameter_shapes import tensor_shapes
from ..schema import Count, Sha256
from ..trainer.checkpoints.folder_io import CheckpointWeights
from ..trainer.config import RunConfig
from ..trainer.config_file import build_model, read_config
from .weight_samples import sampled_values

# ---------------------------------------------------------------- commitments
# A hash that says nothing of a value until the value and a secret salt are shown, and then fits no other.
#
# ``SHA-256(domain ‖ 0 ‖ salt ‖ canonical JSON of the value)``. The salt, 32 random bytes, keeps seeds from being
# tried one after another; the domain keeps what opens one commitment from opening another.

#: In a run's folder; whoever has it can open the run's commitments.
SECRET = "certificate.secret.json"
_SALT_BYTES = 32
_DOMAIN = "birthmark certificate 1"
_WARNING = "Secret: with it anyone can find the seed of the certificate. Show it together with the seed, or never."

Salt = Annotated[str, Len(2 * _SALT_BYTES, 2 * _SALT_BYTES)]


class Secret(TypedDict):
    """Content of ``certificate.secret.json``."""

    kind: Literal["birthmark certificate secret"]
    warning: str
    salt: Salt
    data_order: dict[str, Any]


def canonical(value: Any) -> bytes:
    """Encode a value for hashing: JSON without spaces, keys sorted, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def commitment(what: str, value: Any, salt: bytes) -> str:
    """Compute the commitment to ``value`` as ``what`` (``init_seed``, ``birth``, ``data_order``), in hex."""
    return hashlib.sha256(f"{_DOMAIN} {what}\0".encode() + salt + canonical(value)).hexdigest()


def salt_of(text: str, where: str) -> bytes:
    """Read a salt from hexadecimal digits; UsageError, beginning with ``where``, if they are not a salt."""
    if re.fullmatch(f"[0-9a-fA-F]{{{2 * _SALT_BYTES}}}", text) is None:
        raise UsageError(f"{where} {one_line(text, 20)}: no salt; give the {2 * _SALT_BYTES} digits of {SECRET}")
    return bytes.fromhex(text)


def read_secret(file: Path) -> Secret:
    """Read a run's secret.

    Raises:
        RunError: the file is missing or damaged.
    """
    found: Secret = read_json(file, Secret, f"give the {SECRET} of the run that was certified")
    return found


def keep_secret(run: RunDir, data_order: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return the salt and the data order that a run's certificates commit to; draw and write them for its owner only,
    unless an earlier certificate has them.

    So commitments of one run stay the same: a certificate with more checkpoints, or of a version whose configs have
    more fields, commits to the same values as the first.

    Raises:
        RunError: the existing file is damaged, or has another value of a field.
    """
    file = run.path / SECRET
    if not file.exists():
        secret = {
            "kind": "birthmark certificate secret",
            "warning": _WARNING,
            "salt": secrets.token_hex(_SALT_BYTES),
            "data_order": dict(data_order),
        }
        with atomic_path(file) as new:
            new.touch(mode=0o600)
            new.write_text(json.dumps(secret, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    kept = read_secret(file)
    if (found := _contradiction("data_order", kept["data_order"], json.loads(canonical(data_order)))) is not None:
        field, stored, given = (one_line(str(part), 60) for part in found)
        raise RunError(f"{file}: says {field} {stored}, and the run gives {given}; restore both from a copy")
    return salt_of(kept["salt"], str(file)), kept["data_order"]


#: Inputs of the order of data that a resumed run may change: the limit of passes. The first ones stay committed to.
_MAY_CHANGE = {"epochs"}


def _contradiction(field: str, stored: Any, given: Any) -> tuple[str, Any, Any] | None:
    """Find a field that both have with other values: its name and both values. Versions differ in fields that only one
    has.
    """
    if isinstance(stored, Mapping) and isinstance(given, Mapping):
        shared = [name for name in stored if name in given and name not in _MAY_CHANGE]
        pairs = [(f"{field}.{name}", stored[name], given[name]) for name in shared]
    elif isinstance(stored, list) and isinstance(given, list) and len(stored) == len(given):
        pairs = [(f"{field}.{i}", *values) for i, values in enumerate(zip(stored, given, strict=True))]
    else:
        return None if stored == given else (field, stored, given)
    return next((found for pair in pairs if (found := _contradiction(*pair)) is not None), None)


# ---------------------------------------------------------------- streamed content
# The content of a checkpoint in one pass, a tensor at a time: its digests, and the sampled values that tell kin.

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Content:
    """Digests and samples of a checkpoint."""

    float32: str
    """Digest of its values (definitions §1, with the buffers, if the model has any)."""
    bfloat16: str
    """Digest of its values rounded to bfloat16."""
    float16: str
    """Digest of its values rounded to float16."""
    values: dict[str, np.ndarray] = field(repr=False)
    """Sampled, of tensors of two axes or more (weight_samples.py)."""


class Reading:
    """Digests and samples of tensors that are added one after another, in name order."""

    def __init__(self) -> None:
        self._digests = {dtype: Digest() for dtype in (torch.float32, torch.bfloat16, torch.float16)}
        self.values: dict[str, np.ndarray] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor, whole, on the CPU."""
        for dtype, sha in self._digests.items():
            sha.add(name, tensor.to(dtype).float().numpy())
        if tensor.ndim > 1:
            self.values[name] = sampled_values(name, tensor)

    def content(self) -> Content:
        """Return the content of everything added."""
        float32, bfloat16, float16 = (sha.hexdigest() for sha in self._digests.values())
        return Content(float32, bfloat16, float16, self.values)


def content_of(shapes: Shapes, weights: BlockWeights) -> Content:
    """Read all of a model's tensors.

    Args:
        shapes: their names, in order. weights: their source.

    Raises:
        RunError: a file is missing or damaged, or has no such tensor.
    """
    reading = Reading()
    for name in shapes:
        ((_, tensor),) = weights.read([name])
        reading.add(name, tensor)
    return reading.content()


# ---------------------------------------------------------------- statements
# Written from a run, read from a file that may be anybody's.

_MEND = "take the certificate as it was published"
#: Fields of ``data`` that say where something lies or how it is read, and change no sample.
_PLACES = {"path", "val_path", "tokenizer", "decontaminate", *HOW_READ}


class Commitments(TypedDict):
    """Hashes that open with the salt alone (certificate.py)."""

    init_seed: Sha256
    birth: Sha256
    data_order: Sha256


class Digests(TypedDict):
    """Digests of a checkpoint's weights (definitions §1): unchanged, and rounded like many exports."""

    step: Count
    float32: Sha256
    bfloat16: Sha256
    float16: Sha256


class Config(TypedDict):
    """Config of the run without its seeds."""

    model: dict[str, Any]
    optim: dict[str, Any]
    max_steps: Count
    global_batch_size: Count


class Statement(TypedDict):
    """A certificate; the file also holds the digest of all of it, as ``sha256``."""

    kind: Literal["birthmark certificate"]
    format: Literal[1]
    config: Config
    n_params: Count
    commitments: Commitments
    checkpoints: Annotated[list[Digests], Len(0, 1_000_000)]
    versions: dict[str, str | None]


class _Sealed(Statement):
    sha256: Sha256


def order_inputs(config: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """Collect everything that decides which tokens a run reads at which step, without the places of files.

    Args:
        config: config of the run.
        data: the corpus, as recorded in the birth certificate.
    """
    return {
        "corpus": _placeless(data),
        "data": _placeless(asdict(config.data)),
        "seq_len": config.model.max_seq_len,
        "global_batch_size": config.trainer.global_batch_size,
        "batch_ramp": asdict(config.trainer.batch_ramp),
    }


def _placeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _placeless(inner) for name, inner in value.items() if name not in _PLACES}
    return [_placeless(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def state(run: RunDir, advance: Callable[[int], object] = lambda n_checkpoints: None) -> Statement:
    """Build the statement of a run's certificate; draw and keep a salt if it has none yet.

    Args:
        run: the run; all its present checkpoints are read.
        advance: called with 1 after each checkpoint.

    Raises:
        UsageError: a run whose start no seed can re-create.
        RunError: a file of the run is missing or damaged, or its birth certificate contradicts config and seed.
    """
    config = read_config(run.config)
    if config.init_from:
        raise UsageError(
            f"{run.path}: began from {config.init_from}, and no seed gives that again; certify the run that it is of"
        )
    if own := config.model.attention.user_parts:
        raise UsageError(
            f"{run.path}: model.attention.{min(own)} is a class of your own, which others cannot draw again"
        )
    birth = run.read_birth()
    drawn = certificate_of(config.model, config.init_seed)
    expected = {name: drawn[name] for name in ("digest", "n_params")}
    expected |= {"init_seed": config.init_seed, "init_from": None, "data_seed": config.data.data_seed}
    for name, value in expected.items():
        if (said := birth.get(name)) != value:
            raise RunError(
                f"{run.birth}: says {name} {one_line(str(said)[:20])}, and config.yaml gives {str(value)[:20]}; "
                "restore both from a copy"
            )
    salt, data_order = keep_secret(run, order_inputs(config, birth.get("data", {})))
    checkpoints: list[Digests] = []
    shapes = tensor_shapes(config.model)
    for step, folder in run.checkpoints_by_step().items():
        # The weights at step 0 are committed to, not stated: seeds could be tried against their digest.
        if step:
            found = content_of(shapes, CheckpointWeights(folder))
            checkpoints.append(
                {"step": step, "float32": found.float32, "bfloat16": found.bfloat16, "float16": found.float16}
            )
        advance(1)
    return {
        "kind": "birthmark certificate",
        "format": 1,
        "config": {
            "model": asdict(config.model),
            "optim": asdict(config.optim),
            "max_steps": config.trainer.max_steps,
            "global_batch_size": config.trainer.global_batch_size,
        },
        "n_params": drawn["n_params"],
        "commitments": {
            "init_seed": commitment("init_seed", config.init_seed, salt),
            "birth": commitment("birth", birth["digest"], salt),
            "data_order": commitment("data_order", data_order, salt),
        },
        "checkpoints": checkpoints,
        "versions": birth.get("versions", {}),
    }


def write_statement(file: Path, statement: Statement) -> str:
    """Write a certificate; return its digest."""
    write_sealed_json(file, statement)
    return content_digest(statement)


def read_statement(file: Path) -> Statement:
    """Read a certificate and check its content against its own digest.

    Raises:
        RunError: the file is missing, lacks a field, or was changed.
    """
    found: Statement = read_sealed_json(file, _Sealed, _MEND)
    return found


def model_of(statement: Statement, file: Path) -> ModelConfig:
    """Build the config of the model that a certificate describes.

    Raises:
        RunError: not a model of this version, or one that names code: a certificate may come from anybody.
    """
    try:
        found = build_model(statement["config"]["model"])
    except UsageError as error:
        raise RunError(f"{file}: config.model is none of this version ({one_line(error)})") from None
    if own := found.attention.user_parts:
        raise RunError(
            f"{file}: config.model.attention.{min(own)} names code, which no certificate may; do not trust it"
        )
    return found
