"""Snapshots of one model over its training, by any trainer: measured, compared with birth, written.

This module depends on no trainer: the callbacks for Lightning (callbacks/snapshot.py) and for the Trainer of
``transformers`` (callbacks/transformers_trainer.py) are thin shells around it, and a plain loop calls it itself.
"""

from __future__ import annotations

import hashlib
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import nn

from ..data.packing import DocumentBorders
from ..data.probes import passage_probe, random_probe, text_ids
from ..data.tokenizer import TextTokenizer
from ..errors import RunError, UsageError
from ..messages import one_line
from ..metrics.rankings import ranking
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.tensor_shards import compute_dtype
from ..models.user_classes import in_words
from ..schema import mistyped, quoted
from .config import SnapshotConfig
from .find_model import measurable, unwrap
from .gradients import measure_gradients, with_gradients
from .hf import HFModel
from .hf.hf_model import HFConfig, Looked
from .measurement import BirthReference, Measurement, birth_reference, look, measure
from .observed_metrics import MetricSource
from .ranks import from_rank_zero, on_all_ranks
from .ranks import rank as rank_of_process
from .records import RunDir, Snapshot
from .summary import secondary_sinks
from .user_metrics import MetricLike, find_metrics

TokenTexts = Callable[[Sequence[int]], list[str]]
T = TypeVar("T")

#: Errors that keep something from being measured or written; any other is a bug, unless it arose in a user's model.
_FAILURES = (UsageError, RunError, OSError)


def top_tokens(
    arrays: Mapping[str, np.ndarray], birth: BirthReference | None, top_k: int, token_texts: TokenTexts | None
) -> list[dict[str, Any]]:
    """List the ``top_k`` most preferred tokens of a measurement, first to last, with their ranks at birth if known.

    Without ``token_texts`` a token reads ``[id]``.
    """
    p_V, w_V = arrays["mean_prob"], arrays["argmax_share"]
    top = ranking(p_V)[:top_k].tolist()
    texts = [f"[{token}]" for token in top] if token_texts is None else token_texts(top)
    at_birth = None if birth is None else birth.preference.places + 1
    listed = []
    for rank, (token, text) in enumerate(zip(top, texts, strict=True), start=1):
        entry = {"rank": rank, "id": token, "text": text, "p": float(p_V[token]), "argmax_share": float(w_V[token])}
        listed.append(entry if at_birth is None else entry | {"rank_at_birth": int(at_birth[token])})
    return listed


