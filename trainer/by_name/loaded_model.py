"""Loading and measurement of a model by any of its names: from a run, a birth, or ``transformers`` (any family)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...data.probes import bos_controls, passage_probe, random_probe, text_ids
from ...data.tokenizer import TextTokenizer
from ...errors import RunError, UsageError
from ...measure.config import FEWEST_SEQUENCES, SnapshotConfig
from ...measure.gradients import measure_gradients, with_gradients
from ...measure.hf import HFModel
from ...measure.measurement import BirthReference, Measurement, birth_reference, measure
from ...measure.recorder import add_probe, snapshot_of
from ...measure.records import RunDir, Snapshot
from ...measure.user_metrics import MetricLike
from ...models.by_block import BlockWeights, DecoderByBlock, DrawnWeights, Streaming
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from ...models.exchange.gguf_model import kinds_of
from ..config_file import read_config
from ..devices import device
from .model_names import AnySource, ModelSource, SourceWithBirth, hf_folder_of, open_source, open_source_with_birth
from .texts_of_runs import data_of_run

#: The step of a model whose training is not known.
UNKNOWN_STEP = -1


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with its known facts."""

    name: str
    """Name, as the user gave it."""
    model: Decoder | HFModel
    """Model ready to run; a model of ``transformers`` that our decoder cannot be is wrapped, as ``model.model``."""
    newborn: Callable[[], Decoder | HFModel] | None
    """Function that re-creates the model's birth, if that is known."""
    step: int
    """Optimizer steps that it has been trained for; `UNKNOWN_STEP` where that is not known."""
    tokenizer_file: Path | None
    """``tokenizers`` JSON of the text that it reads, if it has one."""
    run: Path | None = None
    """Run of the model, if it belongs to one."""
    stranger: Callable[[int], Decoder | HFModel] | None = None
    """The n-th birth, from 1, of the same config from another seed; where that is known."""
    stored_kinds: Mapping[str, int] = field(default_factory=dict)
    """Types of storage in a GGUF model: type → number of tensors; empty of any other."""
    trained_here: bool = False
    """True if this command trained its run, so that its config is the user's."""

    @property
    def n_positions(self) -> int | None:
        """Largest number of tokens that it can read; None without a limit."""
        return self.model.config.position_limit

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        """Tokenizer of the text that it reads, if it has one."""
        return None if self.tokenizer_file is None else TextTokenizer.load(self.tokenizer_file)


