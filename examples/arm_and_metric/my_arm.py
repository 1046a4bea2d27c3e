"""An attention arm: weights are the softplus of single scores, in rows that need not sum to 1."""

from torch import Tensor
from torch.nn import functional as F

from birthmark.models.attention.normalisers import Similarity


class Softplus(Similarity):
    """Weights ``log(1 + exp(s))``: a head attends by as much as it likes."""

    def phi(self, scores: Tensor) -> Tensor:
        """Compute the weight of each score."""
        return F.softplus(scores)
