"""A metric: how much each block's attention writes into the residual stream, beside its MLP."""

import torch
from torch import Tensor
from torchmetrics import Metric

from birthmark.metrics.quantity import Quantity, Sizes


class WriteRatio(Metric):
    """Mean norm of the attention's output over that of the MLP's, for each block."""

    quantities = (
        Quantity(
            "write_ratio",
            ("layer",),
            label="attention / MLP",
            definition="Mean norm of what the attention writes over that of what the MLP writes; 1 is as much.",
            section="sink",
            scalar="mean",
            per_block="mean",
            control=1.0,
            control_label="as much",
        ),
    )
    total: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(2, sizes.n_layers, dtype=torch.float64), "sum")

    def sublayer(self, site: str, layer: int, x_BTD: Tensor) -> None:
        """Receive the output of a block's attention or MLP."""
        self.update(int(site == "mlp"), layer - 1, x_BTD.norm(dim=-1))

    def update(self, place: int, block: int, norm_BT: Tensor) -> None:
        """Add the norms of a batch."""
        self.total[place, block] += norm_BT.double().sum()

    def compute(self) -> dict[str, Tensor]:
        """Return the ratio of each block."""
        return {"write_ratio": self.total[0] / self.total[1]}
