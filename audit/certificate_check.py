"""The check of a checkpoint against a certificate, and its outcome in lines and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..files import content_digest, strict, user_path
from ..metrics.weight_kinship import Kinship, kinship
from ..models.birth import certificate_of
from ..models.by_block import BlockWeights
from ..models.config import ModelConfig
from ..models.parameter_shapes import parameter_shapes, tensor_shapes
from ..trainer.by_name.model_names import open_source
from ..trainer.checkpoints.folder_io import CheckpointWeights
from .certificate import Content, Reading, Shapes, Statement, commitment, content_of, model_of, read_statement


@dataclass(frozen=True)
class Reveal:
    """Values that a run's owner reveals."""

    init_seed: int
    salt: bytes
    data_order: Mapping[str, Any] | None = None
    """Inputs of the data order, if they are revealed too."""


@dataclass(frozen=True)
class Opened:
    """Outcome of a reveal."""

    init_seed: bool
    """True if seed and salt open the commitment; if not, the other fields are unknown."""
    birth: bool = False
    """True if the birth redrawn from config and seed is the committed one."""
    data_order: bool | None = None
    """True if the inputs of the data order are the committed ones; None if they were not revealed."""
    kin: Kinship | None = None
    """Kinship of that birth and the checkpoint, by their weights."""
    is_birth: bool = False
    """True if the checkpoint is that birth itself."""

    @property
    def holds(self) -> bool:
        """True if all revealed values open, and the checkpoint is kin of the birth."""
        return self.init_seed and self.birth and self.data_order is not False and self.is_kin

    @property
    def is_kin(self) -> bool:
        """True if the checkpoint descends from the birth, as far as its weights show."""
        return self.kin is not None and self.kin.verdict is True


@dataclass(frozen=True)
class Verified:
    """Outcome of a check."""

    statement: Statement
    digest: str
    """Digest of the statement: compare it with the published one."""
    checkpoint: str
    """Name of the checkpoint, as the user gave it."""
    content: Content | None
    """Content of the checkpoint; None if its shapes differ, since it is then not read."""
    other_shape: str
    """First difference of the shapes in words; "" without one."""
    listed: list[tuple[int, str]]
    """Steps under which the certificate lists its content, and the type that the values are rounded to."""
    opened: Opened | None
    """Check of the revealed secret; None if nothing was revealed, or if there is nothing to compare."""

    @property
    def is_listed(self) -> bool:
        """True if the certificate lists the checkpoint, or commits to it as the birth."""
        return bool(self.listed) or (self.opened is not None and self.opened.is_birth)

    @property
    def holds(self) -> bool:
        """True if every statement that was checked holds."""
        return self.is_listed and (self.opened is None or self.opened.holds)


def verify(certificate: Path, checkpoint: str, reveal: Reveal | None) -> Verified:
    """Check a checkpoint; a tensor at a time is in memory.

    Args:
        certificate: file of the certificate.
        checkpoint: a model by any of its names; a checkpoint's folder may be separate from its run.
        reveal: the seed and the salt, if its owner has shown them.

    Raises:
        UsageError: there is no such model.
        RunError: the certificate was changed, or a file of the checkpoint is damaged.
    """
    statement = read_statement(certificate)
    config = model_of(statement, certificate)
    weights, shapes = _open(checkpoint, config)
    digest, other = content_digest(statement), _first_difference(config, shapes)
    if other:
        return Verified(statement, digest, checkpoint, None, other, [], None)
    content = content_of(tensor_shapes(config), weights)
    listed = [
        (one["step"], name)
        for one in statement["checkpoints"]
        for name in ("float32", "bfloat16", "float16")
        if one[name] == content.float32
    ]
    opened = None if reveal is None else _open_commitments(statement, config, content, reveal)
    # A checkpoint that was stored rounded has one digest under several names.
    first = {step: (step, name) for step, name in reversed(listed)}
    return Verified(statement, digest, checkpoint, content, "", list(first.values())[::-1], opened)


def _open(name: str, config: ModelConfig) -> tuple[BlockWeights, Shapes]:
    """Open the weights of a checkpoint, with the shapes of its parameters."""
    folder = user_path(name)
    if (folder / "state.json").is_file():
        weights = CheckpointWeights(folder)
        buffers = tensor_shapes(config).keys() - dict(parameter_shapes(config)).keys()
        return weights, {name: one.shape for name, one in weights.stored.items() if name not in buffers}
    source = open_source(name)
    if source.config.attention.user_parts:
        raise UsageError(f"{name}: has parts of its owner's own, which no certificate has; give the model certified")
    return source.weights(), dict(parameter_shapes(source.config))


