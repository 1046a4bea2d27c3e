"""The checkpoints of a suite, by name, with their contents and all that was found wrong with each."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

from ..errors import RunError, UsageError
from ..files import TEXT_BYTES, check_file, content_digest, file_sha256, read_json, read_text, user_path
from ..findings.formatting import in_few_words, steps_near
from ..measure.records import RunDir, is_step
from ..messages import one_line
from ..models.exchange.gguf_model import gguf_files, gguf_folder, gguf_tensors
from ..models.exchange.hub import downloaded
from ..models.exchange.weight_files import INDEX
from ..trainer.by_name.model_names import vocabulary
from ..trainer.by_name.name_grammar import ModelName, read_name
from ..trainer.checkpoints.stored_run import fetch_checkpoint
from ..trainer.checkpoints.stored_tensors import CheckpointFolder
from ..trainer.config import RunConfig
from ..trainer.config_file import read_config
from ..trainer.initial_model import initialize_model, resolve_init_from
from .pickled_weights import SUFFIXES, sample_pickled
from .training_order import Place, at_step, said_place
from .weight_samples import Sampled, sample
from .weights import NAMES, Entry, FileWeights, GgufWeights, HeldWeights, Part, Weights, open_safetensors, read_header

# ---------------------------------------------------------------- parts of a tokenizer

#: Files of tokenizers that are compared as they are.
_WHOLE_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class _Model(TypedDict):
    merges: NotRequired[list[Any] | None]


class _Tokenizer(TypedDict):
    """A ``tokenizers`` JSON, with the fields that are read here."""

    model: _Model
    normalizer: NotRequired[Any]
    pre_tokenizer: NotRequired[Any]
    post_processor: NotRequired[Any]
    decoder: NotRequired[Any]


def tokenizer_parts(folder: Path) -> dict[str, str]:
    """Return every part of a folder's tokenizer by name, large ones as digests; empty without a tokenizer.

    Versions of the library differ in writing out defaults, so that only parts present in both can show a difference.

    Raises:
        RunError: one of its files is damaged.
    """
    found = {}
    if (file := folder / "tokenizer.json").is_file():
        found["vocabulary"] = content_digest(vocabulary(file))
        content = read_json(file, _Tokenizer, "give the model's own tokenizer")
        if merges := content["model"].get("merges"):
            # Older versions write a merge as one text, newer ones as two.
            pairs = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]
            found["merges"] = content_digest(pairs)
        for name in _STEPS:
            if name in content:
                found |= dict(_leaves(name, content[name]))
    for name in _WHOLE_FILES:
        if (folder / name).is_file():
            check_file(folder / name, TEXT_BYTES)
            found[name] = file_sha256(folder / name)
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield dotted names and values; a group yields that it is one, so that an absent group is a different value."""
    if not isinstance(value, dict | list):
        yield name, json.dumps(value)
        return
    yield name, "a group" if isinstance(value, dict) else f"{len(value)} of them"
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{name}.{key}", inside)


# ---------------------------------------------------------------- the checkpoints of a suite by name
# A run's, those of a folder, models by name, revisions of a hub repository.

_MODEL = "state_dict/model."
#: A file of published suites that lists the names of their checkpoints, a line each.
LISTING = "revisions.txt"
#: Fields of ``config.json`` that say nothing of the model.
_NO_MODEL = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache", "architectures"}

#: Ending of files of safetensors.
SAFETENSORS = ".safetensors"
#: A part of a model, in the name of a file.
_PART = re.compile(r"\d-of-\d")
#: Files in which a trainer keeps its state beside the weights.
_NO_WEIGHTS = re.compile(
    r"(?<![a-z])(?:optim(?:izer)?|(?:lr_)?scheduler|scaler|sampler|rng_state|training_args)(?![a-z])"
)


