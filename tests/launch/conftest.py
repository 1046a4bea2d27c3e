"""A study of two arms on the tiny run."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

_ARMS = {"plain": {}, "headnorm": {"model.attention.aggregation": "headnorm"}}


@pytest.fixture(scope="session")
def arms():
    """Its arms, name → fields."""
    return dict(_ARMS)


@pytest.fixture(scope="session")
def study_file(tiny, arms):
    """``study_file(folder, overrides=None, **fields)``: write it and its base into ``folder``; the study's file.

    Overrides change the base; fields replace those of the study, None takes one away.
    """

    def write(folder, overrides=None, **fields):
        base = dataclasses.asdict(tiny({"snapshot.probes": ["random", "text"], **(overrides or {})}))
        del base["name"], base["run_dir"]
        (folder / "base.yaml").write_text(yaml.safe_dump(base))
        study = {"name": "tiny", "base": "base.yaml", "init_seeds": [0, 1], "arms": arms} | fields
        file = folder / "study.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in study.items() if v is not None}, sort_keys=False))
        return file

    return write