def _first_difference(config: ModelConfig, shapes: Shapes) -> str:
    """Return the first difference between a model's parameters and ``config``; "" without one."""
    left = set(shapes)
    for name, shape in parameter_shapes(config):
        if (there := shapes.get(name)) != shape:
            found = "missing" if there is None else str(list(there))
            return f"{name} is {found}, and {list(shape)} in the certificate's model"
        left.discard(name)
    return f"{min(left)} is in none of the certificate's model" if left else ""


def _open_commitments(statement: Statement, config: ModelConfig, content: Content, reveal: Reveal) -> Opened:
    known = statement["commitments"]
    if commitment("init_seed", reveal.init_seed, reveal.salt) != known["init_seed"]:
        return Opened(init_seed=False)
    reading = Reading()
    drawn = certificate_of(config, reveal.init_seed, lambda name, values: reading.add(name, torch.from_numpy(values)))
    order = None
    if reveal.data_order is not None:
        order = commitment("data_order", reveal.data_order, reveal.salt) == known["data_order"]
    found = reading.content()
    return Opened(
        init_seed=True,
        birth=commitment("birth", drawn["digest"], reveal.salt) == known["birth"],
        data_order=order,
        kin=kinship(found.values, content.values),
        is_birth=content.float32 in (found.float32, found.bfloat16, found.float16),
    )


# ---------------------------------------------------------------- outcome in lines and as JSON
# What came of a check against a certificate, in lines and as JSON.


def as_json(found: Verified) -> dict[str, Any]:
    """Return the whole audit as JSON; values that are not numbers are null."""
    opened = found.opened
    reveal = None if opened is None else {
        "init_seed": opened.init_seed,
        "birth": opened.birth,
        "data_order": opened.data_order,
        "kin": opened.is_kin,
        "cosine": None if opened.kin is None else opened.kin.cosine,
        "p": None if opened.kin is None else opened.kin.p,
    }  # fmt: skip
    answer: dict[str, Any] = strict(
        {
            "sentence": sentence(found),
            "verified": found.holds,
            "checkpoint": found.checkpoint,
            "verdict": verdict(found),
            "statement": found.digest,
            "digest": None if found.content is None else found.content.float32,
            "listed": [{"step": step, "as": name} for step, name in found.listed],
            "reveal": reveal,
        }
    )
    return answer


def verdict(found: Verified) -> str:
    """Return the verdict in a word: ``listed``, ``kin`` of the revealed birth, ``other model`` by its shape,
    ``stranger`` to the birth, or ``unlisted`` otherwise.
    """
    if found.is_listed:
        return "listed"
    if found.other_shape:
        return "other model"
    if found.opened is None or not (found.opened.init_seed and found.opened.birth):
        return "unlisted"
    return "kin" if found.opened.is_kin else "stranger"


def sentence(found: Verified) -> str:
    """Write the answer in a sentence."""
    return f"{found.checkpoint}: {'verified' if found.holds else 'not verified'}: {_content(found)}"


def _content(found: Verified) -> str:
    if found.other_shape:
        return f"another model than the certificate's ({found.other_shape})"
    if found.opened is not None and found.opened.is_birth:
        return "the birth that the certificate commits to"
    if found.listed:
        steps = ", ".join(
            f"step {step}" + ("" if name == "float32" else f" rounded to {name}") for step, name in found.listed
        )
        return f"the certificate lists it, as {steps}"
    kin = verdict(found) == "kin"
    return "the certificate does not list it" + (", but it is kin of the birth" if kin else "")


def lines(found: Verified) -> list[str]:
    """Write the sentence, and below it the evidence."""
    rest = [f"statement   {found.digest} (compare it with the one that was published)"]
    if found.content is not None:
        rest.append(f"checkpoint  {found.content.float32}")
    return [sentence(found), *rest, *([] if found.opened is None else _of_reveal(found.opened))]


def _of_reveal(opened: Opened) -> list[str]:
    if not opened.init_seed:
        return ["init_seed   does not open the commitment: another seed, or another salt"]
    order = {None: "not shown", True: "opens its commitment", False: "is not what was committed to"}[opened.data_order]
    kin = opened.kin
    assert kin is not None
    found = [
        "init_seed   opens its commitment",
        "birth       drawn again, " + ("is the one committed to" if opened.birth else "is not the one committed to"),
        f"data order  {order}",
    ]
    if kin.verdict is None:
        return [*found, "descent     unknown: too few tensors to test their weights"]
    verdict = "kin of the birth" if kin.verdict else "no sign of the birth"
    more = "" if kin.verdict else "; `birthmark fingerprint` compares hidden states, which training turns less"
    return [*found, f"descent     {verdict}: the mean cosine of weights is {kin.cosine:.3f}, p {kin.p:.2g}{more}"]
