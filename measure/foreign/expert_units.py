"""Hidden units of experts of ``transformers``, which are the input of no module there.

All families keep their experts' maps in one module, as one tensor per map with an entry for each expert, and declare
the layout. The activations are computed again: the library's way depends on the packages installed.

Legend: N tokens, D width, K experts of a token, R tokens of one expert, F its hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...models.tensor_shards import full_shape

#: Attributes by which a module of experts says how they are computed.
_SAID = ("num_experts", "down_proj", "has_gate", "has_bias", "is_transposed", "_apply_gate")


def expert_width(experts: Any) -> int:
    """Return the number of hidden units of an expert; 0 if the module does not show their computation."""
    if not all(hasattr(experts, name) for name in _SAID):
        return 0
    return full_shape(experts.down_proj)[1 if experts.is_transposed else 2]


def show_expert_units(
    show: Callable[[int, Tensor, Tensor], None], experts: Any, x_ND: Tensor, chosen_NK: Tensor, n_positions: int
) -> None:
    """Show each expert's (from 0) activations ``[R, F]``, for its tokens, and their positions ``[R]``.

    Args:
        show: called with them.
        experts: the module, whose weights are whole, or lie where ``accelerate`` keeps them.
        x_ND: input of the module, all positions of all sequences in one axis.
        chosen_NK: each token's experts.
        n_positions: T.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    with weights_here(experts):
        weight, bias = getattr(experts, first), getattr(experts, f"{first}_bias", None)
        for expert in range(experts.num_experts):
            token_R = (chosen_NK == expert).any(-1).nonzero()[:, 0]
            map_of = weight[expert] if experts.is_transposed else weight[expert].T
            y = x_ND[token_R] @ map_of
            if experts.has_bias and bias is not None:
                y = y + bias[expert]
            show(expert, experts._apply_gate(y) if experts.has_gate else experts.act_fn(y), token_R % n_positions)


@contextmanager
def weights_here(module: nn.Module) -> Iterator[None]:
    """Bring the module's weights into memory within the context, if ``accelerate`` keeps them elsewhere between
    passes.
    """
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield
