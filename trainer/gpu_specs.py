"""Specifications of GPUs: memory, links, peak FLOP/s. Light: the command line lists the names before torch is
loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes that torch gives cuBLAS to work with, on GPUs before Hopper (2 of 4096 KiB and 8 of 16) and from it on (aten,
#: CUDABlas.cpp).
BEFORE_HOPPER, FROM_HOPPER = 2 * 2**22 + 8 * 2**14, 2**25


@dataclass(frozen=True)
class GPU:
    """Specifications from a GPU's data sheet."""

    part: str
    """Part of the name that its driver gives."""
    memory: float
    """Bytes, a GB as 10⁹."""
    link: float
    """Bytes per second that it sends to its neighbours in one machine, over NVLink or else PCIe."""
    peak: float | str
    """Peak of dense bf16 matrix products in FLOP/s; or the GPU's name in Lightning's table, which has the figure."""
    workspace: int
    """Bytes that cuBLAS works with, in each thread that calls it."""

    @property
    def bf16(self) -> float:
        """Peak of dense bf16 matrix products, FLOP/s, without sparsity."""
        if not isinstance(self.peak, str):
            return self.peak
        import torch
        from lightning.fabric.utilities.throughput import _CUDA_FLOPS

        return float(_CUDA_FLOPS[self.peak][torch.bfloat16])


#: GPUs by name; if one's part is contained in another's, the longer comes first. Lightning's table lacks B200 and L40S;
#: for H200 it has the figure with sparsity, for H100 NVL that of two cards, for RTX GPUs that without tensor cores.
GPUS = {
    "h100-pcie-80gb": GPU("H100 PCIe", 80e9, 64e9, "h100 pcie", FROM_HOPPER),
    "h100-nvl-94gb": GPU("H100 NVL", 94e9, 300e9, 835e12, FROM_HOPPER),
    "h100-80gb": GPU("H100", 80e9, 450e9, "h100 sxm", FROM_HOPPER),
    "h200-141gb": GPU("H200", 141e9, 450e9, 989.4e12, FROM_HOPPER),
    "b200-192gb": GPU("B200", 192e9, 900e9, 2250e12, FROM_HOPPER),
    "a100-40gb": GPU("A100", 40e9, 300e9, "a100", BEFORE_HOPPER),
    "a100-80gb": GPU("A100", 80e9, 300e9, "a100", BEFORE_HOPPER),
    "l40s-48gb": GPU("L40S", 48e9, 32e9, 362e12, BEFORE_HOPPER),
    "rtx4090-24gb": GPU("RTX 4090", 24e9, 32e9, 165e12, BEFORE_HOPPER),
}


def find_gpu(driver_name: str) -> GPU | None:
    """Return the GPU that a driver names; None if it is not in the table. GPUs of one chip differ only in memory."""
    return next((gpu for gpu in GPUS.values() if gpu.part in driver_name), None)
