"""Commitments: a hash that says nothing of a value until the value and a secret salt are shown, and then fits no other.

``SHA-256(domain ‖ 0 ‖ salt ‖ canonical JSON of the value)``. The salt, 32 random bytes, keeps seeds from being tried
one after another; the domain keeps what opens one commitment from opening another.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ...errors import UsageError
from ...files import atomic_path, one_line, read_json
from ...measure.records import RunDir
from ...schema import Bounds

#: In a run's folder; whoever has it can open the run's commitments.
SECRET = "certificate.secret.json"
_SALT_BYTES = 32
_DOMAIN = "birthmark certificate 1"
_WARNING = "Secret: with it anyone can find the seed of the certificate. Show it together with the seed, or never."

Salt = Annotated[str, Bounds(2 * _SALT_BYTES, 2 * _SALT_BYTES)]


class Secret(TypedDict):
    """``certificate.secret.json``."""

    kind: Literal["birthmark certificate secret"]
    warning: str
    salt: Salt
    data_order: dict[str, Any]


def canonical(value: Any) -> bytes:
    """What is hashed of a value: JSON without spaces, keys sorted, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def commitment(what: str, value: Any, salt: bytes) -> str:
    """The commitment to ``value`` as ``what`` (``init_seed``, ``birth``, ``data_order``), in hex."""
    return hashlib.sha256(f"{_DOMAIN} {what}\0".encode() + salt + canonical(value)).hexdigest()


def salt_of(text: str, where: str) -> bytes:
    """The salt that hexadecimal digits say; UsageError, beginning with ``where``, if they say none."""
    if re.fullmatch(f"[0-9a-fA-F]{{{2 * _SALT_BYTES}}}", text) is None:
        raise UsageError(f"{where} {one_line(text, 20)}: no salt; give the {2 * _SALT_BYTES} digits of {SECRET}")
    return bytes.fromhex(text)


def read_secret(file: Path) -> Secret:
    """A run's secret.

    Raises:
        RunError: it is missing or damaged.
    """
    found: Secret = read_json(file, Secret, f"give the {SECRET} of the run that was certified")
    return found


def keep_secret(run: RunDir, data_order: Mapping[str, Any]) -> bytes:
    """The salt of a run; drawn and written for its owner's eyes, unless an earlier certificate has one already.

    So commitments of one run stay the same: a certificate with more checkpoints commits to what the first one did.

    Raises:
        RunError: the file there is damaged.
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
    return salt_of(read_secret(file)["salt"], str(file))