def load_named(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    trust_remote_code: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> LoadedModel:
    """Load a model by any of its names (`open_source`); models of ``transformers`` need not fit the decoder.

    Args:
        name: the model.
        dtype: type of its weights.
        trust_remote_code: run the code that a model of ``transformers`` brings, if it brings any.
        tell: called with each line that a person should see: the files that will run, before they do.

    Raises:
        UsageError: there is no such model, or it cannot be measured.
        RunError: a damaged file.
    """
    native = open_source_with_birth(name)
    if native is None:
        return _load_hf(name, dtype, trust_remote_code, tell)
    model = native.load().to(dtype)
    return LoadedModel(
        name,
        model,
        lambda: native.birth().to(dtype),
        native.step,
        native.tokenizer,
        native.run,
        lambda n: native.born(native.init_seed + n).to(dtype),
    )


def _load_hf(name: str, dtype: torch.dtype, trust_remote_code: bool, tell: Callable[[str], object]) -> LoadedModel:
    """Load a folder of transformers, a GGUF file or a hub id through the library."""
    found = hf_folder_of(name, trust_remote_code, tell)
    return LoadedModel(
        name, found.load(dtype), None, UNKNOWN_STEP, found.tokenizer, stored_kinds=kinds_of(found.folder)
    )


def default_seq_len(loaded: LoadedModel) -> int:
    """Return the number of tokens in a probe's sequence: as in a run's snapshot, or fewer if the model reads fewer."""
    longest = loaded.model.config.max_seq_len
    return SnapshotConfig.seq_len if longest is None else min(SnapshotConfig.seq_len, longest)


def drawn_ids(loaded: LoadedModel) -> np.ndarray | None:
    """Return the ids from which a random probe is drawn: None, all, for a run and its births, as in its snapshots; for
    another model those that its tokenizer has.
    """
    return text_ids(loaded.tokenizer, loaded.model.config.vocab_size) if loaded.newborn is None else None


def random_tokens(loaded: LoadedModel, settings: SnapshotConfig, probe_seed: int) -> np.ndarray:
    """Draw random tokens for a model (`drawn_ids`), int64 ``[N, T]``."""
    n, length = settings.n_sequences, settings.seq_len
    return random_probe(loaded.model.config.vocab_size, n, length, probe_seed, drawn_ids(loaded))


class TextProbe(NamedTuple):
    """Text to measure a model on."""

    tokens_NT: np.ndarray
    """Int64 ids."""
    documents_NT: np.ndarray | None = None
    """The number of each token's document in its sequence; None where a sequence is of one."""


def text_for(
    loaded: LoadedModel, settings: SnapshotConfig, path: Sequence[str] | None, fewest: int | None = None
) -> TextProbe:
    """Build a text probe for a model, read by its own tokenizer.

    Args:
        loaded: the model.
        settings: the probe's size.
        path: files or folders of text, as in ``data.path``; None: the validation text of its own run.
        fewest: sequences of that text that are enough; by default all that are asked for.

    Raises:
        UsageError: the model has no tokenizer, there is too little text, or the model belongs to no run and no text is
            given.
    """
    n, length = settings.n_sequences, settings.seq_len
    if path is not None:
        tokenizer = loaded.tokenizer
        if tokenizer is None:
            raise UsageError(f"{loaded.name}: has no tokenizer to read text with")
        given = path[0] if len(path) == 1 else path
        return TextProbe(passage_probe(given, tokenizer, n, length, loaded.model.config.vocab_size))
    if loaded.run is None:
        raise UsageError(f"{loaded.name}: is no run with validation text of its own; give text, --data PATH")
    data = data_of_run(loaded.name, loaded.run, trained_here=loaded.trained_here)
    tokens_NT = data.text_probe(n, length, fewest)
    if data.borders is None:
        return TextProbe(tokens_NT)
    return TextProbe(tokens_NT, data.borders.documents(torch.from_numpy(tokens_NT)).numpy())


def text_of_run(loaded: LoadedModel, settings: SnapshotConfig, tell: Callable[[str], object]) -> TextProbe | None:
    """Build the text probe that a snapshot of a run has by default; None if it reads no text, or if its text cannot be
    had, with a line to ``tell``.
    """
    if loaded.run is None or not read_config(RunDir(loaded.run).config).data.reads_text:
        return None
    n = settings.sequences(reads_text=True)["text"]
    try:
        return text_for(loaded, replace(settings, n_sequences=n), None, FEWEST_SEQUENCES)
    except UsageError as error:
        tell(f"random tokens alone, not text: {error}")
        return None


def is_birth_itself(loaded: LoadedModel) -> bool:
    """Return True if a model is at step 0 and comes by block: its reference is then computed in its own pass."""
    return isinstance(loaded.model, DecoderByBlock) and loaded.step == 0


def has_controls(loaded: LoadedModel) -> bool:
    """Return True if `measure_loaded` measures with and without BOS by default: not if each pass reads all weights
    again.
    """
    tokenizer = None if isinstance(loaded.model, DecoderByBlock) else loaded.tokenizer
    return tokenizer is not None and tokenizer.bos is not None and tokenizer.bos < loaded.model.config.vocab_size


#: Given how many blocks batches pass in all, shows how many of them have passed.
Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]


@contextmanager
def _no_progress(n_blocks: int) -> Iterator[Callable[[int], object]]:
    yield lambda n_blocks: None


