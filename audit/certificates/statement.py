"""What a certificate states: written from a run, read from a file that may be anybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ...errors import RunError, UsageError
from ...files import content_digest, one_line, read_sealed_json, write_sealed_json
from ...measure.records import RunDir
from ...models.birth import certificate_of
from ...models.config import ModelConfig
from ...models.parameter_shapes import tensor_shapes
from ...schema import Bounds, Count, Sha256
from ...trainer.checkpoints.folder_io import CheckpointWeights
from ...trainer.config import RunConfig
from ...trainer.config_file import build_model, read_config
from .commitments import commitment, keep_secret
from .streamed_content import content_of

#: In a run's folder, unless it is written elsewhere.
CERTIFICATE = "certificate.json"
_MEND = "take the certificate as it was published"
#: Fields of ``data`` that say where something lies or how it is read, and change no sample.
_PLACES = {
    "path",
    "val_path",
    "tokenizer",
    "decontaminate",
    "cache_dir",
    "stage_to",
    "timeout_s",
    "n_workers",
    "verify",
}


class Commitments(TypedDict):
    """Hashes that open with the salt alone (commitments.py)."""

    init_seed: Sha256
    birth: Sha256
    data_order: Sha256


class Digests(TypedDict):
    """Of a checkpoint's weights (definitions §1): as they are, and rounded, as exports often are."""

    step: Count
    float32: Sha256
    bfloat16: Sha256
    float16: Sha256


class Config(TypedDict):
    """What the run was told to do, but for its seeds."""

    model: dict[str, Any]
    optim: dict[str, Any]
    max_steps: Count
    global_batch_size: Count


class Statement(TypedDict):
    """A certificate; the file has the digest of all of it beside it, as ``sha256``."""

    kind: Literal["birthmark certificate"]
    format: Literal[1]
    config: Config
    n_params: Count
    commitments: Commitments
    checkpoints: Annotated[list[Digests], Bounds(0, 1_000_000)]
    versions: dict[str, str | None]


class _Sealed(Statement):
    sha256: Sha256


def order_inputs(config: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides which tokens a run reads at which step, and nothing that says where they lie.

    Args:
        config: of the run.
        data: the corpus, as its birth certificate records it.
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
    """What a run's certificate states; its salt is drawn and kept where it has none yet.

    Args:
        run: the run; every checkpoint that it has now is read.
        advance: is called with 1 after each checkpoint.

    Raises:
        UsageError: a run whose start no seed gives again.
        RunError: a file of the run is missing or damaged, or its certificate of birth is not what config and seed
            give.
    """
    config = read_config(run.config)
    if config.init_from:
        raise UsageError(
            f"{run.path}: began from {config.init_from}, and no seed gives that again; certify the run that it is of"
        )
    if own := config.model.attention.own_parts:
        raise UsageError(
            f"{run.path}: model.attention.{min(own)} is a class of your own, which others cannot draw again"
        )
    birth = run.read_birth()
    drawn = certificate_of(config.model, config.init_seed)
    if drawn["digest"] != birth["digest"]:
        raise RunError(
            f"{run.birth}: says digest {one_line(birth['digest'][:12])}…, and init_seed {config.init_seed} gives "
            f"{drawn['digest'][:12]}…; restore it and config.yaml from a copy"
        )
    inputs = order_inputs(config, birth.get("data", {}))
    salt = keep_secret(run, inputs)
    checkpoints: list[Digests] = []
    shapes = tensor_shapes(config.model)
    for step, folder in run.checkpoints_by_step().items():
        # What the weights are at step 0 is committed to, not said: seeds could be tried against it.
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
            "data_order": commitment("data_order", inputs, salt),
        },
        "checkpoints": checkpoints,
        "versions": birth.get("versions", {}),
    }


def write_statement(file: Path, statement: Statement) -> str:
    """Write a certificate; its digest."""
    write_sealed_json(file, statement)
    return content_digest(statement)


def read_statement(file: Path) -> Statement:
    """A certificate whose content is what its own digest says.

    Raises:
        RunError: it is missing, lacks a field, or was changed.
    """
    found: Statement = read_sealed_json(file, _Sealed, _MEND)
    return found


def model_of(statement: Statement, file: Path) -> ModelConfig:
    """The model that a certificate describes.

    Raises:
        RunError: no model of this version, or one that names code: a certificate is somebody else's.
    """
    try:
        found = build_model(statement["config"]["model"])
    except UsageError as error:
        raise RunError(f"{file}: config.model is none of this version ({one_line(error)})") from None
    if own := found.attention.own_parts:
        raise RunError(
            f"{file}: config.model.attention.{min(own)} names code, which no certificate may; do not trust it"
        )
    return found
