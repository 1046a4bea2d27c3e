"""Suites of checkpoints, and what the command says of them."""

import json
import shutil
from types import SimpleNamespace

import pytest
from trained_suites import train

from birthmark.launch.cli import main


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    return train(0, tmp_path_factory.mktemp("suites") / "clean")


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("suites") / "other")


@pytest.fixture
def suite(clean, tmp_path):
    """One to plant faults in."""
    return shutil.copytree(clean, tmp_path / "suite")


@pytest.fixture
def audited(capsys):
    """``audited(*names, status=…)``: what the command prints, and the kinds of findings by step."""

    def run(*names, status=3):
        capsys.readouterr()
        assert main(["audit", *map(str, names), "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        kinds = {one["step"]: [f["kind"] for f in one["findings"]] for one in found["checkpoints"] if one["findings"]}
        said = {one["step"]: " | ".join([*(f["what"] for f in one["findings"]), *one["notes"]])
                for one in found["checkpoints"]}  # fmt: skip
        return SimpleNamespace(json=found, kinds=kinds, said=said)

    return run