def probe_digest(probe_NT: np.ndarray) -> str:
    """Compute the first 16 digits of the SHA-256 over a probe's token ids, little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(probe_NT, "<i8").tobytes()).hexdigest()[:16]


def snapshot_of(
    model: Decoder | HFModel,
    found: Measurement,
    probe_NT: np.ndarray,
    probe_seed: int,
    *,
    about: Mapping[str, Any],
    seconds: float,
    birth: BirthReference | None,
    top_k: int,
    token_texts: TokenTexts | None,
    n_tokens: int | None = None,
) -> Snapshot:
    """Build a snapshot from the measurement on the random probe (docs/run-directory.md).

    Args:
        model: the measured model.
        found: measurement of the model.
        probe_NT: the probe ``[N, T]``.
        probe_seed: seed of the probe.
        about: facts about the model; begins with ``step``.
        seconds: duration of the measurement.
        birth: reference that it was compared with; None if unknown.
        top_k: tokens in the ranked list.
        token_texts: function from token ids to texts; None without a tokenizer.
        n_tokens: tokens that the probe is drawn from, if fewer than the vocabulary.
    """
    config = model.config
    summary = {
        **about,
        "probe": {
            "kind": "random",
            "n_sequences": probe_NT.shape[0],
            "seq_len": probe_NT.shape[1],
            "probe_seed": probe_seed,
            "digest": probe_digest(probe_NT),
            "dtype": str(compute_dtype(model)).removeprefix("torch."),
            **({} if n_tokens is None else {"n_tokens": n_tokens}),
        },
        "model": asdict(config),
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "vocab_size": config.vocab_size,
        "seconds": round(seconds, 4),
        "bias": found.scalars,
        "top_tokens": top_tokens(found.arrays, birth, top_k, token_texts),
        "secondary_sinks": secondary_sinks("random", found.arrays, found.scalars.get("sink_epsilon", 1.0), token_texts),
    }
    if found.unseen:
        summary["unseen"] = list(found.unseen)
    if found.declared:
        # Readers of the snapshot need not have the user's module.
        summary["quantities"] = [quantity.to_json() for quantity in found.declared]
    return Snapshot(summary, dict(found.arrays))


def add_probe(
    snapshot: Snapshot,
    name: str,
    found: Measurement,
    token_texts: TokenTexts | None,
    probe_NT: np.ndarray | None = None,
) -> Snapshot:
    """Return a snapshot with the results on another probe. ``probe_NT``: that probe, if its shape ``[N, T]`` may differ
    from the random one's.
    """
    if probe_NT is not None:
        shape = {"n_sequences": probe_NT.shape[0], "seq_len": probe_NT.shape[1]}
        snapshot.summary[f"probe_{name}"] = {"kind": name, **shape}
    listed = secondary_sinks(name, found.arrays, found.scalars.get("sink_epsilon", 1.0), token_texts)
    snapshot.summary["secondary_sinks"] = snapshot.summary["secondary_sinks"] + listed
    snapshot.summary[f"bias_{name}"] = found.scalars
    return _with_arrays(snapshot, {f"{name}.{key}": value for key, value in found.arrays.items()})


def _with_arrays(snapshot: Snapshot, more: Mapping[str, np.ndarray]) -> Snapshot:
    return replace(snapshot, arrays={**snapshot.arrays, **more})


def _token_ids(name: str, given: Any) -> np.ndarray:
    """Convert a probe to int64 ``[N, T]``; UsageError if it is not a probe."""
    probe = np.asarray(given)
    if probe.dtype.kind not in "iu":
        raise UsageError(f"probes {name!r} has {probe.dtype} numbers: give token ids, of an integer dtype")
    if probe.ndim != 2:
        raise UsageError(f"probes {name!r} has shape {list(probe.shape)}: give [N, T], sequences by positions")
    for axis, what in enumerate(("sequences", "positions")):
        if probe.shape[axis] < 2:
            raise UsageError(f"probes {name!r} has {probe.shape[axis]} {what}: give at least 2")
    return probe.astype(np.int64)


def _misfit(name: str, probe_NT: np.ndarray, vocab_size: int) -> str | None:
    """Say why a model cannot read a probe, with the remedy; None if it can."""
    least, most = int(probe_NT.min()), int(probe_NT.max())
    if least >= 0 and most < vocab_size:
        return None
    wrong = least if least < 0 else most
    return f"probes {name!r} has token {wrong}: this model has 0 to {vocab_size - 1}; give its own tokens"


def _arose_in(model: Any, error: BaseException) -> bool:
    """Return True if an error arose in a call of a module of the user's model, and not in a hook of this package."""
    is_users = isinstance(model, nn.Module) and not isinstance(model, Decoder)
    modules = {id(module) for module in model.modules()} if is_users else set()
    inside = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
            inside = False
        elif id(frame.f_locals.get("self")) in modules:
            inside = True
    return inside


def _agreed(make: Callable[[], T], blamed: Any) -> T:
    """Return the result of ``make``, which fails on every rank or on none. An error that arose in ``blamed``, a user's
    model, unless it is None, and memory that does not suffice then are a RunError.
    """

    def named() -> T:
        try:
            return make()
        except _FAILURES:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or _arose_in(blamed, error):
                raise RunError(in_words(error)) from error
            raise

    return on_all_ranks(make if blamed is None else named)