@dataclass(frozen=True)
class Birth:
    """A birth by its config and seed."""

    config: RunConfig
    init_seed: int
    run: RunDir | None = None
    """The run that began with it, if one did."""

    @classmethod
    def of_run(cls, run: RunDir) -> Birth:
        """Return the birth of a run."""
        config = read_config(run.config)
        return cls(config, config.init_seed, run)

    def draw(self) -> HeldWeights:
        """Draw it, with the tensors of a checkpoint."""
        return HeldWeights(initialize_model(self.config, self.init_seed).state_dict())


@dataclass(frozen=True)
class Member:
    """A checkpoint of a suite, not yet read."""

    name: str
    place: Place | None
    """Place that its name says; None if it says none."""
    folder: Callable[[], AbstractContextManager[Path]]
    """Context with its folder, or with the one file that it is; a hub download is deleted at the end."""
    is_local: bool = True
    drawn_from: Birth | None = None
    """The birth that it is, which lies nowhere and is drawn again."""
    source: str = ""
    """Run, folder or repository that it belongs to; the name of a config's birth."""
    path: Path | None = None
    """Path of a checkpoint on this machine."""

    @property
    def is_deleted(self) -> bool:
        """True if it was deleted since it was found: a training that goes on does so with old checkpoints."""
        return self.path is not None and not self.path.exists()

    @property
    def step(self) -> int | None:
        """Step that its name says, within its stage."""
        return None if self.place is None else self.place.step


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint that was read."""

    sampled: Sampled
    config: dict[str, Any] | None
    """Fields of the model's config; None where there are none."""
    tokenizer: dict[str, str]
    """Parts of its tokenizer by name (`tokenizer_parts`); empty where there is none."""


def find_members(names: Sequence[str]) -> list[Member]:
    """Find the checkpoints that some names mean, in their order, those of one name by rising step.

    Args:
        names: each a model's name (`read_name`), a run (its birth and all its checkpoints), a file of weights, or a
            folder of checkpoints; several steps, seeds or revisions of one stand with commas,
            ``ORG/NAME@REVISION,REVISION``.

    Raises:
        UsageError: a name means no checkpoint.
    """
    return [member for name in names for member in _members(name)]


def _members(name: str) -> list[Member]:
    if not name.strip():
        raise UsageError("'': a name is empty; give a run, a folder of checkpoints, or a hub id")
    folder = user_path(name)
    head, _, places = name.rpartition("@")
    if "," in places and not folder.exists():
        return [member for place in places.split(",") for member in _members(f"{head}@{place}")]
    named = read_name(name)
    if named.kind == "run" and not named.average:
        return _of_run(named)
    if named.kind == "birth":
        config = resolve_init_from(read_config(named.path))
        seed = config.init_seed if named.number is None else named.number
        return [_born(name, Birth(config, seed))]
    if named.kind in ("measured", "snapshot") or named.average:
        raise UsageError(f"{name}: is {named.in_words}; give checkpoints")
    if folder.suffix == ".gguf":
        return [_local(name, folder, said_place(folder.stem))]
    if folder.is_file() and folder.suffix in (SAFETENSORS, *SUFFIXES):
        return [_local(name, folder, said_place(folder.stem))]
    if folder.is_dir():
        found = _in_folder(name, folder)
        return sorted(found, key=lambda member: (member.place is None, member.place or at_step(0), member.name))
    if named.kind != "hub" or name.startswith("@"):
        raise UsageError(f"{name}: no such run, folder of checkpoints, or hub id")
    repository, _, revision = name.rpartition("@")
    return [Member(name, said_place(revision), lambda: downloaded(name), is_local=False, source=repository or revision)]


