"""Check that the observed attention of a model of ``transformers`` equals the model's own, up to the rounding of its
dtype.

Each attention module is compared alone: in the observed pass its output is replaced by that of the model's own pass, so
that the next one reads the same input in both, and rounding does not add up over blocks. The tolerance is measured too:
the module is called once more with every number in its attention perturbed by the rounding of the dtype.

Legend: T positions, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .observed_pass import ObservedPass, first_of

#: Largest allowed ratio of the distance of one row, and of all rows together, to the distance of the perturbed module.
#: Seen at most: half of that, over every family of the table in each dtype, eager and fused, also with scores of 100.
_ROW, _ROWS = 4.0, 2.0
#: The same of logits that follow from the same outputs of all attentions: as a rule they are equal.
_LOGITS = 4.0


class SameAttention:
    """The outputs of a model's attention modules in its own pass, and the distance of an observed pass from them.

    Args:
        modules: the attention modules.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self.modules = modules
        self._own: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self._times: dict[int, float] = {}
        self._again = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the outputs of the model's own pass, run within the context."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._own[module].append(first_of(output).clone())

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(keep).remove)
            yield

    @contextmanager
    def comparing(self, observed: ObservedPass) -> Iterator[None]:
        """Compare the observed pass, run within the context, which continues with the model's own outputs."""
        calls = dict.fromkeys(self.modules, 0)

        def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if self._again:
                return None
            own, calls[module] = self._own[module][calls[module]], calls[module] + 1
            self._again = True
            try:
                with observed.rounding():
                    moved = first_of(module(*args, **kwargs))
            finally:
                self._again = False
            layer = observed.layer
            self._times[layer] = max(self._times.get(layer, 0.0), times_allowed(own, first_of(output), moved))
            return _with_first(output, own.clone())

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
            yield

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Perturb the model's own outputs by their rounding, in a pass run within the context."""
        calls = dict.fromkeys(self.modules, 0)

        def move(module: nn.Module, args: Any, output: Any) -> Any:
            own, calls[module] = self._own[module][calls[module]], calls[module] + 1
            signs = torch.ones(own.shape[-1], dtype=own.dtype, device=own.device)
            signs[::2] = -1
            return _with_first(output, own * (1 + torch.finfo(own.dtype).eps * signs))

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(move).remove)
            yield

    def first_other(self) -> tuple[int, float] | None:
        """Return the first block whose attention differs: its number, and its distance over the one that rounding
        allows; None if all agree.
        """
        return next(((layer, times) for layer, times in sorted(self._times.items()) if times > 1), None)


def times_allowed(own: Tensor, observed: Tensor, moved: Tensor) -> float:
    """Compute the distance of an observed output ``[…, T, D]`` from the model's own, over the allowed one; 0 if
    undefined, as for values that are not finite.

    Args:
        own: output of the model.
        observed: output that may differ by rounding.
        moved: the observed output, with its attention perturbed by rounding.
    """
    rounding = torch.finfo(own.dtype).eps / 2
    eager_TD, observed_TD, moved_TD = (x.double().flatten(0, -2) for x in (own, observed, moved))
    # A channel of massive activations counts as much as another.
    size_D = eager_TD.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    off_T = ((observed_TD - eager_TD) / size_D).norm(dim=1)
    allowed_T = ((moved_TD - observed_TD) / size_D).norm(dim=1) + rounding * (observed_TD / size_D).norm(dim=1)
    finite = off_T.isfinite() & allowed_T.isfinite()
    if not bool(finite.any()):
        return 0.0
    off_T, allowed_T = off_T[finite], allowed_T[finite].clamp_min(torch.finfo(torch.float64).tiny)
    return max(float((off_T / allowed_T).max()) / _ROW, float(off_T.norm() / allowed_T.norm()) / _ROWS)


def times_of_logits(off: Tensor, allowed: Tensor) -> float:
    """Compute the distance of logits that follow from the same outputs of all attentions, over the allowed one.

    Args:
        off: the difference of an observed pass that continued with the model's own outputs.
        allowed: the difference of a pass that continued with these outputs perturbed by rounding.
    """
    return float(off.double().norm() / allowed.double().norm().clamp_min(torch.finfo(torch.float64).tiny)) / _LOGITS


def _with_first(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first
