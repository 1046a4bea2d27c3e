"""Initial model of a run: a birth, or the checkpoint that ``init_from`` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from ..errors import RunError, UsageError
from ..findings.formatting import steps_near
from ..measure.records import RunDir
from ..models.adapter_config import AdapterConfig
from ..models.adapters import attach, initialize_adapter, is_adapter
from ..models.birth import Sharder, born, empty_decoder
from ..models.by_block import BlockWeights, DrawnWeights
from ..models.config import ModelConfig, dotted
from ..models.decoder import Decoder
from ..models.exchange.pretrained import Pretrained, load_pretrained, read_pretrained
from .by_name.name_grammar import ModelName, read_name
from .checkpoints.folder_io import CheckpointWeights
from .checkpoints.stored_tensors import load_into
from .config import RunConfig
from .config_file import read_config
from .saved_config import read_saved_fields

# ── what init_from names ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class InitialCheckpoint:
    """A checkpoint that has been found; no tensor has been read."""

    name: str
    """``RUN@STEP``; of a run in a store its URL."""
    config: ModelConfig
    """The model."""
    tokenizer_file: str | None
    """Path or URL of the run's ``tokenizers`` JSON, if its data is text."""
    checkpoint: Path
    """Folder of the checkpoint."""


@dataclass(frozen=True)
class InitialBirth:
    """A birth that a name means: the model of a config, or of a run, before any training."""

    config: ModelConfig
    """The model."""
    init_seed: int
    """Its seed."""
    tokenizer_file: str | None = None
    """Path or URL of the run's ``tokenizers`` JSON, if its data is text."""


def find_initial_checkpoint(name: str) -> InitialCheckpoint | None:
    """Find the checkpoint that ``RUN`` (its last), ``RUN@STEP`` or a checkpoint's folder names; None if that is not a
    run, or its birth.

    Raises:
        UsageError: a run without this checkpoint.
        RunError: a run whose config this version cannot read.
    """
    named = read_name(name)
    if named.average:
        raise UsageError(
            f"--init_from {name}: is {named.in_words}; birthmark export {name} FOLDER, and start from that"
        )
    if named.kind != "run" or named.number == 0:
        return None
    run, there = named.run, named.run.checkpoints_by_step()
    if not there:
        raise UsageError(f"--init_from {name}: {run.path} has no checkpoint yet; train it further, or give RUN@0")
    if named.number is not None and named.number not in there:
        raise UsageError(f"--init_from {name}: {run.path} has checkpoints of steps {steps_near(there, named.number)}")
    found = max(there) if named.number is None else named.number
    return InitialCheckpoint(f"{named.lasting}@{found}", _model_of(run), _tokenizer_of(named), there[found])


def find_initial_birth(name: str) -> InitialBirth | None:
    """Find the birth that ``CONFIG@SEED``, ``CONFIG`` or ``RUN@0`` names; None if it names another model.

    Raises:
        UsageError: a config that is impossible, or whose own start is no birth.
    """
    named = read_name(name)
    if named.kind == "birth" or (named.kind == "run" and named.number == 0 and not named.average):
        run = named.run if named.kind == "run" else None
        config = read_config(named.path if run is None else run.config)
        if config.init_from:
            raise UsageError(f"--init_from {name}: begins from {config.init_from} itself; give that")
        seed = config.init_seed if run is not None or named.number is None else named.number
        return InitialBirth(config.model, seed, None if run is None else _tokenizer_of(named))
    return None


def _tokenizer_of(named: ModelName) -> str | None:
    """Return the path or URL of a run's ``tokenizers`` JSON; None if its data is no text."""
    file = named.run.own_tokenizer()
    return None if file is None else f"{named.lasting}/{file.name}"


