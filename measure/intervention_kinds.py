"""The interventions by name, for command lines; nothing here loads torch."""

from __future__ import annotations

from typing import Literal

Kind = Literal["mask", "amplify", "scale"]

#: What each does at its position, in a few words.
MEANINGS: dict[Kind, str] = {
    "mask": "its query sees itself only",
    "amplify": "its value aggregation moves from the mean",
    "scale": "it grows",
}