def _in_folder(name: str, folder: Path) -> list[Member]:
    """List a checkpoint, or those of a suite: its files or folders, with the folder itself if it is one too, as that of
    a Trainer is, whose end lies above the steps.
    """

    def members(paths: Sequence[Path]) -> list[Member]:
        # A folder's name may have a point in it.
        places = [said_place(path.stem if path.is_file() else path.name) for path in paths]
        return [_local(f"{name.rstrip('/')}/{path.name}", path, at) for path, at in zip(paths, places, strict=True)]

    if files := _files_of_steps(folder):
        return members(files)
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    # A folder of a step that holds no weights is a checkpoint that is missing; DeepSpeed's states are none.
    of_steps = [path for path in folders if said_place(path.name) is not None and not _holds_states(path)]
    if not _is_checkpoint(folder):
        if not any(_is_checkpoint(path) for path in folders):
            raise UsageError(f"{name}: no checkpoint in it, nor in a folder of it; give a folder of checkpoints")
        return members([path for path in folders if path in of_steps or _is_checkpoint(path)])
    if not any(_is_checkpoint(path) for path in of_steps):
        return [_local(name, folder, said_place(folder.name))]
    return members(of_steps) + ([_local(name, folder, None)] if _weight_files(folder) else [])


def _holds_states(folder: Path) -> bool:
    """Return True for a folder in which DeepSpeed keeps the states of its processes."""
    files = [file for file in folder.iterdir() if file.suffix in SUFFIXES]
    return bool(files) and all(file.stem.endswith(("_model_states", "_optim_states")) for file in files)


def _weight_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors*"), *folder.glob("*.gguf"), *_pickled_files(folder)]


def _files_of_steps(folder: Path) -> list[Path]:
    """List the files of weights of a folder, if each is a checkpoint by itself: two or more have steps in their names,
    no two the same, and none is a part of a model.
    """
    files = [file for file in sorted(folder.glob(f"*{SAFETENSORS}")) if file.is_file()] + _pickled_files(folder)
    places = [place for file in files if (place := said_place(file.stem)) is not None]
    is_part = (folder / INDEX).exists() or any(_PART.search(file.stem) for file in files)
    return files if len(places) > 1 and len(set(places)) == len(places) and not is_part else []


def _of_run(named: ModelName) -> list[Member]:
    """List the birth and the checkpoints of a run, or the one that the name means."""
    run, steps = named.run, named.run.checkpoints_by_step()
    if named.number == 0:
        return [_born(named.text, Birth.of_run(run))]
    if named.number is None:
        there = [_local(f"{named.text}@{step}", path, at_step(step), run) for step, path in steps.items()]
        return [_born(f"{named.text}@0", Birth.of_run(run)), *there]
    if named.number not in steps:
        listed = steps_near(steps, named.number)
        raise UsageError(f"{named.text}: {run.path} has no checkpoint of step {named.number}; there are: {listed}")
    return [_local(named.text, steps[named.number], at_step(named.number), run)]


def _born(name: str, birth: Birth) -> Member:
    source = name if birth.run is None else str(birth.run.path.resolve())
    return Member(name, at_step(0), lambda: nullcontext(Path()), drawn_from=birth, source=source)


def _local(name: str, folder: Path, place: Place | None, run: RunDir | None = None) -> Member:
    def here() -> AbstractContextManager[Path]:
        fetch_checkpoint(folder)
        return nullcontext(gguf_folder(files) if (files := gguf_files(folder)) else folder)

    source = folder.resolve().parent if run is None else run.path.resolve()
    return Member(name, place, here, source=str(source), path=folder)


def listed_but_absent(names: Sequence[str]) -> list[str]:
    """List the checkpoints that the listing of a suite's folder (`LISTING`) names and that are not in the folder.

    Raises:
        RunError: the listing cannot be read.
    """
    absent = []
    for folder in (user_path(name) for name in names if name.strip()):
        if (folder / LISTING).is_file():
            lines = [line.strip() for line in read_text(folder / LISTING).splitlines()]
            inside = {path.name for path in folder.iterdir() if path.is_dir()}
            absent += [one_line(line) for line in lines if line and line not in {*inside, "main"}]
    return absent


def _is_checkpoint(folder: Path) -> bool:
    if (folder / "config.json").is_file() or (folder / "state.json").is_file():
        return True
    return any(file.suffix in (SAFETENSORS, ".gguf", *SUFFIXES) for file in folder.iterdir())


