"""What is known of GPUs: memory, links, peak FLOP/s. Light: the command line lists the names before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """What its vendor's data sheet says of a GPU."""

    part: str
    """Part of the name that its driver gives."""
    memory: float
    """Bytes, a GB as 10⁹."""
    link: float
    """Bytes per second that it sends to its neighbours in one machine, over NVLink or else PCIe."""
    peak: float | str
    """Peak of dense bf16 matrix products in FLOP/s; or the GPU's name in Lightning's table, which has the figure."""

    @property
    def bf16(self) -> float:
        """Peak of dense bf16 matrix products, FLOP/s, without sparsity."""
        if not isinstance(self.peak, str):
            return self.peak
        import torch
        from lightning.fabric.utilities.throughput import _CUDA_FLOPS

        return float(_CUDA_FLOPS[self.peak][torch.bfloat16])


#: GPUs by name; where one's part stands in another's, the longer comes first. Lightning's table lacks B200 and L40S; of
#: H200 it has the figure with sparsity, of H100 NVL that of two cards, of RTX GPUs that without tensor cores.
GPUS = {
    "h100-pcie-80gb": GPU("H100 PCIe", 80e9, 64e9, "h100 pcie"),
    "h100-nvl-94gb": GPU("H100 NVL", 94e9, 300e9, 835e12),
    "h100-80gb": GPU("H100", 80e9, 450e9, "h100 sxm"),
    "h200-141gb": GPU("H200", 141e9, 450e9, 989.4e12),
    "b200-192gb": GPU("B200", 192e9, 900e9, 2250e12),
    "a100-40gb": GPU("A100", 40e9, 300e9, "a100"),
    "a100-80gb": GPU("A100", 80e9, 300e9, "a100"),
    "l40s-48gb": GPU("L40S", 48e9, 32e9, 362e12),
    "rtx4090-24gb": GPU("RTX 4090", 24e9, 32e9, 165e12),
}


def find_gpu(driver_name: str) -> GPU | None:
    """The GPU that a driver names; None if it is not in the table. Those of one chip differ in memory only."""
    return next((gpu for gpu in GPUS.values() if gpu.part in driver_name), None)
