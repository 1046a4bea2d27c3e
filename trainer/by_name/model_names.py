"""Models by any of their names: a run, a checkpoint, a birth, a folder of transformers, a GGUF file, a hub id."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NotRequired

import torch
from typing_extensions import TypedDict, override

from ...errors import RunError, UsageError
from ...files import read_json
from ...findings.formatting import in_few_words, steps_near
from ...measure.hf import HFConfig, HFModel
from ...measure.records import RunDir, step_of
from ...models.adapters import base_digest, is_adapter
from ...models.by_block import BlockWeights
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...models.exchange.gguf_file import filler
from ...models.exchange.gguf_model import kinds_of
from ...models.exchange.pretrained import Pretrained, load_pretrained, read_pretrained
from .. import initial_model
from ..checkpoints.folder_io import CheckpointWeights, find_checkpoint, load_model
from ..checkpoints.state_file import BASE
from ..checkpoints.stored_tensors import CheckpointFolder, load_into
from ..config import RunConfig
from ..config_file import read_config
from ..initial_model import initialize_model
from .hf_folder import HFFolder, find_hf_folder
from .name_grammar import read_name
from .shipped_configs import nearest_config


def load_trained(
    config: RunConfig,
    checkpoint: Path,
    device: torch.device | str = "cpu",
    read: Callable[[Path], CheckpointWeights] = CheckpointWeights,
) -> Decoder:
    """Load the model of a run's checkpoint, without the optimizer's state.

    Args:
        config: the run.
        checkpoint: folder of the checkpoint.
        read: function that finds the weights of a checkpoint.
        device: device of the model.

    Raises:
        RunError: a file is missing or damaged; or the model that the run started from has changed.
    """
    if not config.adapter.is_on:
        return load_model(config.model, read(checkpoint), device)
    weights = read(checkpoint)
    model = initialize_model(config, config.init_seed, device)
    _check_base(config, checkpoint, base_digest(model))
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            load_into(tensor, weights.required(name))
    return model.eval()


def _check_base(config: RunConfig, checkpoint: Path, now: str) -> None:
    was = CheckpointFolder(checkpoint).tree(lambda tensor: None).get(BASE)
    if now != was:
        raise RunError(
            f"{checkpoint}: its adapter is for {config.init_from} with digest {str(was)[:12]}…, which now has "
            f"{now[:12]}…; restore that model, or adapt the new one"
        )


# ---------------------------------------------------------------- models by any of their names
# A run, a checkpoint, a birth, a folder of transformers, a GGUF file, a hub id.


@dataclass(frozen=True)
class AnySource:
    """A model of any kind that has been found but not loaded."""

    name: str
    """Name, as the user gave it."""
    config: ModelConfig | HFConfig
    """The model."""
    load: Callable[[], Decoder | HFModel]
    """Function that allocates the model and reads or draws its weights."""
    tokenizer: Path | None
    """``tokenizers`` JSON of the text it reads, where it has one."""
    stored_kinds: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    """Types of storage in a GGUF model: type → number of tensors; empty of any other."""

    @property
    def longest(self) -> int | None:
        """Largest number of tokens that it reads; None without a limit."""
        return self.config.max_seq_len

    def stranger(self, seed: int, on: torch.device | str) -> Decoder | HFModel:
        """Return a birth of its config from a seed, if only ``transformers`` can draw it."""
        raise NotImplementedError


@dataclass(frozen=True)
class ModelSource(AnySource):
    """Source of a model that fits the decoder."""

    config: ModelConfig
    load: Callable[[], Decoder]
    weights: Callable[[], BlockWeights]
    """Function that finds the model's weights, to be read or drawn a block at a time: the model is not allocated."""


@dataclass(frozen=True)
class HFSource(AnySource):
    """Source of a model of ``transformers`` that does not fit the decoder, or that is in memory."""

    config: HFConfig
    load: Callable[[], HFModel]
    birth: Callable[[int], HFModel] | None = None
    """Function that initialises another model as ``transformers`` does, from a seed of torch's."""

    @override
    def stranger(self, seed: int, on: torch.device | str) -> HFModel:
        if self.birth is None:
            raise UsageError(f"{self.name}: is in memory, and its births are not known; leave out strangers")
        return self.birth(seed).to(on)


@dataclass(frozen=True)
class SourceWithBirth(ModelSource):
    """Source of a model with a config of this package, from which its birth can be drawn."""

    births: RunConfig
    """Config from which the model's birth, and births of other seeds, are drawn."""
    init_seed: int
    """Seed of its own birth."""
    step: int
    """Optimizer steps that it has been trained for."""
    checkpoint: Path | None = None
    """Folder of its weights; None for a birth, which is drawn."""
    run: Path | None = None
    """Run of the model; None for a birth that a config names."""
    averaged: str = ""
    """For an average of trained weights, its kind in a few words."""

    def born(self, init_seed: int) -> Decoder:
        """Allocate the model of step 0 for its own seed, or a birth of the same config for another seed."""
        return initial_model.initialize_model(self.births, init_seed)

    def born_weights(self, init_seed: int) -> BlockWeights:
        """Return the weights of :meth:`born`, read or drawn a block at a time."""
        return initial_model.initial_weights(self.births, init_seed)

    def birth(self) -> Decoder:
        """Allocate the model of step 0."""
        return self.born(self.init_seed)


def open_source(name: str) -> ModelSource:
    """Find a model.

    Args:
        name: ``RUN`` (its last checkpoint), ``RUN@STEP`` (``@0`` is its birth) or a checkpoint's folder, each also with
            ``@ema``, the moving average of the weights that it holds, or ``@meanK``, the mean of the last K checkpoints
            up to it; ``CONFIG@SEED`` or ``CONFIG`` (a birth; a YAML file, or the name of one that comes with the
            package), a folder that transformers' save_pretrained wrote, a GGUF file or a folder that holds one, or a
            hub id, ``@REVISION`` if wanted.

    Raises:
        UsageError: there is no such model.
        RunError: a damaged file.
    """
    native = open_source_with_birth(name)
    if native is not None:
        return native
    try:
        found = read_pretrained(name)
    except UsageError as error:
        raise no_such_model(name, error) from None
    return ModelSource(
        name,
        found.config,
        partial(load_pretrained, found),
        found.tokenizer_file,
        partial(_checked, found),
        stored_kinds=kinds_of(found.folder),
    )


def _checked(found: Pretrained) -> Pretrained:
    found.check_tables()
    return found


def open_any_source(
    name: str, *, trust_remote_code: bool = False, tell: Callable[[str], object] = lambda line: None
) -> AnySource:
    """Find a model as :func:`open_source` does, also one of ``transformers`` that does not fit the decoder.

    Args:
        name: see :func:`open_source`.
        trust_remote_code: run the code that a model of ``transformers`` brings, if it brings any.
        tell: called with each line that a person should see: the files that will run, before they do.

    Raises:
        UsageError: there is no such model.
        RunError: a damaged file.
    """
    if (native := open_source_with_birth(name)) is not None:
        return native
    with contextlib.suppress(UsageError):
        return open_source(name)
    found = hf_folder_of(name, trust_remote_code, tell)
    return HFSource(name, found.shape(), found.load, found.tokenizer, found.birth, stored_kinds=kinds_of(found.folder))


def hf_folder_of(name: str, trust_remote_code: bool, tell: Callable[[str], object]) -> HFFolder:
    """Find the folder or hub id that a name means; notes go to ``tell``.

    Raises:
        UsageError: there is no such model.
        RunError: a damaged file.
    """
    try:
        found = find_hf_folder(name, trust_remote_code=trust_remote_code, tell=tell)
    except UsageError as error:
        raise no_such_model(name, error) from None
    if (note := found.weights.note) is not None:
        tell(note)
    return found


def no_such_model(name: str, error: UsageError) -> UsageError:
    """Turn ``error``, from the search for a model of ``transformers``, into the error for a path without any kind of
    model.
    """
    found = read_name(name)
    if found.kind == "hub" and "/" not in name and (close := nearest_config(name.partition("@")[0])) is not None:
        return UsageError(f"{error}; did you mean {close}, a config?")
    if found.kind in ("gguf", "hub") or (found.path / "config.json").is_file():
        return error
    why = str(error).removeprefix(f"{name}: ")
    kinds = "neither a run, RUN@STEP, a checkpoint, CONFIG@SEED nor a folder of transformers"
    return UsageError(f"{name}: {kinds} ({why})")


def open_source_with_birth(name: str) -> SourceWithBirth | None:
    """Find a model with a config of this package; None if it is of ``transformers``, or not a model.

    Raises:
        UsageError: a run without this step, a config that is impossible, a seed or step that is no number, or a folder
            of this package without weights.
    """
    found = read_name(name)
    if found.kind == "run":
        return _of_run(name, found.run, found.number, found.average)
    if found.kind == "birth":
        config = initial_model.resolve_init_from(read_config(found.path))
        return _at_birth(name, config, config.init_seed if found.number is None else found.number)
    if found.kind == "checkpoint":
        raise UsageError(f"{name}: is {found.in_words}, whose config says what it is; put it back, RUN/checkpoints/")
    if found.kind in ("measured", "snapshot"):
        raise UsageError(f"{name}: is {found.in_words}; birthmark report reads it, and a model is needed")
    return None


def _of_run(name: str, run: RunDir, step: int | None, average: str) -> SourceWithBirth:
    config = read_config(run.config)
    tokenizer = run.own_tokenizer()
    if step == 0 and average:
        raise UsageError(f"{name}: step 0 is the birth, and has no average; leave @{average} out")
    if step == 0:
        return _at_birth(name, config, config.init_seed, tokenizer, run.path)
    if step is not None and step not in (steps := run.checkpoints_by_step()):
        raise UsageError(f"{name}: {run.path} has no checkpoint of step {step}; there are: {steps_near(steps, step)}")
    checkpoint = find_checkpoint(run, step)
    step = step_of(checkpoint)
    read, averaged = _reader(name, run, step, average)
    load = partial(load_trained, config, checkpoint, read=read)
    weights = partial(_whole_weights, config, checkpoint, read)
    return SourceWithBirth(
        name, config.model, load, tokenizer, weights, config, config.init_seed, step, checkpoint, run.path, averaged
    )


def _reader(name: str, run: RunDir, step: int, average: str) -> tuple[Callable[[Path], CheckpointWeights], str]:
    """Return a function that finds the weights of a checkpoint, or this average of them, and its kind in a few words.

    Raises:
        UsageError: the run has fewer checkpoints.
    """
    if not average:
        return CheckpointWeights, ""
    if average == "ema":
        return partial(CheckpointWeights, average=True), "the moving average of the weights over the steps"
    n, there = int(average.removeprefix("mean")), run.checkpoints_by_step()
    steps = [at for at in there if at <= step][-n:]
    if len(steps) < n:
        raise UsageError(f"{name}: {run.path} has {len(steps)} checkpoints up to step {step}; give @mean{len(steps)}")
    others = [there[at] for at in steps[:-1]]
    at_steps = in_few_words([str(step) for step in steps])
    return partial(CheckpointWeights, others=others), f"the mean of the weights at steps {at_steps}"


def _whole_weights(config: RunConfig, checkpoint: Path, read: Callable[[Path], CheckpointWeights]) -> CheckpointWeights:
    initial_model.check_no_adapter(config)
    return read(checkpoint)


def _at_birth(
    name: str, config: RunConfig, seed: int, tokenizer: Path | None = None, run: Path | None = None
) -> SourceWithBirth:
    load = partial(initial_model.initialize_model, config, seed)
    weights = partial(initial_model.initial_weights, config, seed)
    return SourceWithBirth(name, config.model, load, tokenizer, weights, config, seed, 0, run=run)


class AddedToken(TypedDict):
    """A token beside the vocabulary; some files list it in the vocabulary too."""

    id: int
    content: str


class Vocabulary(TypedDict):
    """Vocabulary of a model of ``tokenizers``: token → id, or a list of tokens with their scores."""

    vocab: dict[str, Any] | list[Any]


class TokenizerFile(TypedDict):
    """A ``tokenizers`` JSON, with the fields that are read here."""

    model: Vocabulary
    added_tokens: NotRequired[list[AddedToken] | None]


def vocabulary(file: Path) -> Any:
    """Return the part of a ``tokenizers`` JSON that gives ids their meaning; other parts may be written in different
    ways.
    """
    content = read_json(file, TokenizerFile, "give the model's own tokenizer")
    vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
    if isinstance(vocab, dict):
        return vocab | {token["content"]: token["id"] for token in added}
    return vocab, sorted(token["content"] for token in added)


def add_tokens(known: dict[int, tuple[str, str]], name: str, file: Path, remedy: str) -> None:
    """Add the tokens of a model to ``known``: id → token and the first model that has it. Ids that fill up an exported
    vocabulary (``[PAD600]`` at 600) have no meaning, and are left out.

    Raises:
        UsageError: an id is in ``known`` as another token; the message ends with ``remedy``.
    """
    content = read_json(file, TokenizerFile, "give the model's own tokenizer")
    vocab, added = content["model"]["vocab"], content.get("added_tokens") or []
    ids = vocab.items() if isinstance(vocab, dict) else ((entry[0], index) for index, entry in enumerate(vocab))
    tokens = {index: token for token, index in ids} | {token["id"]: token["content"] for token in added}
    for index, token in tokens.items():
        if token == filler(index):
            continue
        before, first = known.setdefault(index, (token, name))
        if before != token:
            raise UsageError(
                f"{first} and {name} have different tokenizers: id {index} is {before!r} in one and {token!r} in the "
                f"other; {remedy}"
            )