@contextmanager
def _blocks_counted(model: Decoder | HFModel, advance: Callable[[int], object]) -> Iterator[None]:
    """Call ``advance`` with 1 after each block in a pass of the model; a pass that only inspects it does not count."""
    if isinstance(model, DecoderByBlock):
        model.streaming.advance = advance
        yield
        return
    is_passing = False

    def begin(*_: object) -> None:
        nonlocal is_passing
        is_passing = True

    def end(*_: object) -> None:
        nonlocal is_passing
        is_passing = False

    def passed(*_: object) -> None:
        if is_passing:
            advance(1)

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(begin))
        hooks.enter_context(model.register_forward_hook(end))
        for block in model.blocks:
            hooks.enter_context(block.register_forward_hook(passed))
        yield


def measure_loaded(
    loaded: LoadedModel,
    settings: SnapshotConfig,
    probe_seed: int = 0,
    metrics: Sequence[MetricLike] = (),
    text: TextProbe | None = None,
    n_strangers: int = 0,
    controls: bool | None = None,
    progress: Progress = _no_progress,
) -> Snapshot:
    """Take one snapshot of ``loaded`` on a random probe, and on text if given, compared with its birth if known.

    Args:
        loaded: the model, on the device where it is to run.
        settings: the probe's size, batching, and your metrics.
        probe_seed: seed of the probe.
        metrics: more of your metrics: ``module:Class``, classes or instances.
        text: text probe from `text_for`.
        n_strangers: births of other seeds to compare with too, as controls.
        controls: measure a few sequences with and without BOS too (`bos_controls`); None: see `has_controls`.
        progress: bar that gets the number of block passes of all batches, and shows how many are done.

    Raises:
        RunError: the model gives NaN or inf.
        UsageError: the model cannot be measured.
    """
    model = loaded.model
    by_block = isinstance(model, DecoderByBlock)
    if settings.gradients and by_block:
        raise UsageError("--gradients and --stream: a backward pass goes through all blocks; leave one of them out")
    probe_NT = random_tokens(loaded, settings, probe_seed)
    if n_strangers and loaded.stranger is None:
        raise UsageError(f"--strangers {n_strangers}: how {loaded.name} was born is not known; leave it out")
    tokenizer = loaded.tokenizer
    by_probe = {"random": TextProbe(probe_NT), **({} if text is None else {"text": text})}
    if tokenizer is not None and (has_controls(loaded) if controls is None else controls):
        text_NT = None if text is None else text.tokens_NT
        by_probe |= {name: TextProbe(probe) for name, probe in bos_controls(tokenizer, probe_NT, text_NT).items()}
    # One pass through the blocks is enough if the model is compared with itself.
    is_newborn = is_birth_itself(loaded)
    n_births = (loaded.newborn is not None and not is_newborn) + n_strangers
    passes = ["random"] * n_births + [*by_probe]
    batches = [1 if by_block else ceil(len(by_probe[name].tokens_NT) / settings.on_any_device) for name in passes]
    start = time.perf_counter()
    with progress(sum(batches) * model.config.n_layers) as advance:

        def reference(born: Decoder | HFModel) -> BirthReference:
            # Models by block keep only their current block on a device.
            here = born if isinstance(born, DecoderByBlock) else born.to(model.device)
            with _blocks_counted(here, advance):
                return birth_reference(here, probe_NT, settings.on_any_device, settings.attention_weights)

        birth = None if loaded.newborn is None or is_newborn else reference(loaded.newborn())
        numbers = range(1, n_strangers + 1)
        strangers = [] if loaded.stranger is None else [reference(loaded.stranger(n)) for n in numbers]
        found: dict[str, Measurement] = {}
        try:
            with _blocks_counted(model, advance):
                for name, probe in by_probe.items():
                    found[name] = measure(
                        model,
                        probe.tokens_NT,
                        birth,
                        strangers,
                        batch_size=settings.on_any_device,
                        sink_epsilon=settings.sink_epsilon,
                        # Metrics of yours read the probes that were asked for.
                        metrics=[*settings.metrics, *metrics] if name in ("random", "text") else [],
                        documents_NT=probe.documents_NT,
                        is_newborn=is_newborn and birth is None,
                        attention_weights=settings.attention_weights,
                    )
                    if is_newborn and birth is None:
                        arrays = found[name].arrays
                        birth = BirthReference(arrays["mean_direction"], arrays["mean_prob"])
                if settings.gradients and not isinstance(model, DecoderByBlock):
                    name = "random" if text is None else "text"
                    tokens_NT, documents_NT = by_probe[name]
                    more = measure_gradients(
                        model, tokens_NT, batch_size=settings.on_any_device, documents_NT=documents_NT
                    )
                    found[name] = with_gradients(found[name], more)
        except (RunError, UsageError) as error:
            raise type(error)(f"{loaded.name}: {error}") from None
    origin = None if loaded.run is None else RunDir(loaded.run).read_birth().get("init_from")
    token_texts = None if tokenizer is None else tokenizer.token_texts
    ids = drawn_ids(loaded)
    snapshot = snapshot_of(
        model,
        found["random"],
        probe_NT,
        probe_seed,
        about={"step": loaded.step, "source": loaded.name}
        | ({"init_from": origin} if origin else {})
        | ({"stored_kinds": dict(loaded.stored_kinds)} if loaded.stored_kinds else {}),
        seconds=time.perf_counter() - start,
        birth=birth,
        top_k=settings.top_k,
        token_texts=token_texts,
        n_tokens=None if ids is None else len(ids),
    )
    for name, measured in found.items():
        if name != "random":
            snapshot = add_probe(snapshot, name, measured, token_texts, by_probe[name].tokens_NT)
    if tokenizer is not None and tokenizer.bos is not None and "bos" in found:
        # Pages say which token it is, and whether texts begin with it.
        text_of_bos = tokenizer.token_texts([tokenizer.bos])[0]
        said = {"token": tokenizer.bos, "text": text_of_bos, "is_added": bool(tokenizer.before_text)}
        snapshot.summary["probe_bos"].update(said)
    return snapshot