def _part(make: Callable[[], T], instead: T, absent: list[str] | None, blamed: Any) -> T:
    """Return the result of ``make``; if it fails on any rank, add the reason to ``absent``, if given, and return
    ``instead``. ``blamed``: see :func:`_agreed`.
    """
    try:
        return _agreed(make, blamed)
    except _FAILURES as error:
        if absent is None:
            raise
        absent.append(str(error))
        return instead


class RecorderArguments(TypedDict, total=False):
    """Arguments of a :class:`SnapshotRecorder` beside its folder."""

    config: SnapshotConfig | None
    probes: Mapping[str, np.ndarray] | None
    text: str | Sequence[str] | None
    tokenizer: Any
    newborn: Callable[[int], Any] | None
    init_seed: int | None
    birth: BirthReference | None
    token_texts: TokenTexts | None
    tokens_per_step: int | Callable[[int], int] | None
    metrics: Sequence[MetricLike]


@dataclass(frozen=True)
class _Seen:
    """A model that the recorder has looked at. It is not kept alive, nor pickled."""

    model: weakref.ref[Any]
    config: ModelConfig | HFConfig
    looked: Looked | None

    def is_of(self, model: Any, seen: Decoder | HFModel) -> bool:
        """Return True if this is the same model, of the same shape: tables of embeddings can be resized."""
        return self.model() is model and self.config == seen.config


def _whole(step: Any) -> int:
    """Return a number of steps as Python's; a file's name and its summary have it.

    Raises:
        UsageError: no whole number of at least 0.
    """
    number = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
        raise UsageError(f"step is {one_line(quoted(step))}: give a whole number of at least 0")
    return int(number)