def _model_of(run: RunDir) -> ModelConfig:
    fields = {name: value for name, value in read_saved_fields(run).items() if name.startswith("model.")}
    unknown = sorted(fields.keys() - dotted(asdict(ModelConfig()), "model.").keys())
    if unknown:
        raise RunError(f"{run.config}: {unknown[0]} is unknown to this version; it was written by another")
    return config_group(ModelConfig, fields, "model.")


def config_group(kind: Any, fields: Mapping[str, Any], prefix: str) -> Any:
    """Build the group of fields ``kind`` from all fields of a run by dotted name; its own begin with ``prefix``."""
    hints = get_type_hints(kind)
    values = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        nested = dataclasses.is_dataclass(hints[name])
        values[name] = config_group(hints[name], fields, f"{prefix}{name}.") if nested else fields[prefix + name]
    return kind(**values)


def load_initial_checkpoint(
    source: InitialCheckpoint, device: torch.device | str = "cpu", shard: Sharder | None = None
) -> Decoder:
    """Load the model of a checkpoint with its buffers, ready to be trained, without the optimizer's state.

    Args:
        source: the checkpoint, and the config for the model.
        device: device of this process's shard.
        shard: function that shards the model over processes; each reads its shard of every tensor. Parts that it
            attaches get no values.

    Raises:
        RunError: a file, which is named, is missing, damaged or of another model.
    """
    weights = CheckpointWeights(source.checkpoint)
    model = empty_decoder(source.config, device, shard)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            load_into(tensor, weights.required(name))
    return model


def _source(named: str) -> InitialCheckpoint | Pretrained:
    """Open the model that ``init_from`` names.

    Raises:
        UsageError, RunError: nothing there, or nothing to continue from.
    """
    origin = find_initial_checkpoint(named)
    if origin is not None:
        run = RunDir(origin.checkpoint.parent.parent)
        if (kind := read_saved_fields(run)["adapter.kind"]) != "none":
            mend = (
                f"birthmark export {origin.name} FOLDER --merge, and start from that" if kind == "lora" else "its base"
            )
            raise UsageError(
                f"--init_from {named}: holds an adapter ({kind}), which is no model by itself; give {mend}"
            )
        return origin
    try:
        return read_pretrained(named)
    except UsageError as error:
        if read_name(named).kind not in ("gguf", "hub"):
            raise UsageError(
                f"--init_from {named}: neither a run, RUN@STEP, a checkpoint nor a folder of transformers "
                f"({str(error).removeprefix(f'{named}: ')})"
            ) from None
        raise UsageError(f"--init_from {error}") from None


def _adopt(asked: ModelConfig, source: InitialCheckpoint | InitialBirth | Pretrained, named: str) -> ModelConfig:
    """Return the source's model config, at the requested length.

    Raises:
        UsageError: another field contradicts the source.
    """
    default, wanted, existing = (dotted(asdict(config)) for config in (ModelConfig(), asked, source.config))
    resizable = {"max_seq_len"} if source.config.positions != "learned" else set()
    # The distribution at birth does not matter where there is no birth.
    drawn = isinstance(source, InitialBirth)
    free = {name for name in wanted if name.startswith("init.") and not drawn} | resizable
    clash = [name for name in wanted if wanted[name] not in (default[name], existing[name]) and name not in free]
    if clash:
        raise UsageError(
            f"model.{clash[0]} is {wanted[clash[0]]}, but --init_from {named} has {existing[clash[0]]}: leave it out"
        )
    length = asked.max_seq_len if resizable and asked.max_seq_len != ModelConfig.max_seq_len else None
    return replace(source.config, max_seq_len=length or source.config.max_seq_len)


