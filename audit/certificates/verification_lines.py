"""What came of a check against a certificate, in lines and as JSON."""

from __future__ import annotations

from typing import Any

from ...files import strict
from .verification import Opened, Verified


def as_json(found: Verified) -> dict[str, Any]:
    """All of it; what is no number is null."""
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
    """In a word: ``listed``, ``kin`` of the revealed birth, ``other model`` by its shape, ``stranger`` to the birth, or
    ``unlisted`` where nothing more is known."""
    if found.is_listed:
        return "listed"
    if found.other_shape:
        return "other model"
    if found.opened is None or not (found.opened.init_seed and found.opened.birth):
        return "unlisted"
    return "kin" if found.opened.is_kin else "stranger"


def sentence(found: Verified) -> str:
    """The answer in a sentence."""
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
    """The sentence, and below it what it rests on."""
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
    told = "kin of the birth" if kin.verdict else "no sign of the birth"
    more = "" if kin.verdict else "; `birthmark fingerprint` compares hidden states, which training turns less"
    return [*found, f"descent     {told}: the mean cosine of weights is {kin.cosine:.3f}, p {kin.p:.2g}{more}"]