class SnapshotRecorder:
    """Recorder that takes snapshots of one model during its training and writes them into one folder.

    Only the weights of the training state are read, and nothing is changed: no random numbers are drawn, and gradients,
    modes and compiled graphs stay untouched (the uncompiled module runs). In a process group every rank takes part; the
    model must be whole on each of them.

    Later snapshots are compared with the first of these that exists: ``birth``; the snapshot of step 0 in the folder;
    the model that ``newborn`` re-creates; the model itself at step 0. If recording begins later and none exists,
    snapshots lack comparisons with birth.

    Args:
        dirpath: folder for ``snapshots/step-…``, in the layout of a run (docs/run-directory.md). Without ``newborn``,
            those of an earlier training are renamed at step 0.
        config: settings of the measurement.
        probes: token ids ``[N, T]`` by the name of the probe; ``random`` is drawn unless it is among them.
        text: files or folders of text (as in ``data.path``), to measure on their passages too; sinks are often
            larger there than on random tokens. ``tokenizer`` reads them.
        tokenizer: the model's tokenizer: one of ``transformers``, or the path of a ``tokenizers`` JSON. Tokens that it
            puts before a text, such as BOS, precede every passage. ``token_texts`` may then be left out. Without
            ``newborn``, the random probe keeps to the ids that it has.
        newborn: function that re-creates a birth of the same architecture from a seed, for strangers as controls.
        init_seed: the model's seed for ``newborn``; strangers take the next ones.
        birth: reference to compare with in place of step 0.
        token_texts: function from token ids to texts, for the ranked list (such as ``convert_ids_to_tokens`` of a
            tokenizer of ``transformers``).
        tokens_per_step: tokens in a global batch, or a function from a number of steps to tokens, to report the tokens
            seen.
        metrics: your metrics beside those that ``config`` names: classes, instances or ``module:Class``.
        borders: rule by which ids mark the beginnings of documents in your ``probes``; by default a sequence is one
            document.
        init_from: the model that training started from, if step 0 is not a birth; each snapshot names it.

    Raises:
        UsageError: an impossible config, a folder that holds a run of ``birthmark pretrain``, an invalid probe (needs
            int ``[N, T]``, both at least 2), or an invalid metric.
    """

    def __init__(
        self,
        dirpath: str | Path,
        config: SnapshotConfig | None = None,
        *,
        probes: Mapping[str, np.ndarray] | None = None,
        text: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        newborn: Callable[[int], Any] | None = None,
        init_seed: int | None = None,
        birth: BirthReference | None = None,
        token_texts: TokenTexts | None = None,
        tokens_per_step: int | Callable[[int], int] | None = None,
        metrics: Sequence[MetricLike] = (),
        borders: DocumentBorders | None = None,
        init_from: str | None = None,
    ) -> None:
        kinds: tuple[tuple[str, object, Any, str], ...] = (
            ("config", config, SnapshotConfig, "a SnapshotConfig"),
            ("probes", probes, Mapping, "token ids by the name of the probe, {'NAME': [[1, 2, 3], …]}"),
            ("metrics", metrics, Sequence, "a list of metrics"),
            ("birth", birth, BirthReference, "a BirthReference, as birth_reference makes of a model"),
            ("init_seed", init_seed, Integral, "a whole number"),
            ("newborn", newborn, Callable, "a function from a seed to a model"),
            ("tokens_per_step", tokens_per_step, (Integral, Callable), "a whole number, or a function of the step"),
        )
        for name, given, kind, wanted in kinds:
            if given is not None and (not isinstance(given, kind) or isinstance(given, (bool, str))):
                raise UsageError(f"{name} is {one_line(quoted(given))}: give {wanted}")
        self.borders, self.init_from = borders, init_from
        self.run, self.config = RunDir(Path(dirpath)), config or SnapshotConfig()
        given_probes = dict(probes or {})
        self.text, self.tokenizer = text, tokenizer
        self.newborn, self.init_seed, self.given = newborn, init_seed, birth
        self.token_texts, self.tokens_per_step = token_texts, tokens_per_step
        problems = mistyped(self.config) or self.config.problems()
        problems += [
            f"snapshot.probes has {name!r}: give its token ids, probes={{{name!r}: …}}"
            for name in self.config.probes or ()
            if name != "random" and name not in given_probes and not (name == "text" and text is not None)
        ]
        if text is not None and "text" in given_probes:
            problems.append("text and probes={'text': …} say both what to measure on: give one of them")
        if (newborn is None) != (init_seed is None):
            problems.append("newborn and init_seed go together: give both, or none")
        if newborn is None and self.run.birth.is_file():
            problems.append(f"{dirpath}: holds a run of its own; give another folder")
        if problems:
            raise UsageError("; ".join(problems))
        self.users_probes = {name: _token_ids(name, given) for name, given in given_probes.items()}
        self._probes = dict(self.users_probes)
        self.metrics = find_metrics([*self.config.metrics, *metrics])
        self.birth: BirthReference | None = None
        self.strangers: list[BirthReference] = []
        self.last: Snapshot | None = None
        self.dropped: dict[str, str] = {}
        """Reason, for each probe that :meth:`take_if_possible` leaves out."""
        self._named: set[str] = set()
        self._looked = False
        self._seq_len = self.config.seq_len
        self._n_tokens: int | None = None
        self._tokenizer_texts: TokenTexts | None = None
        self._birth_probe: str | None = None
        """Digest of the random probe that the birth was measured on."""
        self._seen: _Seen | None = None

    @property
    def probes(self) -> Mapping[str, np.ndarray]:
        """Probes as the model reads them, with the drawn one."""
        return MappingProxyType(self._probes)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model, which is looked at anew."""
        return vars(self) | {"_seen": None}

    def take(self, model: Any, step: int) -> Snapshot:
        """Measure ``model`` after ``step`` optimizer steps and write the snapshot.

        Args:
            model: our decoder or a causal language model of ``transformers``, also under ``torch.compile`` or
                ``DistributedDataParallel``.
            step: 0 is birth, or whatever the training starts from.

        Raises:
            UsageError: a model that cannot be measured or cannot read a probe, or a folder with the birth of another
                one.
            RunError: the model gives NaN or inf, or the snapshot cannot be written.
        """
        return self._take(model, _whole(step), None)

    def take_if_possible(self, model: Any, step: int, *, writes: bool = True) -> Snapshot | None:
        """Take a snapshot like :meth:`take`, in a training that a failure must not end: as ``config.on_error`` says.

        Parts that cannot be measured are absent and named by one warning. The snapshot lists the reasons as
        ``not_measured`` in its summary; without a snapshot, the folder's ``not_measured.json`` has the reason. In a
        process group all ranks skip together. Without ``writes`` neither the snapshot nor a reason is written. Errors
        that arise in a user's model, and memory that does not suffice, are such failures; any other error is raised.

        Returns:
            The snapshot; None without one.

        Raises:
            UsageError, RunError, OSError: see :meth:`take`; if ``config.on_error`` is ``raise``.
        """
        step = _whole(step)
        if self.config.on_error == "raise":
            return self._take(model, step, None, writes)
        try:
            return self._take(model, step, [], writes)
        except _FAILURES as error:
            self._name(step, [str(error)])
            if rank_of_process() == 0 and writes:
                # A disk that takes no snapshot may take no note either; the warning has said it.
                with suppress(OSError, RunError):
                    self.run.note_not_measured(step, str(error))
            return None

    def _take(self, model: Any, step: int, absent: list[str] | None, writes: bool = True) -> Snapshot:
        """Take a snapshot. A part that cannot be measured is an error, unless ``absent`` is given: then its reason is
        added there.
        """
        # An error in a user's model is raised as it is, where errors are.
        blamed = None if absent is None else unwrap(model)
        seen = _agreed(lambda: self._observable(model, step, drops=absent is not None), blamed)
        if absent is not None:
            absent += self.dropped.values()
        if step == 0 or not self._looked:
            _agreed(lambda: self._find_references(seen, step), blamed)
        start = time.perf_counter()
        by_probe: dict[str, Measurement] = {}
        for name in self._probes:
            drops = None if name == "random" else absent
            found = _part(partial(self._measure, seen, name, step, absent), None, drops, blamed)
            if found is not None:
                by_probe[name] = found
        snapshot = self._snapshot(seen, by_probe, step, time.perf_counter() - start)
        if absent:
            reasons = snapshot.summary["not_measured"] = list(dict.fromkeys(absent))
            self._name(step, reasons)
        if writes:
            from_rank_zero(lambda: self.run.write_snapshot(snapshot))
            self.last = snapshot
        return snapshot

    def _name(self, step: int, reasons: Sequence[str]) -> None:
        """Warn of each reason once, regardless of its numbers."""
        for reason in reasons:
            kind = re.sub(r"\d[\d.e+-]*", "#", reason)
            if kind not in self._named and rank_of_process() == 0:
                self._named.add(kind)
                warnings.warn(f"not measured at step {step}: {reason}", stacklevel=4)

    def _observable(self, model: Any, step: int, *, drops: bool) -> Decoder | HFModel:
        """Return the model in the form that is measured; at the start of a training, and at first sight, check it and
        prepare its probe.

        ``drops``: True to drop an impossible probe, with its reason; else it is an error.
        """
        model = unwrap(model)
        seen, config = measurable(model), self.config
        if step == 0 or self._seen is None or not self._seen.is_of(model, seen):
            if problems := config.problems():
                raise UsageError("; ".join(problems))
            self._seen, self._looked, self._seq_len = None, False, config.seq_len
            if step == 0:
                self._birth_probe = None  # the birth of an earlier training is none of this one's
            self._probes, self.dropped, self._tokenizer_texts = dict(self.users_probes), {}, None
            vocab_size = seen.config.vocab_size
            self._shorten(seen.config.position_limit)
            misfits = {
                name: why
                for name, given in self._probes.items()
                if (why := _misfit(name, given, vocab_size)) is not None
            }
            if misfits and not (drops and "random" not in misfits):
                raise UsageError("; ".join(misfits.values()))
            self.dropped = misfits
            self._probes = {name: given for name, given in self._probes.items() if name not in misfits}
            if "random" not in self._probes:
                ids = self._drawn_ids(vocab_size, step)
                self._n_tokens = None if ids is None else len(ids)
                drawn = random_probe(vocab_size, config.n_sequences, self._seq_len, config.probe_seed, ids)
                self._probes = {"random": drawn, **self._probes}
            try:
                if self.tokenizer is not None:
                    self._read_text(vocab_size)
                elif self.text is not None:
                    raise UsageError("text is given without a tokenizer to read it: give tokenizer=, the model's own")
            except _FAILURES as error:
                if not drops:
                    raise
                self.dropped["text"] = str(error)
            looked = look(seen, self._probes["random"].shape[1]) if isinstance(seen, HFModel) else None
            self._seen = _Seen(weakref.ref(model), seen.config, looked)
        elif isinstance(seen, HFModel) and self._seen.looked is not None:
            seen.remember(self._seen.looked)
        return seen

    def _drawn_ids(self, vocab_size: int, step: int) -> np.ndarray | None:
        """Return the ids from which the random probe is drawn: those of the tokenizer, or None, all of them: for births
        that a seed draws anew, and for a training whose step 0 was measured so.
        """
        if self.tokenizer is None or self.newborn is not None:
            return None
        try:
            ids = text_ids(TextTokenizer.of(self.tokenizer), vocab_size)
        except _FAILURES:
            # Reading the text names the fault of the tokenizer.
            return None
        if step > 0 and self.run.snapshot(0) in self.run.snapshot_folders():
            stored = Snapshot.read(self.run.snapshot(0)).summary.get("probe", {})
            return ids if "n_tokens" in stored else None
        return ids

    def _shorten(self, longest: int | None) -> None:
        """Shorten probes to the positions of the model, with a message for each longer one."""
        if longest is None:
            return
        lengths = {f"probes {name!r}": given.shape[1] for name, given in self._probes.items()}
        if "random" not in self._probes:
            lengths["the random probe"] = self._seq_len
        for what, length in lengths.items():
            if length > longest and rank_of_process() == 0:
                warnings.warn(
                    f"{what} has {length} positions, and this model {longest}: it is shortened to {longest}",
                    stacklevel=7,
                )
        self._seq_len = min(self._seq_len, longest)
        self._probes = {name: given[:, :longest] for name, given in self._probes.items()}

    def _read_text(self, vocab_size: int) -> None:
        """Use the tokenizer: prepare passages of the text, and texts of tokens."""
        tokenizer = TextTokenizer.of(self.tokenizer)
        self._tokenizer_texts = tokenizer.token_texts
        if self.text is not None and "text" not in self._probes:
            n_sequences, seq_len = self._probes["random"].shape
            self._probes["text"] = passage_probe(self.text, tokenizer, n_sequences, seq_len, vocab_size)

    # ---------------------------------------------------------------- what is compared with

    def _find_references(self, model: Decoder | HFModel, step: int) -> None:
        # A training may hand over another object at each step, such as a merged copy.
        held = self.birth if step > 0 and self._is_birth_of(model) else None
        self.birth, self.strangers = self.given, []
        if self.given is None and (stored := from_rank_zero(lambda: self._stored_references(model, step))) is not None:
            self.birth, *self.strangers = stored
        elif self.newborn is not None and self.init_seed is not None:
            if self.birth is None:
                self.birth = self._reference(model if step == 0 else self._newborn(model, self.init_seed))
            seeds = range(self.init_seed + 1, self.init_seed + 1 + self.config.n_strangers)
            self.strangers = [self._reference(self._newborn(model, seed)) for seed in seeds]
        elif step == 0:
            from_rank_zero(self._put_aside)
            self.birth = self.birth or self._reference(model)
        else:
            self.birth = self.birth or held
        self._birth_probe, self._looked = probe_digest(self._probes["random"]), True

    def _is_birth_of(self, model: Decoder | HFModel) -> bool:
        """Return True if the birth that is held has a model's shapes and was measured on the present probe."""
        if self.birth is None or self._birth_probe != probe_digest(self._probes["random"]):
            return False
        sizes = (model.config.n_layers + 1, model.config.d_model), (model.config.vocab_size,)
        return (self.birth.direction.shape, self.birth.mean_prob.shape) == sizes

    def _newborn(self, model: Decoder | HFModel, init_seed: int) -> Decoder | HFModel:
        assert self.newborn is not None
        return measurable(self.newborn(init_seed)).to(model.device)

    def _reference(self, model: Decoder | HFModel) -> BirthReference:
        return birth_reference(model, self._probes["random"], self.config.batch_size, self.config.attention_weights)

    def _stored_references(self, model: Decoder | HFModel, step: int) -> list[BirthReference] | None:
        """Read birth and strangers from the snapshot of step 0; None without one."""
        folder = self.run.snapshot(0)
        if step == 0 or folder not in self.run.snapshot_folders():
            return None
        stored, config = Snapshot.read(folder), model.config
        arrays = stored.arrays
        shapes = [arrays[name].shape if name in arrays else None for name in ("mean_direction", "mean_prob")]
        measured, asked = stored.summary.get("probe", {}), self._probes["random"]
        facts = {"n_sequences": asked.shape[0], "seq_len": asked.shape[1], "probe_seed": self.config.probe_seed}
        # Snapshots of earlier versions have no digest.
        facts |= {"digest": probe_digest(asked)} if "digest" in measured else {}
        is_same = all(measured.get(name) == fact for name, fact in facts.items())
        if shapes != [(config.n_layers + 1, config.d_model), (config.vocab_size,)] or not is_same:
            raise UsageError(f"{folder}: is of another model or another probe; give another folder, or that probe")
        strange = zip(arrays.get("stranger_direction", ()), arrays.get("stranger_mean_prob", ()), strict=True)
        return [BirthReference(d, p) for d, p in [(arrays["mean_direction"], arrays["mean_prob"]), *strange]]

    def _put_aside(self) -> None:
        """Rename the snapshots of an earlier training: two trainings in one folder would read as one."""
        if not self.run.snapshot_folders():
            return
        here, number = self.run.path / "snapshots", 1
        while (there := self.run.path / f"snapshots.{number}").exists():
            number += 1
        here.rename(there)
        warnings.warn(f"{here}: snapshots of an earlier training; they are in {there} now", stacklevel=2)

    # ---------------------------------------------------------------- one snapshot

    def _measure(self, model: Decoder | HFModel, probe: str, step: int, absent: list[str] | None = None) -> Measurement:
        tokens_NT = self._probes[probe]
        # The sequences of a random probe are one document each, whatever tokens they hold.
        borders = None if probe == "random" else self.borders
        documents_NT = None if borders is None else borders.documents(torch.from_numpy(tokens_NT)).numpy()

        blamed = None if absent is None else model

        def measured(metrics: Sequence[MetricSource]) -> Measurement:
            return measure(
                model,
                tokens_NT,
                self.birth,
                self.strangers,
                batch_size=self.config.batch_size,
                sink_epsilon=self.config.sink_epsilon,
                metrics=metrics,
                documents_NT=documents_NT,
                attention_weights=self.config.attention_weights,
            )

        def with_gradient() -> Measurement:
            # The same holds for a backward pass, which keeps the results of the forward pass.
            batch_size = self.config.on_any_device
            return with_gradients(
                found, measure_gradients(model, tokens_NT, batch_size=batch_size, documents_NT=documents_NT)
            )

        try:
            # A metric of the user's that fails, and gradients, are missed alone.
            whole = _part(partial(measured, self.metrics), None, absent if self.metrics else None, blamed)
            found = measured([]) if whole is None else whole
            if self.config.gradients and probe == ("text" if "text" in self._probes else "random"):
                found = _part(with_gradient, found, absent, blamed)
            return found
        except RunError as error:
            if absent is not None:
                raise RunError(f"{probe} probe: {error}") from None
            is_newborn = step == 0 and isinstance(model, Decoder)
            begins = "; no step was taken yet: look at model.init or init_from" if is_newborn else ""
            raise RunError(f"step {step}, {probe} probe: {error}{begins}; no snapshot is written") from None

    def _snapshot(
        self, model: Decoder | HFModel, by_probe: dict[str, Measurement], step: int, seconds: float
    ) -> Snapshot:
        per_step = self.tokens_per_step
        tokens = per_step(step) if callable(per_step) else None if per_step is None else step * per_step
        about = {"step": step, "tokens": tokens, "init_seed": self.init_seed, "init_from": self.init_from or None}
        texts = self.token_texts or self._tokenizer_texts
        snapshot = snapshot_of(
            model,
            by_probe["random"],
            self._probes["random"],
            self.config.probe_seed,
            about={name: value for name, value in about.items() if value is not None},
            seconds=seconds,
            birth=self.birth,
            top_k=self.config.top_k,
            token_texts=texts,
            n_tokens=self._n_tokens,
        )
        if step == 0 and self.newborn is not None:
            directions = np.array([s.direction for s in self.strangers])
            probs = np.array([s.mean_prob for s in self.strangers])
            snapshot = _with_arrays(snapshot, {"stranger_direction": directions, "stranger_mean_prob": probs})
        for name, found in by_probe.items():
            if name != "random":
                snapshot = add_probe(snapshot, name, found, texts, self._probes[name])
        return snapshot


