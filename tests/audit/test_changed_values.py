"""`birthmark audit`: single values that no training leaves are found."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from trained_suites import weights_file

from birthmark.audit.weight_samples import run_starts, sample
from birthmark.audit.weights import HeldWeights, open_safetensors


def flip(file, bit, at=1001):
    """Flip a bit of one value of the first large tensor."""
    weights = open_safetensors(file.parent)
    name = max(weights.entries, key=lambda n: weights.entries[n].numel)
    content = bytearray(file.read_bytes())
    content[weights.parts[name][0].offset + 4 * at + bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return name


def test_one_flipped_value_is_found(suite, audited):
    name = flip(weights_file(suite, 8), 30)
    found = audited(suite)
    assert found.kinds == {8: ["values"]}
    width = open_safetensors(suite / "step-8").entries[name].shape[1]
    assert f"{name}[{1001 // width}, {1001 % width}] is " in found.said[8]
    assert "where the median is" in found.said[8]


def test_a_copy_with_one_changed_value_is_no_copy(clean, tmp_path, audited):
    """Of a tensor that is large enough to be sampled, in a place that no sample has."""
    tensor = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    starts = run_starts("large", tensor.numel())
    assert starts
    free = next(i for i in range(tensor.numel()) if not any(start <= i < start + 64 for start in starts))
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        moved = tensor.clone()
        if step == 3:
            moved.view(-1)[free] += 1e-3
        save_file({"large": moved, "n": torch.arange(5)}, weights_file(tmp_path, step))
    found = audited(tmp_path)
    assert found.kinds == {1: ["duplicate"], 2: ["duplicate"], 3: ["values"]}
    assert "but for 1 of 90,005 values (first large[0, " in found.said[3]


def test_a_thousandth_of_the_bytes_is_read():
    weights = HeldWeights({"w": torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))})
    found = sample(weights, scan=False)
    assert found.bytes_read < 0.01 * found.n_bytes
    assert found.n_bytes == 4 << 21
    start = run_starts("w", 1 << 21)[3]
    np.testing.assert_array_equal(found.values["w"][3], weights.tensors["w"][start : start + 64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_that_no_training_leaves_are_found_in_every_type(dtype):
    whole = (0.02 * torch.randn(300, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = {}
    for value in (0.1, -4096.0, float("-inf"), float("nan")):
        weights = HeldWeights({"w": whole.clone(), "zeros": torch.zeros(3, dtype=dtype)})
        weights.tensors["w"][7 * 64 + 5] = value
        found[value] = sample(weights, scan=True).broken
    assert found.pop(0.1) == []
    assert [len(broken) for broken in found.values()] == [1, 1, 1]
    huge, *unbounded = (broken[0] for broken in found.values())
    assert huge.startswith("w[7, 5] is 4.1e+03 in size, where the median is 0.01")
    assert unbounded == ["w has 1 NaN or inf"] * 2
