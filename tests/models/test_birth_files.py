"""Births written shard by shard are the births that stand in memory, and hold one shard at a time."""

import json
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from birthmark.models.birth import BLOCK, born, certificate, certificate_of, write_birth
from birthmark.models.config import AttentionConfig, InitConfig, ModelConfig
from birthmark.models.exchange.weight_files import SHARD_BYTES, split_into_shards

TINY = ModelConfig(
    d_model=16, n_layers=11, n_heads=2, n_kv_heads=1, d_ff=24, vocab_size=50, max_seq_len=8,
    norm="layernorm", mlp="swiglu", positions="learned", bias=True, attention=AttentionConfig("headnorm"),
)  # fmt: skip
CONFIGS = [TINY, replace(TINY, tie_embeddings=True), replace(TINY, init=InitConfig("orthogonal"))]
CONFIGS.append(replace(TINY, init=InitConfig("truncated_normal", zero=["head"])))
IDS = ["plain", "tied", "orthogonal", "truncated"]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_certificate_needs_no_model(config):
    seen = []
    record = certificate_of(config, 3, lambda name, values: seen.append((name, values.copy())))
    model = born(config, 3)
    assert record == certificate(model, config, 3)
    assert list(record["parameters"]) == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in seen] == sorted(name for name, _ in model.named_parameters())
    for name, values in seen:
        assert np.array_equal(values, model.get_parameter(name).detach().numpy()), name


@pytest.mark.heavy
@pytest.mark.parametrize("max_bytes", [1, 5000, 40_000, SHARD_BYTES])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_files_together_are_the_birth(config, max_bytes, tmp_path):
    record = write_birth(config, 3, tmp_path, max_bytes)
    model = born(config, 3)
    assert record == certificate(model, config, 3)
    expected = {name: p.detach().numpy() for name, p in model.named_parameters()}
    files = sorted(tmp_path.glob("*.safetensors"))
    total = sum(values.nbytes for values in expected.values())
    index = tmp_path / "model.safetensors.index.json"
    if max_bytes >= total:
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors"]
    else:
        n = len(files)
        assert n == (len(expected) if max_bytes == 1 else n)
        assert n >= total / max_bytes or max_bytes == 1
        assert [file.name for file in files] == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        said = json.loads(index.read_text())
        assert said["metadata"] == {"total_size": total}
        assert said["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    found: dict[str, np.ndarray] = {}
    for file in files:
        part = load_file(file)
        assert not found.keys() & part.keys()
        assert len(part) == 1 or sum(values.nbytes for values in part.values()) <= max_bytes
        found |= part
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}  # without it `transformers` refuses the file
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == found[name].dtype == np.float32
        assert np.array_equal(found[name], values), name


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 80))
def test_a_shard_ends_as_late_as_its_size_allows_and_names_keep_their_order(sizes, limit):
    named = {str(i): size for i, size in enumerate(sizes)}
    parts = split_into_shards(named, limit)
    assert [name for part in parts for name in part] == list(named)
    weights = [sum(named[name] for name in part) for part in parts]
    assert all(weight <= limit or len(part) == 1 for part, weight in zip(parts, weights, strict=True))
    # Nothing that begins a shard would have fitted into the one before.
    assert all(before + named[part[0]] > limit for before, part in zip(weights, parts[1:], strict=False))


TRACED = """
import os, sys, tracemalloc
from pathlib import Path
from birthmark.models.birth import write_birth
from birthmark.models.config import ModelConfig

os.cpu_count = lambda: 2
config = ModelConfig(d_model=128, n_layers=6, n_heads=4, vocab_size=8000, max_seq_len=8)
for folder in ("first", "second"):  # what is imported or cached on the way is there the second time
    Path(folder).mkdir()
    tracemalloc.start()
    write_birth(config, 0, Path(folder), int(sys.argv[1]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
print(peak)
"""


@pytest.mark.parametrize("limit", [1, 5_000_000])
def test_nothing_large_lives_beside_the_shard(limit, tmp_path, python):
    """numpy's memory is traced, in a process without the threads of other tests; two parameters that follow one another
    hold 4 MB each. A block that is drawn takes eight times its values.
    """
    command = [python, "-c", TRACED, str(limit)]
    peak = int(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout)
    blocks_being_drawn = 8 * 4 * BLOCK * 2
    assert peak < max(limit, 4 * 8000 * 128) + blocks_being_drawn + 500_000