def checked_every(caller: str, every: Any) -> int:
    """Return a callback's number of steps between snapshots.

    Raises:
        UsageError: no whole number, or below 1.
    """
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        raise UsageError(f"{caller}: every is {every!r}; give a whole number of steps, at least 1")
    return int(every)


def as_recorder(
    caller: str,
    given: SnapshotRecorder | str | Path | None,
    dirpath: str | Path | None,
    arguments: RecorderArguments,
) -> SnapshotRecorder:
    """Return the recorder that a callback was given, or make one from a folder and the recorder's arguments.

    Args:
        caller: name of the callback, for messages.
        given: a recorder, or the folder.
        dirpath: the folder, by its name.
        arguments: further arguments of the recorder that is made.

    Raises:
        UsageError: an unknown argument, no folder or two, or arguments beside a recorder.
    """
    if unknown := [name for name in arguments if name not in RecorderArguments.__annotations__]:
        mend = "dirpath=run.path" if unknown[0] == "run" else f"one of {', '.join(RecorderArguments.__annotations__)}"
        raise UsageError(f"{caller}: there is no argument {unknown[0]}; give {mend}")
    if given is None or isinstance(given, str | Path):
        if (folder := dirpath if given is None else given) is None:
            raise UsageError(f"{caller}: give dirpath, the folder that snapshots are written into")
        if None not in (given, dirpath):
            raise UsageError(f"{caller}: the folder is {given} and, by dirpath, {dirpath}; give one of them")
        return SnapshotRecorder(folder, **arguments)
    if not isinstance(given, SnapshotRecorder):
        raise UsageError(
            f"{caller}: {type(given).__name__} is no SnapshotRecorder; a config goes by name: "
            f"{caller}(config=…, dirpath=…, every=…)"
        )
    if misplaced := [*([] if dirpath is None else ["dirpath"]), *arguments]:
        raise UsageError(f"{caller}: give {', '.join(misplaced)} to the SnapshotRecorder")
    return given