def resolve_init_from(config: RunConfig) -> RunConfig:
    """Return the run's config with the model and, for text, the tokenizer of its source; a run is replaced by its exact
    checkpoint.

    Raises:
        UsageError: the config asks for another model, or text comes without the tokenizer of the source.
        RunError: a damaged file of the source.
    """
    if not config.init_from:
        return config
    if (birth := find_initial_birth(config.init_from)) is not None:
        return _begin_at(config, birth)
    source = _source(config.init_from)
    model = _adopt(config.model, source, config.init_from)
    if misfits := config.adapter.misfits(model):
        raise UsageError("; ".join(misfits))
    data = config.data
    if data.path != "backcopy" and data.tokenizer == "bpe":
        if source.tokenizer_file is None:
            raise UsageError(
                f"data.tokenizer: --init_from {config.init_from} has no tokenizer.json, and its token ids mean nothing "
                "without; give the path of its tokenizer"
            )
        data = replace(data, tokenizer=str(source.tokenizer_file))
    # A run may go on after this; its checkpoint stays what it is.
    named = source.name if isinstance(source, InitialCheckpoint) else config.init_from
    return replace(config, init_from=named, model=model, data=data)


def _begin_at(config: RunConfig, birth: InitialBirth) -> RunConfig:
    """Return the run's config for a birth that it starts from: that of a run that is born so.

    Raises:
        UsageError: the config asks for another model or seed, or for an adapter.
    """
    named = config.init_from
    if config.adapter.is_on:
        raise UsageError(
            f"--init_from {named}: is a birth, where nothing is to be adapted; give a trained model, or adapter.kind "
            "none"
        )
    if config.init_seed not in (RunConfig.init_seed, birth.init_seed):
        raise UsageError(
            f"init_seed is {config.init_seed}, but --init_from {named} is the birth of seed {birth.init_seed}: leave "
            "one out"
        )
    data = config.data
    if data.path != "backcopy" and data.tokenizer == "bpe" and birth.tokenizer_file is not None:
        data = replace(data, tokenizer=birth.tokenizer_file)
    model = _adopt(config.model, birth, named)
    return replace(config, init_from="", init_seed=birth.init_seed, model=model, data=data)


def initialize_model(
    config: RunConfig, init_seed: int, device: torch.device | str = "cpu", shard: Sharder | None = None
) -> Decoder:
    """Build the model at step 0 of the run for its own seed, with its adapter if it trains one; a birth of the same
    architecture for any other seed.

    Args:
        config: the run.
        init_seed: the run's seed, or another.
        device: device of this process.
        shard: function that shards it over processes.
    """
    if config.init_from and init_seed == config.init_seed:
        source = _source(config.init_from)
        shard = _with_adapter(config.adapter, shard)
        if isinstance(source, InitialCheckpoint):
            model = load_initial_checkpoint(replace(source, config=config.model), device, shard)
        else:
            model = load_pretrained(replace(source, config=config.model), device=device, shard=shard)
        initialize_adapter(model, config.model.init, init_seed)
        return model
    return born(config.model, init_seed, device, shard)


def _with_adapter(adapter: AdapterConfig, shard: Sharder | None) -> Sharder | None:
    """Return a sharder that attaches the adapter to the model first: both are sharded alike."""
    if not adapter.is_on:
        return shard

    def prepare(model: Decoder) -> None:
        attach(model, adapter)
        if shard is not None:
            shard(model)

    return prepare


def initial_weights(config: RunConfig, init_seed: int) -> BlockWeights:
    """Return the weights of :func:`initialize_model`, read or drawn on request.

    Raises:
        UsageError, RunError: the model that the run starts from is missing or damaged.
    """
    if config.init_from and init_seed == config.init_seed:
        check_no_adapter(config)
        source = _source(config.init_from)
        if isinstance(source, InitialCheckpoint):
            return CheckpointWeights(source.checkpoint)
        source.check_tables()
        return source
    return DrawnWeights(config.model, init_seed)


def check_no_adapter(config: RunConfig) -> None:
    """Raise UsageError for a model with an adapter that would be read a block at a time."""
    if config.adapter.is_on:
        raise UsageError(
            f"--stream: the model has an adapter ({config.adapter.kind}), which is not read a block at a time; leave "
            "--stream out"
        )