# ---------------------------------------------------------------- model by block
# Models by any of their names with one block at a time in memory: ``--stream``.


def open_by_block(name: str, dtype: torch.dtype, streaming: Streaming) -> LoadedModel:
    """Open a model by any of its names, if it fits the decoder (`open_source`).

    Args:
        name: the model.
        dtype: type of the parameters.
        streaming: scratch space and progress callback of its passes.

    Raises:
        UsageError: there is no such model, or it does not fit the decoder.
        RunError: a damaged file.
    """
    source = open_source(name)

    def by_block(weights: BlockWeights) -> DecoderByBlock:
        return DecoderByBlock(source.config, weights, dtype, device(), streaming)

    model = by_block(source.weights())
    if not isinstance(source, SourceWithBirth):
        return LoadedModel(name, model, None, UNKNOWN_STEP, source.tokenizer, stored_kinds=source.stored_kinds)
    return LoadedModel(
        name,
        model,
        lambda: by_block(source.born_weights(source.init_seed)),
        source.step,
        source.tokenizer,
        source.run,
        lambda n: by_block(source.born_weights(source.init_seed + n)),
    )


def source_by_block(source: AnySource, streaming: Streaming) -> ModelSource:
    """Return the same source, with a model that has one block at a time in memory.

    Raises:
        UsageError: the model does not fit the decoder.
    """
    if not isinstance(source, ModelSource):
        raise UsageError(f"{source.name}: --stream reads models that our decoder can be, and this is none of them")

    def load() -> DecoderByBlock:
        return DecoderByBlock(source.config, source.weights(), device=device(), streaming=streaming)

    return replace(source, load=load)


def birth_by_block(config: ModelConfig, init_seed: int, streaming: Streaming) -> DecoderByBlock:
    """Return a birth of a config whose blocks are drawn one at a time."""
    return DecoderByBlock(config, DrawnWeights(config, init_seed), device=device(), streaming=streaming)
