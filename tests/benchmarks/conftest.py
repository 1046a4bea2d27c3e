"""Benchmarks are scripts beside one another: their folder is on the path while these tests run."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def on_path():
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    # Names as plain as theirs must not stand for the modules of another test's folder.
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]