@contextmanager
def weights_of(member: Member) -> Iterator[Weights | None]:
    """Open a checkpoint's weights for partial reading; yield None for pickled ones, which another module reads."""
    if member.drawn_from is not None:
        yield member.drawn_from.draw()
        return
    with member.folder() as folder:
        yield None if _pickled(folder) else _open(folder)


def read_content(member: Member, *, scan: bool) -> Content:
    """Read a checkpoint: a thousandth of its values, or with ``scan`` all of them, its config and its tokenizer.

    Raises:
        RunError: a part of it is missing or damaged.
        UsageError: the checkpoint cannot be found.
    """
    if (birth := member.drawn_from) is not None:
        tokenizer = {} if birth.run is None else _tokenizer_of_run(birth.run)
        return Content(sample(birth.draw(), scan=scan), dataclasses.asdict(birth.config.model), tokenizer)
    with member.folder() as folder:
        pickled = _pickled(folder)
        if scan and (folder / "state.json").is_file():
            CheckpointFolder(folder).verify()
        sampled = sample_pickled(pickled, scan=scan) if pickled else sample(_open(folder), scan=scan)
        return Content(sampled, _config(folder), _tokenizer(folder))


def _pickled(folder: Path) -> list[Path]:
    """List the pickled files of weights, if there are no others."""
    if (folder / "state.json").is_file() or any(folder.glob("*.safetensors*")):
        return []
    if folder.is_file():
        return [folder] if folder.suffix in SUFFIXES else []
    return sorted(folder.glob("pytorch_model*.bin")) or _pickled_files(folder)


def _pickled_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and not _NO_WEIGHTS.search(file.name)]


def _open(folder: Path) -> Weights:
    if (sources := gguf_tensors(folder)) is not None:
        return GgufWeights(sources)
    weights = _open_run_checkpoint(folder) if (folder / "state.json").is_file() else open_safetensors(folder)
    if not weights.entries:
        raise RunError(f"{folder}: no weights in it")
    return weights


def _open_run_checkpoint(folder: Path) -> FileWeights:
    """Open the model of a checkpoint of this package, for any number of processes that wrote it."""
    weights, headers = FileWeights(), {}
    for name, stored in CheckpointFolder(folder).tensors.items():
        if not name.startswith(_MODEL):
            continue
        parameter = name.removeprefix(_MODEL)
        weights.entries[parameter] = Entry(NAMES[stored.dtype], stored.shape)
        weights.parts[parameter] = []
        for file, runs in stored.pieces:
            if file not in headers:
                headers[file] = read_header(folder / file)
            entries, begins = headers[file]
            if name not in entries or entries[name].numel != runs.n:
                raise RunError(f"{folder / file}: has no {name} of {runs.n} values")
            size = runs.run * stored.dtype.itemsize
            weights.parts[parameter] += [
                Part(folder / file, begins[name] + i * size, runs.start + i * runs.stride, runs.run)
                for i in range(runs.n // runs.run)
            ]
        stored.check_whole(0, weights.entries[parameter].numel)
    return weights


def _config(folder: Path) -> dict[str, Any] | None:
    if (folder / "config.json").is_file():
        content = read_json(folder / "config.json", dict[str, Any])
        return {name: value for name, value in content.items() if name not in _NO_MODEL}
    run = _run_of(folder)
    return None if run is None else _config_of_run(run)


def _tokenizer(folder: Path) -> dict[str, str]:
    run = _run_of(folder)
    return tokenizer_parts(folder) if run is None else _tokenizer_of_run(run)


def _tokenizer_of_run(run: RunDir) -> dict[str, str]:
    return {} if (file := run.own_tokenizer()) is None else tokenizer_parts(file.parent)


def _run_of(folder: Path) -> RunDir | None:
    """Return the run that a checkpoint's folder belongs to; None for a folder outside of a run."""
    run = RunDir(folder.resolve().parent.parent)
    return run if is_step(folder) and RunDir.is_run(run.path) else None


def _config_of_run(run: RunDir) -> dict[str, Any]:
    return dataclasses.asdict(read_config(run.config).model)


# ---------------------------------------------------------------- a checkpoint and its findings

Kind = Literal[
    "damaged", "values", "tensors", "config", "tokenizer", "duplicate", "mixed", "stranger", "order", "continued"
]


@dataclass(frozen=True)
class Finding:
    """A fault of a checkpoint."""

    kind: Kind
    what: str
    """The fault in a sentence, with its evidence."""


@dataclass
class Judged:
    """A checkpoint with its findings."""

    member: Member
    name: str
    """Name of the member, without the folder that the whole suite shares."""
    content: Content | None = None
    """None where it could not be read."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes that are worth knowing but not faults."""
    cosine_with_first: float = np.nan
    """Cosine with the first checkpoint of its birth, mean over tensors."""
    distance_from_previous: float = np.nan
    """Distance from the checkpoint before it on the curve."""
    birth_unknown: bool = False
    """True if no test can tell if it shares a birth with the largest group."""
    may_be_reversed: bool = False
    """True if it fits a curve whose earlier end is unknown."""

    @property
    def label(self) -> str:
        """Name in sentences."""
        place = self.member.place
        return self.name if place is None or place.run else place.words

    @property
    def verdict(self) -> str:
        """Verdict in a word or two: the kinds of faults, ``right``, ``birth unknown`` or ``direction unknown``."""
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in self.findings))
        unknown = "birth unknown" if self.birth_unknown else "direction unknown" if self.may_be_reversed else ""
        return kinds or unknown or "right"

    @property
    def is_open(self) -> bool:
        """True if nothing is wrong with it, but something cannot be decided."""
        return not self.findings and (self.birth_unknown or self.may_be_reversed)

    def has(self, kind: Kind) -> bool:
        """Return True if a finding of this kind exists."""
        return any(finding.kind == kind for finding in self.findings)

    def found(self, kind: Kind, what: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, what))


