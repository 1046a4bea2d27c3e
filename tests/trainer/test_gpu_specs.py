import pytest

from birthmark.trainer.gpu_specs import GPUS, find_gpu

#: Names that drivers give → TFLOP/s of dense bf16 matrix products in the vendor's data sheets, rounded.
DATA_SHEETS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA B200": 2250,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_driver_s_name_finds_the_data_sheet_s_peak(name):
    found = find_gpu(name)
    assert found is not None
    assert int(found.bf16 / 1e12) == DATA_SHEETS[name]


@pytest.mark.parametrize("name", ["NVIDIA L4", "NVIDIA L40", "NVIDIA RTX A6000", "Tesla T4"])
def test_an_unknown_gpu_has_no_peak(name):
    assert find_gpu(name) is None


def test_every_gpu_is_found_by_its_own_part():
    for gpu in GPUS.values():
        found = find_gpu(f"NVIDIA {gpu.part}")
        assert found is not None
        assert found.bf16 == gpu.bf16
