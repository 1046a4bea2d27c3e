"""Arrays of a snapshot by probe: those of the text probe have a prefix."""

from __future__ import annotations

import numpy as np

from ..measure.records import Snapshot

PROBES = {"": "random", "text.": "text"}
"""Prefix of a probe's arrays → the probe's name."""

GROUPS = {"": "bias", "text.": "bias_text"}
"""Prefix of a probe's arrays → the group of its scalars in ``summary.json``."""


def measured_probes(snapshot: Snapshot) -> list[str]:
    """Return the prefixes of the probes on which a snapshot was measured."""
    return [
        prefix
        for prefix in PROBES
        if any(n.startswith(prefix) and "." not in n[len(prefix) :] for n in snapshot.arrays)
    ]


def arrays_of(snapshot: Snapshot, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of one probe, without its prefix."""
    names = {name: name.removeprefix(prefix) for name in snapshot.arrays if name.startswith(prefix)}
    return {short: snapshot.arrays[name] for name, short in names.items() if "." not in short}


def of_probe(prefix: str, key: str, caption: str) -> tuple[str, str]:
    """Return key and caption for a picture that exists once per probe."""
    return (f"{key}-{PROBES[prefix]}", f"{caption.rstrip('.')}; {PROBES[prefix]} probe.") if prefix else (key, caption)