@dataclass
class Same:
    """Checkpoints with equal sampled weights, mostly just one."""

    members: list[Judged]
    values: dict[str, np.ndarray]
    """Sampled values of the weights."""
    place: Place | None
    """Place that the weights belong to; if several claim them, the one that fits the curve, or the least."""
    right: list[Place] = field(default_factory=list)
    """Claims that may be right, where several contradict one another."""
    mixed: set[str] = field(default_factory=set)
    """Tensors that are another checkpoint's."""
    is_mean: bool = False
    """True for a mean of other checkpoints, which no training passed through."""
    is_copy: bool = False
    """True if all of its tensors are."""

    @property
    def unshared_values(self) -> dict[str, np.ndarray]:
        """Values of the tensors that no other checkpoint has."""
        return {name: values for name, values in self.values.items() if name not in self.mixed}

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """Sampled values of gains and biases (`Sampled.vectors`)."""
        return {} if self.members[0].content is None else self.members[0].content.sampled.vectors

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the sampled bytes of each tensor (`Sampled.digests`)."""
        return {} if self.members[0].content is None else self.members[0].content.sampled.digests

    @property
    def spreads(self) -> dict[str, float]:
        """Standard deviations of their vectors (`Sampled.spreads`)."""
        content = self.members[0].content
        return {} if content is None else content.sampled.spreads

    @property
    def is_drawn(self) -> bool:
        """True if one of them is a birth drawn from its seed, which nobody can have exchanged."""
        return any(one.member.drawn_from is not None for one in self.members)

    @property
    def claims(self) -> list[Place]:
        """Places that their names say, in their order."""
        return sorted({one.member.place for one in self.members if one.member.place is not None})

    @property
    def label(self) -> str:
        """Name in sentences."""
        return next((one.label for one in self.members if one.member.place == self.place), self.members[0].label)


def listed(judged: Sequence[Judged], *, by_name: bool = False) -> str:
    """List some checkpoints in a few words: by their steps, or by their names."""
    return in_few_words([one.name if by_name else one.label for one in judged])
